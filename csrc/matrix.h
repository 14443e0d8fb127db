// From what the caller says about a packed matrix to a checked Matrix.
#ifndef TRILOBITE_MATRIX_H
#define TRILOBITE_MATRIX_H
#include "common.h"

namespace trilobite {

// Largest side of a matrix, and rank: products of sizes stay within int64.
constexpr int64_t MOST_SIDE = 1 << 30;

// Leaves a line for trilobite_error() and returns false, so that checks read `return fail(...)`.
bool fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *last_error();

inline bool known_dtype(int64_t d) { return d == TRILOBITE_F32 || d == TRILOBITE_F16 || d == TRILOBITE_BF16; }
inline bool known_digits(int64_t d) { return d == TRILOBITE_EXACT || d == TRILOBITE_INT8; }

// Fill the derived fields. False (with a message) when the numbers describe no format.
bool describe(const trilobite_matrix &w, Matrix *m);

// Row [TRILOBITE_COLUMNS] of an expert table -> Matrix [n, k]; `present` is false where the row says "no matrix". `in` and
// `out`: the transforms of length k and n.
bool from_table(const uint8_t *slab, int64_t slab_bytes, const int64_t *row, int64_t n, int64_t k,
                const trilobite_rotation *in, const trilobite_rotation *out, Matrix *m, bool *present);

// Whether the orders of the cores and a power of two multiply to n.
bool fits(const trilobite_rotation *r, int64_t n);

// The second stage of a lattice matrix that has one; its results are added.
Matrix second_stage(const Matrix &first);

// Whether codes of `bits` bits come in groups of `group` columns.
inline bool is_group(int64_t group, int64_t bits) {
  return (group == HALF && bits != 3) || (group >= BLOCK && group % BLOCK == 0);
}

// Whether a matrix of k columns has groups of `group` columns of `bits` bits under super-scales; columns of its tiles.
inline bool is_under_super(int64_t k, int64_t group, int64_t bits) {
  return k > 0 && k % BLOCK == 0 && (group == HALF || group == BLOCK) && bits >= 2 && bits <= 4;
}
inline int64_t tile_width(int64_t k) { return k % (2 * BLOCK) ? BLOCK : 2 * BLOCK; }

// Columns of a segment that suits groups of `group` columns: 64, 32 or 16.
inline int segment(int64_t group) { return group % 64 == 0 ? 64 : group % BLOCK == 0 ? BLOCK : HALF; }

}  // namespace trilobite
#endif
