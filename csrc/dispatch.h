#ifndef TRILOBITE_DISPATCH_H
#define TRILOBITE_DISPATCH_H
#include <string>

#include "common.h"

namespace trilobite {

// The tier in use: the best that this machine has and TRILOBITE_ISA allows.
const Tier &tier();

// Choose the best tier up to `cap` (NULL: any). False for an unknown name.
bool choose_tier(const char *cap);

// Why it is not the next better one: what this machine lacks, or that it is capped; empty where there is no better one.
std::string better_tier();

}  // namespace trilobite
#endif
