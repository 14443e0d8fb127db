// A tier of vectors alone: all of its kernels, in a namespace of the translation unit, which names the tier
// (TRILOBITE_TIER_NAME), its table (TRILOBITE_TIER) and the header with its `Isa` (TRILOBITE_ISA).
#include <math.h>
#include <string.h>

#include "common.h"
#include "quantize.h"

namespace trilobite {
namespace {  // every tier has its own copy, compiled with its own flags
#include "kernel/convert.h"
#include "kernel/spread.h"
#include TRILOBITE_ISA
#include "kernel/lattice.h"
#include "kernel/decode.h"
#include "kernel/digits.h"
#include "kernel/group_sums.h"
#include "kernel/rows.h"
#include "kernel/panel.h"
#include "kernel/pass.h"
#include "kernel/short.h"
#include "kernel/short_many.h"
#include "kernel/words.h"
#include "kernel/many.h"
constexpr auto rows_tier = rows_vectors;
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

extern const Tier TRILOBITE_TIER;
const Tier TRILOBITE_TIER = {TRILOBITE_TIER_NAME,
                             0,
                             parts_vectors,
                             quantize_block,
                             quantize_columns,
                             rows_vectors,
                             low_rank_v,
                             low_rank_u,
                             activate,
                             attend,
                             attend_join,
                             attend_prompt,
                             dense_rows,
                             convolve,
                             delta,
                             scan,
                             store_floats,
                             map_elements,
                             sum_rows,
                             softmax_rows,
                             read_bytes,
                             spin,
                             rotate,
                             quantize_tile,
                             quantize_span,
                             Isa::LANES,
                             feed_back,
                             descend};
}  // namespace trilobite
