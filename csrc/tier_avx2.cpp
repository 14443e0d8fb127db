// AVX2, FMA, F16C and BMI2.
#include <immintrin.h>

#define TRILOBITE_ISA "kernel/isa_avx2.h"
#define TRILOBITE_TIER_NAME "avx2"
#define TRILOBITE_TIER tier_avx2
#include "tier_vectors.h"
