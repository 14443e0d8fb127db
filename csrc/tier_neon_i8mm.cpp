// ARM: NEON with dot products and products of matrices of bytes.
#include <arm_neon.h>

#define TRILOBITE_ISA "kernel/isa_neon.h"
#define TRILOBITE_TIER_NAME "neon_i8mm"
#define TRILOBITE_TIER tier_neon_i8mm
#include "tier_vectors.h"
