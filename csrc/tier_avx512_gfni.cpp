// AVX-512 with VNNI and GFNI, one instruction for a field of every byte: Ice Lake.
#include <immintrin.h>

#define TRILOBITE_ISA "kernel/isa_avx512.h"
#define TRILOBITE_TIER_NAME "avx512_gfni"
#define TRILOBITE_TIER tier_avx512_gfni
#include "tier_vectors.h"
