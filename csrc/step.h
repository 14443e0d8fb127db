// What the check of a list of nodes and its run share.
#ifndef TRILOBITE_STEP_H
#define TRILOBITE_STEP_H
#include "common.h"

namespace trilobite {

inline int64_t size_of(int64_t dtype) { return dtype == TRILOBITE_F32 ? 4 : dtype == TRILOBITE_BOOL ? 1 : 2; }

constexpr int64_t WIDEST = 1024;  // values of a row of which the largest are taken

// False after leaving a message: rows of a cache of such heads do not lie in its memory.
bool lies(const trilobite_step_cache &c, int64_t dtype, int64_t heads, int64_t width);

// `trilobite_step`, which may throw.
int step(const trilobite_step_node *nodes, int64_t count, int64_t threads);

}  // namespace trilobite
#endif
