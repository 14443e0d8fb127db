// AVX-512 with VNNI, and AMX int8 tiles from a few tokens on.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "common.h"
#include "quantize.h"

namespace trilobite {
namespace {  // every tier has its own copy, compiled with its own flags
#include "kernel/convert.h"
#include "kernel/spread.h"
#include "kernel/isa_avx512.h"
#include "kernel/lattice.h"
#include "kernel/decode.h"
#include "kernel/digits.h"
#include "kernel/group_sums.h"
#include "kernel/rows.h"
#include "kernel/panel.h"
#include "kernel/pass.h"
#include "kernel/short.h"
#include "kernel/amx.h"
constexpr auto rows_tier = rows_amx;
#include "kernel/low_rank.h"
#include "kernel/activation.h"
#include "kernel/attention.h"
#include "kernel/attention_prompt.h"
#include "kernel/dense.h"
#include "kernel/small.h"
#include "kernel/states.h"
#include "kernel/probe.h"
#include "kernel/quantize.h"
#include "kernel/quantize_super.h"
#include "kernel/feedback.h"
#include "kernel/hadamard.h"
}  // namespace

extern const Tier tier_amx;
const Tier tier_amx = {"amx",         sizeof(Panel) + 64, parts_amx,  quantize_block, quantize_columns, rows_amx,
                       low_rank_v,    low_rank_u,         activate,   attend,         attend_join,      attend_prompt,
                       dense_rows,    convolve,           delta,      scan,           store_floats,     map_elements,
                       sum_rows,      softmax_rows,       read_bytes, spin_tiles,     rotate,           quantize_tile,
                       quantize_span, Isa::LANES,         feed_back,  descend};
}  // namespace trilobite
