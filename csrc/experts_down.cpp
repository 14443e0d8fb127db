// The last phases of a layer of experts: down projections, summed with the routing weights in the order of the experts.
#include <string.h>

#include <algorithm>

#include "dispatch.h"
#include "experts.h"

namespace trilobite {

int down_bands(const ExpertsCall &c, int threads) {
  const int64_t bands = ceil_div(c.a.hidden, ROWS);
  int most = c.tokens >= 64 ? 4 : 1;
  while (most > 1 && bands < (int64_t)most * UNIT_BANDS * threads * 4) most /= 2;
  return most * UNIT_BANDS;
}

namespace {

using Call = ExpertsCall;

constexpr int64_t COLUMNS = 256;  // of the result that a task adds up

// Columns of the result for a token, in whose `sum` lies what calls before this one left.
void begin_sum(const Call &c, int64_t token, int64_t column, int64_t width, float *sum) {
  if (c.a.sums) memcpy(sum, c.a.sums + (c.start + token) * c.a.hidden + column, width * sizeof(float));
  else memset(sum, 0, width * sizeof(float));
}

void end_sum(const Call &c, int64_t token, int64_t column, int64_t width, const float *sum) {
  const int64_t at = (c.start + token) * c.a.hidden + column;
  if (c.a.sums) memcpy(c.a.sums + at, sum, width * sizeof(float));
  c.t.store(sum, width, (uint8_t *)c.a.y + at * element_size(c.a.dtype), (int)c.a.dtype);
}

// Rows [band * 16, ...) of the layer's result, all experts and tokens.
void rows_together(const Call &c, int64_t band, int bands, float *sum, float *out, void *scratch) {
  const int64_t ld = ceil_div(bands, UNIT_BANDS) * UNIT, row = band * ROWS;
  const int64_t width = std::min<int64_t>(bands * ROWS, c.a.hidden - row);
  for (int64_t t = 0; t < c.tokens; t++) begin_sum(c, t, row, width, sum + t * ld);
  for (int64_t i = 0; i < c.count; i++) {
    const Active &e = c.active[i];
    product(c.t, e.down, band, bands, e.h, e.z_down, out, ld, scratch);
    add_bias(c.a, c.a.down_bias, e.expert * c.a.hidden + row, width, e.count, out, ld);
    for (int t = 0; t < e.count; t++) {
      const float w = c.weight[e.first + t];
      float *s = sum + c.token[e.first + t] * ld, *o = out + t * ld;
      for (int64_t j = 0; j < width; j++) s[j] += w * o[j];
    }
  }
  for (int64_t t = 0; t < c.tokens; t++) end_sum(c, t, row, width, sum + t * ld);
}

// A unit of an expert's results.
void unit_apart(const Call &c, const Active &e, int64_t unit, float *out, void *scratch) {
  const int64_t band = first_band(e.down, unit, UNIT_BANDS), hidden = c.a.hidden;
  const int bands = (int)std::min<int64_t>(UNIT_BANDS, e.down.bands - band);
  product(c.t, e.down, band, bands, e.h, e.z_down, out, UNIT, scratch);
  for_pieces(e.down, band, bands, [&](int64_t row, int64_t width, int64_t column) {
    add_bias(c.a, c.a.down_bias, e.expert * hidden + row, width, e.count, out + column, UNIT);
    for (int t = 0; t < e.count; t++)
      memcpy(c.results + (e.first + t) * hidden + row, out + t * UNIT + column, width * sizeof(float));
  });
}

// Columns of the layer's result for a token.
void add_up(const Call &c, int64_t token, int64_t column) {
  const int64_t width = std::min(COLUMNS, c.a.hidden - column);
  float sum[COLUMNS];
  begin_sum(c, token, column, width, sum);
  for (const int32_t *p = c.pairs + token * c.a.active, *end = p + c.a.active; p < end && *p >= 0; p++) {
    const float w = c.weight[*p], *y = c.results + *p * c.a.hidden + column;
    for (int64_t j = 0; j < width; j++) sum[j] += w * y[j];
  }
  end_sum(c, token, column, width, sum);
}

}  // namespace

void down_together(const ExpertsCall &c, Member &me, int most, Workspace &ws, void *scratch) {
  const int64_t per_task = down_bands(c, me.threads()), bands = ceil_div(c.a.hidden, ROWS);
  float *sum = ws.get<float>(c.tokens * per_task * ROWS), *out = ws.get<float>(most * per_task * ROWS);
  me.share(ceil_div(bands, per_task), [&](int64_t i) {
    rows_together(c, i * per_task, (int)std::min(per_task, bands - i * per_task), sum, out, scratch);
  });
}

void down_apart(const ExpertsCall &c, Member &me, int most, Workspace &ws, void *scratch) {
  float *out = ws.get<float>(most * UNIT);
  share_flat(
      c, me, [](const Active &e) { return units(e.down); },
      [&](Active &e, int64_t u) { unit_apart(c, e, u, out, scratch); });
  const int64_t pieces = ceil_div(c.a.hidden, COLUMNS);
  me.share(c.tokens * pieces, [&](int64_t i) { add_up(c, i / pieces, i % pieces * COLUMNS); });
}

}  // namespace trilobite
