// Portable tier: no instruction-set flags.
#include <stdint.h>

#define TRILOBITE_ISA "kernel/isa_scalar.h"
#define TRILOBITE_TIER_NAME "scalar"
#define TRILOBITE_TIER tier_scalar
#include "tier_vectors.h"
