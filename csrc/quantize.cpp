// Quantize rows of a matrix tile by tile (the loops of trilobite/quantize/matrix.py).
#include "quantize.h"

#include "dispatch.h"
#include "engine.h"
#include "matrix.h"
#include "pool.h"

namespace trilobite {
namespace {

QuantizeTile tile_at(const trilobite_quantize_args &a, int64_t band, int64_t g, void *scratch) {
  const int64_t groups = a.k / a.group, row = band * ROWS, line = row * groups + g, first = row * a.k + g * a.group;
  const int64_t tile = a.group * ROWS * a.bits / 8 + ROWS * (a.symmetric ? 2 : 4);
  QuantizeTile t{};
  t.w = a.w + first;
  t.scale = a.scale + line;
  t.offset = a.offset ? a.offset + line : nullptr;
  t.weight = a.weight ? a.weight + g * a.group : nullptr;
  t.original = a.original ? a.original + first : nullptr;
  t.values = a.values ? a.values + first : nullptr;
  t.packed = a.packed ? a.packed + (band * groups + g) * tile : nullptr;
  t.scratch = scratch;
  t.ld = a.k;
  t.line_ld = groups;
  t.rows = (int)(a.rows - row < ROWS ? a.rows - row : ROWS);
  t.group = (int)a.group;
  t.bits = (int)a.bits;
  t.method = (int)a.method;
  t.steps = (int)a.steps;
  t.symmetric = a.symmetric != 0;
  t.given = a.given != 0;
  return t;
}

// Columns [column, column + SPAN) of a band, under super-scales.
QuantizeTile span_at(const trilobite_quantize_args &a, int64_t band, int64_t column, void *scratch) {
  const int64_t width = tile_width(a.k);
  const int64_t tile = width * ROWS * a.bits / 8 + ROWS * width / a.group;
  QuantizeTile t = tile_at(a, band, column / a.group, scratch);
  t.packed = a.packed ? a.packed + (band * (a.k / width) + column / width) * tile : nullptr;
  t.super = a.super + (band * ceil_div(a.k, SPAN) + column / SPAN) * 2 * ROWS;
  t.tile_columns = (int)width;
  return t;
}

}  // namespace

bool quantize(const trilobite_quantize_args &a) {
  if (a.super) {
    if (!a.offset || a.symmetric || a.rows < 0 || !is_under_super(a.k, a.group, a.bits))
      return fail("quantize: %lld bits, group %lld of %lld columns under super-scales", (long long)a.bits,
                  (long long)a.group, (long long)a.k);
    run_team(a.threads < 1 ? 1 : (int)a.threads, [&](Member &me) {
      void *scratch = worker_workspace().get<uint8_t>(SPAN * (sizeof(float) * ROWS + ROWS));
      me.share(ceil_div(a.rows, ROWS), [&](int64_t band) {
        for (int64_t c = 0; c < a.k; c += SPAN)
          tier().quantize_span(span_at(a, band, c, scratch), (int)(a.k - c < SPAN ? a.k - c : SPAN));
      });
    });
    return true;
  }
  const bool bits = a.bits == 2 || a.bits == 3 || a.bits == 4 || a.bits == 8;
  if (!bits || !is_group(a.group, a.bits) || a.k % a.group || a.k % BLOCK || a.rows < 0 || a.group > (1 << 24))
    return fail("quantize: %lld bits, group %lld of %lld columns", (long long)a.bits, (long long)a.group,
                (long long)a.k);
  if (!a.symmetric && !a.offset) return fail("quantize: no room for offsets");
  const int64_t groups = a.k / a.group;
  run_team(a.threads < 1 ? 1 : (int)a.threads, [&](Member &me) {
    void *scratch = worker_workspace().get<uint8_t>(a.group * (sizeof(float) * ROWS + ROWS));
    me.share(ceil_div(a.rows, ROWS), [&](int64_t band) {
      for (int64_t g = 0; g < groups; g++) tier().quantize_tile(tile_at(a, band, g, scratch));
    });
  });
  return true;
}

}  // namespace trilobite
