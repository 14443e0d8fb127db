// Quantize rows of a matrix tile by tile (the loops of trilobite/quantize/matrix.py).
#include "quantize.h"

#include <stdlib.h>

#include "dispatch.h"
#include "engine.h"
#include "matrix.h"
#include "pool.h"

namespace trilobite {
namespace {

// Work buffer of the calling thread, 64-byte aligned.
struct Scratch {
  void *data;
  explicit Scratch(size_t bytes) : data(aligned_alloc(64, (bytes + 63) / 64 * 64)) {}
  ~Scratch() { free(data); }
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;
};

QuantizeTile tile_at(const trilobite_quantize_args &a, int64_t band, int64_t g, void *scratch) {
  const int64_t groups = a.k / a.group, row = band * ROWS, line = row * groups + g, first = row * a.k + g * a.group;
  const int64_t tile = a.group / BLOCK * 64 * a.bits + ROWS * (a.symmetric ? 2 : 4);
  QuantizeTile t{};
  t.w = a.w + first;
  t.scale = a.scale + line;
  t.offset = a.offset ? a.offset + line : nullptr;
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
  return t;
}

}  // namespace

bool quantize(const trilobite_quantize_args &a) {
  const bool bits = a.bits == 2 || a.bits == 3 || a.bits == 4 || a.bits == 8;
  if (!bits || a.group < BLOCK || a.group % BLOCK || a.k % a.group || a.rows < 0 || a.group > (1 << 24))
    return fail("quantize: %lld bits, group %lld of %lld columns", (long long)a.bits, (long long)a.group, (long long)a.k);
  if (!a.symmetric && !a.offset) return fail("quantize: no room for offsets");
  const int64_t groups = a.k / a.group;
  bool enough = true;
  run_team(a.threads < 1 ? 1 : (int)a.threads, [&](Team &team, int thread) {
    Scratch scratch((size_t)a.group * (sizeof(float) * ROWS + ROWS));
    if (!scratch.data) enough = false;
    team.share(thread, 0, ceil_div(a.rows, ROWS), [&](int64_t band) {
      for (int64_t g = 0; scratch.data && g < groups; g++) tier().quantize_tile(tile_at(a, band, g, scratch.data));
    });
  });
  return enough ? true : fail("quantize: out of memory");
}

}  // namespace trilobite
