// AVX2 with VNNI on 256 bits: laptops since Alder Lake.
#include <immintrin.h>

#define TRILOBITE_ISA "kernel/isa_avx2.h"
#define TRILOBITE_TIER_NAME "avx_vnni"
#define TRILOBITE_TIER tier_avx_vnni
#include "tier_vectors.h"
