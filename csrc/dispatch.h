#ifndef TRILOBITE_DISPATCH_H
#define TRILOBITE_DISPATCH_H
#include "common.h"

namespace trilobite {

// The tier in use: the best that this machine has and TRILOBITE_ISA allows.
const Tier &tier();

// Choose the best tier up to `cap` (NULL: any). False for an unknown name.
bool choose_tier(const char *cap);

}  // namespace trilobite
#endif
