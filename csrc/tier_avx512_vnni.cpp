// AVX-512 with VNNI, one instruction for four byte products a lane: Cascade Lake.
#include <immintrin.h>

#define TRILOBITE_ISA "kernel/isa_avx512.h"
#define TRILOBITE_TIER_NAME "avx512_vnni"
#define TRILOBITE_TIER tier_avx512_vnni
#include "tier_vectors.h"
