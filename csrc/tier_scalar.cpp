// Portable tier: no instruction-set flags.
#include <math.h>
#include <string.h>

#include "common.h"
#include "quantize.h"

namespace trilobite {
namespace {  // every tier has its own copy, compiled with its own flags
#include "kernel/convert.h"
#include "kernel/isa_scalar.h"
#include "kernel/decode.h"
#include "kernel/digits.h"
#include "kernel/rows.h"
constexpr auto rows_tier = rows_few;
#include "kernel/low_rank.h"
#include "kernel/activation.h"
#include "kernel/probe.h"
#include "kernel/quantize.h"
#include "kernel/quantize_super.h"
#include "kernel/hadamard.h"
}  // namespace

extern const Tier tier_scalar;
const Tier tier_scalar = {"scalar",   0,          no_parts,   quantize_block, quantize_columns,
                          rows_few,   low_rank_v, low_rank_u, activate,       store_floats,
                          read_bytes, spin_dots,  rotate,     quantize_tile,  quantize_span};
}  // namespace trilobite
