// ARM: NEON with dot products.
#include <arm_neon.h>

#define TRILOBITE_ISA "kernel/isa_neon.h"
#define TRILOBITE_TIER_NAME "neon"
#define TRILOBITE_TIER tier_neon
#include "tier_vectors.h"
