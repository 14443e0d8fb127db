// AVX-512 F, BW, VL, DQ, without VNNI: Skylake's servers.
#include <immintrin.h>

#define TRILOBITE_ISA "kernel/isa_avx512.h"
#define TRILOBITE_TIER_NAME "avx512"
#define TRILOBITE_TIER tier_avx512
#include "tier_vectors.h"
