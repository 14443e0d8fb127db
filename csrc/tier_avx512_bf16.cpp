// AVX-512 with VNNI, GFNI and BF16: Zen 4, Zen 5.
#include <immintrin.h>

#define TRILOBITE_ISA "kernel/isa_avx512.h"
#define TRILOBITE_TIER_NAME "avx512_bf16"
#define TRILOBITE_TIER tier_avx512_bf16
#include "tier_vectors.h"
