// All routed experts of one MoE layer for one token, in one job. Tasks follow each other through an expert's matrices, so that
// what a thread reads are long streams (spread_bands), and are so small that threads finish together. Phases, with a wait after
// each:
//   1  V x of gate and up, where they have compensators
//   2  (active expert x unit of gate and up): products, activation; the last one of an expert turns them into digits
//   3  V h of down, where it has a compensator
//   4  (active expert x unit of down): products
//   5  (columns): the experts' results, summed with the routing weights in the order of the experts
#include <string.h>

#include <algorithm>
#include <atomic>
#include <new>

#include "dispatch.h"
#include "experts.h"
#include "matrix.h"

namespace trilobite {
namespace {

using Call = ExpertsCall;

constexpr int64_t COLUMNS = 256;  // of a task of the last phase

// What becomes of an active expert's x.
struct Made {
  float *h, *y;               // [intermediate], [hidden]
  std::atomic<int64_t> left;  // units of gate and up that are not done
};

int64_t units(const Matrix &m) { return ceil_div(m.bands, UNIT_BANDS); }

// Experts that cut x into the same segments share one copy of its digits.
Made *prepare(const Call &c, Workspace &ws) {
  const trilobite_experts_args &a = c.a;
  const auto digits = [&](int64_t k, int seg, bool computed, bool bytes) {
    return ws.digits(c.t, {1, k, seg, (int)a.dtype, (int)a.digits, computed, bytes, c.sums});
  };
  Digits shared[3] = {};
  auto *made = ws.get<Made>(c.count);
  for (int64_t i = 0; i < c.count; i++) {
    Active &e = c.active[i];
    const int seg = std::min(segment(e.up.group), e.gated ? segment(e.gate.group) : 64);
    Digits &x = shared[seg / BLOCK];
    if (x.q == nullptr) {
      x = digits(a.hidden, seg, false, false);
      c.t.quantize_block(c.x(), (int)a.dtype, nullptr, x, 0);
    }
    e.x = x;
    e.h = digits(a.intermediate, segment(e.down.group), true, e.down.has_bytes());
    e.z_gate = e.gated ? low_rank_buffer(ws, e.gate, 1) : nullptr;
    e.z_up = low_rank_buffer(ws, e.up, 1), e.z_down = low_rank_buffer(ws, e.down, 1);
    const Matrix up = spread_bands(e.up, 1), gate = e.gated ? spread_bands(e.gate, 1) : e.gate;
    if (!e.gated || up.apart == gate.apart) e.up = up, e.gate = gate;
    e.down = spread_bands(e.down, 1);
    new (&made[i]) Made{ws.get<float>(a.intermediate), ws.get<float>(a.hidden), {units(e.up)}};
  }
  return made;
}

// A unit of act(gate) * up.
void gate_up(const Call &c, const Active &e, Made &made, int64_t unit, void *scratch) {
  const trilobite_experts_args &a = c.a;
  alignas(64) float up[UNIT], gate[UNIT];
  const int64_t band = first_band(e.up, unit, UNIT_BANDS);
  const int bands = (int)std::min<int64_t>(UNIT_BANDS, e.up.bands - band);
  product(c.t, e.up, band, bands, e.x, e.z_up, up, UNIT, scratch);
  if (e.gated) product(c.t, e.gate, band, bands, e.x, e.z_gate, gate, UNIT, scratch);
  for_pieces(e.up, band, bands, [&](int64_t row, int64_t width, int64_t column) {
    float *u = up + column, *g = gate + column, *h = e.gated ? g : u;
    add_bias(a, a.gate_up_bias, up_bias(a, e.expert) + row, width, 1, u, UNIT);
    if (e.gated) add_bias(a, a.gate_up_bias, gate_bias(a, e.expert) + row, width, 1, g, UNIT);
    c.t.activate((int)a.activation, a.numbers, h, e.gated ? u : nullptr, width);
    memcpy(made.h + row, h, width * sizeof(float));
  });
  if (made.left.fetch_sub(1) == 1) c.t.quantize_columns(made.h, a.intermediate, 0, (int)a.intermediate, e.h);
}

// A unit of an expert's result.
void down(const Call &c, const Active &e, const Made &made, int64_t unit, void *scratch) {
  const trilobite_experts_args &a = c.a;
  alignas(64) float out[UNIT];
  const int64_t band = first_band(e.down, unit, UNIT_BANDS);
  const int bands = (int)std::min<int64_t>(UNIT_BANDS, e.down.bands - band);
  product(c.t, e.down, band, bands, e.h, e.z_down, out, UNIT, scratch);
  for_pieces(e.down, band, bands, [&](int64_t row, int64_t width, int64_t column) {
    add_bias(a, a.down_bias, e.expert * a.hidden + row, width, 1, out + column, UNIT);
    memcpy(made.y + row, out + column, width * sizeof(float));
  });
}

// Columns of the layer's result.
void add_up(const Call &c, const Made *made, int64_t column) {
  const trilobite_experts_args &a = c.a;
  const int64_t width = std::min(COLUMNS, a.hidden - column), at = c.start * a.hidden + column;
  float sum[COLUMNS] = {};
  if (a.sums) memcpy(sum, a.sums + at, width * sizeof(float));
  for (int64_t i = 0; i < c.count; i++) {
    const float w = c.weight[c.active[i].first], *y = made[i].y + column;
    for (int64_t j = 0; j < width; j++) sum[j] += w * y[j];
  }
  if (a.sums) memcpy(a.sums + at, sum, width * sizeof(float));
  c.t.store(sum, width, (uint8_t *)a.y + at * element_size(a.dtype), (int)a.dtype);
}

void phases(const Call &c, Made *made, Member &me) {
  void *scratch = worker_workspace().get<uint8_t>(scratch_bytes(c.t, std::max(c.a.hidden, c.a.intermediate)));
  const auto made_by = [&](const Active &e) -> Made & { return made[&e - c.active]; };
  share_flat(
      c, me, [](const Active &e) { return ranks(e.gate) + ranks(e.up); },
      [&](Active &e, int64_t i) { project_x(c, e, i, scratch); });
  share_flat(
      c, me, [](const Active &e) { return units(e.up); },
      [&](Active &e, int64_t u) { gate_up(c, e, made_by(e), u, scratch); });
  share_flat(
      c, me, [](const Active &e) { return ranks(e.down); },
      [&](Active &e, int64_t i) { project(c, e.down, i, e.h, e.z_down, scratch); });
  share_flat(
      c, me, [](const Active &e) { return units(e.down); },
      [&](Active &e, int64_t u) { down(c, e, made_by(e), u, scratch); });
  me.share(ceil_div(c.a.hidden, COLUMNS), [&](int64_t i) { add_up(c, made, i * COLUMNS); });
}

}  // namespace

void token_pass(const ExpertsCall &c, Workspace &ws, int threads) {
  Made *made = prepare(c, ws);
  run_team(threads, [&](Member &me) { phases(c, made, me); });
}

}  // namespace trilobite
