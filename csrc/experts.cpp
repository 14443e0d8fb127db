// All routed experts of one MoE layer, in one job. Phases, with a barrier after each:
//   0  the tokens of each active expert are gathered and turned into digits
//   1  V x of gate and up, where they have compensators
//   2  (active expert x unit of gate and up): products, activation, digits of the result
//   3  V h of down, where it has a compensator
//   4  down, in one of two ways (experts_down.cpp)
// Every sum is made by one thread in the order of the experts, so the result does not depend on the number of threads, nor on
// the way.
#include <string.h>

#include <algorithm>
#include <new>

#include "dispatch.h"
#include "experts.h"
#include "kernel_convert.h"
#include "matrix.h"

namespace trilobite {

int64_t element_size(int64_t dtype) { return dtype == TRILOBITE_F32 ? 4 : 2; }

const uint8_t *ExpertsCall::x() const { return (const uint8_t *)a.x + start * a.hidden * element_size(a.dtype); }

float *low_rank_buffer(Workspace &ws, const Matrix &m, int count) {
  return m.rank > 0 ? ws.get<float>((int64_t)count * m.rank) : nullptr;
}

int64_t ranks(const Matrix &m) { return ceil_div(m.rank, ROWS); }

void project(const ExpertsCall &c, const Matrix &m, int64_t i, const Digits &x, float *z, void *scratch) {
  c.t.low_rank_v(m, i * ROWS, x, z + i * ROWS, m.rank, scratch);
}

void project_x(const ExpertsCall &c, const Active &e, int64_t i, void *scratch) {
  const int64_t gates = ranks(e.gate);
  if (i < gates) project(c, e.gate, i, e.x, e.z_gate, scratch);
  else project(c, e.up, i - gates, e.x, e.z_up, scratch);
}

void add_bias(const trilobite_experts_args &a, const void *bias, int64_t at, int64_t width, int count, float *out,
              int64_t ld) {
  if (bias == nullptr) return;
  for (int64_t i = 0; i < width; i++) {
    const float b = element(bias, (int)a.bias_dtype, at + i);
    for (int t = 0; t < count; t++) out[t * ld + i] += b;
  }
}

int64_t gate_bias(const trilobite_experts_args &a, int64_t expert) { return expert * 2 * a.intermediate; }

int64_t up_bias(const trilobite_experts_args &a, int64_t expert) {
  return a.gated ? gate_bias(a, expert) + a.intermediate : expert * a.intermediate;
}

namespace {

constexpr int64_t FEW = 4;       // tokens of an expert, in the mean, that are worth long streams
constexpr int64_t PAIRS = 4096;  // (token, expert) pairs prepared at a time; bounds the memory of a long prefill
// Values of gate, of up and of the result that wait for a rotation of whole rows: bounds the pairs, too.
constexpr int64_t MOST_WAITING = 1 << 24;

using Call = ExpertsCall;

// Any index outside the experts means none: routers pad with E, and a wrong one must not become an address.
int64_t expert_of(const trilobite_experts_args &a, int64_t pair) {
  const int64_t e = a.index_bytes == 8 ? ((const int64_t *)a.index)[pair] : ((const int32_t *)a.index)[pair];
  return e < 0 || e >= a.experts ? -1 : e;
}

// Counting sort of this pass's pairs by expert, so that an expert's weights are streamed once for all its tokens. Stable,
// so that the order of every sum is fixed.
void route(Call &c, Workspace &ws) {
  const trilobite_experts_args &a = c.a;
  const int64_t pairs = c.tokens * a.active, base = c.start * a.active;
  int64_t *first = ws.get<int64_t>(a.experts + 1);
  memset(first, 0, (a.experts + 1) * sizeof(int64_t));
  for (int64_t p = 0; p < pairs; p++) {
    const int64_t e = expert_of(a, base + p);
    if (e >= 0) first[e + 1]++;
  }
  c.active = ws.get<Active>(std::min(a.experts, pairs));
  for (int64_t e = 0; e < a.experts; e++) {
    const int64_t count = first[e + 1];
    first[e + 1] += first[e];
    if (count == 0) continue;
    Active &x = c.active[c.count++];
    x = Active{};
    x.expert = e, x.first = first[e], x.count = (int)count;
  }
  c.token = ws.get<int32_t>(pairs);
  c.weight = ws.get<float>(pairs);
  for (int64_t p = 0; p < pairs; p++) {
    const int64_t e = expert_of(a, base + p);
    if (e < 0) continue;
    const int64_t at = first[e]++;
    c.token[at] = (int32_t)(p / a.active);
    c.weight[at] = element(a.weights, (int)a.weights_dtype, base + p);
  }
}

// Where each token's pairs are, for `down_apart`.
void find_pairs(Call &c, Workspace &ws, int64_t count) {
  c.pairs = ws.get<int32_t>(c.tokens * c.a.active);
  std::fill_n(c.pairs, c.tokens * c.a.active, -1);
  for (int64_t p = 0; p < count; p++) {
    int32_t *of = c.pairs + c.token[p] * c.a.active;
    while (*of >= 0) of++;
    *of = (int32_t)p;
  }
}

bool read_matrices(const trilobite_experts_args &a, Active &e) {
  const int64_t *rows = a.table + e.expert * 3 * TRILOBITE_COLUMNS;
  const trilobite_rotation *in = a.rotate_hidden, *out = a.rotate_intermediate;
  bool up, down;
  if (!from_table(a.slab, a.slab_bytes, rows, a.intermediate, a.hidden, in, out, &e.gate, &e.gated)) return false;
  if (!from_table(a.slab, a.slab_bytes, rows + TRILOBITE_COLUMNS, a.intermediate, a.hidden, in, out, &e.up, &up))
    return false;
  if (!from_table(a.slab, a.slab_bytes, rows + 2 * TRILOBITE_COLUMNS, a.hidden, a.intermediate, out, in, &e.down, &down))
    return false;
  if (!up || !down) return fail("experts: expert %lld has no up or down matrix", (long long)e.expert);
  if (e.gated != (a.gated != 0))
    return fail("experts: expert %lld has %s gate, unlike the layer", (long long)e.expert, e.gated ? "a" : "no");
  if (!e.gated && a.activation >= TRILOBITE_GPT_OSS)
    return fail("experts: expert %lld has no gate, which its activation needs", (long long)e.expert);
  return true;
}

// x and h of the active experts. Those that read the only token of a call share its digits, if they cut it into the same
// segments.
void allocate(const Call &c, Workspace &ws) {
  const trilobite_experts_args &a = c.a;
  const auto digits = [&](int count, int64_t k, int seg, bool computed, bool bytes) {
    return ws.digits(c.t, {count, k, seg, (int)a.dtype, (int)a.digits, computed, bytes, c.sums});
  };
  Digits shared[3] = {};
  auto *left = ws.get<std::atomic<int64_t>>(c.count);
  for (int64_t i = 0; i < c.count; i++) {
    Active &e = c.active[i];
    const int seg = std::min(segment(e.up.group), e.gated ? segment(e.gate.group) : 64);
    Digits &x = c.shared_x ? shared[seg / BLOCK] : e.x;
    if (x.q == nullptr) {
      x = digits(e.count, a.hidden, seg, false, !c.shared_x && (e.up.has_bytes() || (e.gated && e.gate.has_bytes())));
      if (c.shared_x) c.t.quantize_block(c.x(), (int)a.dtype, nullptr, x, 0);
    }
    e.x = x;
    e.h = digits(e.count, a.intermediate, segment(e.down.group), true, e.down.has_bytes());
    e.z_gate = e.gated ? low_rank_buffer(ws, e.gate, e.count) : nullptr;
    e.z_up = low_rank_buffer(ws, e.up, e.count), e.z_down = low_rank_buffer(ws, e.down, e.count);
    if (c.results == nullptr) continue;
    const Matrix up = spread_bands(e.up, e.count), gate = e.gated ? spread_bands(e.gate, e.count) : e.gate;
    if (!e.gated || up.apart == gate.apart) e.up = up, e.gate = gate;
    e.down = spread_bands(e.down, e.count);
    if (e.up.apart == 1) continue;
    e.whole_h = ws.get<float>(a.intermediate);
    e.left = new (&left[i]) std::atomic<int64_t>(units(e.up));
  }
}

// A unit of gate and up -> digits of act(gate) * up; of bands that lie apart, the last one of an expert makes the digits.
void gate_up(const Call &c, Active &e, int64_t unit, float *gate, float *up, void *scratch) {
  const trilobite_experts_args &a = c.a;
  const int64_t band = first_band(e.up, unit, UNIT_BANDS);
  const int bands = (int)std::min<int64_t>(UNIT_BANDS, e.up.bands - band);
  product(c.t, e.up, band, bands, e.x, e.z_up, up, UNIT, scratch);
  if (e.gated) product(c.t, e.gate, band, bands, e.x, e.z_gate, gate, UNIT, scratch);
  for_pieces(e.up, band, bands, [&](int64_t row, int64_t width, int64_t column) {
    float *u = up + column, *g = gate + column, *h = e.gated ? g : u;
    add_bias(a, a.gate_up_bias, up_bias(a, e.expert) + row, width, e.count, u, UNIT);
    if (e.gated) add_bias(a, a.gate_up_bias, gate_bias(a, e.expert) + row, width, e.count, g, UNIT);
    for (int t = 0; t < e.count; t++)
      c.t.activate((int)a.activation, a.numbers, h + t * UNIT, e.gated ? u + t * UNIT : nullptr, width);
    if (e.whole_h) memcpy(e.whole_h + row, h, width * sizeof(float));
    else c.t.quantize_columns(h, UNIT, row, (int)width, e.h);
  });
  if (e.left && e.left->fetch_sub(1) == 1) c.t.quantize_columns(e.whole_h, a.intermediate, 0, (int)a.intermediate, e.h);
}

void phases(const Call &c, Member &me, int most) {
  Workspace &ws = worker_workspace();
  float *gate = ws.get<float>(most * UNIT), *up = ws.get<float>(most * UNIT);
  void *scratch = ws.get<uint8_t>(scratch_bytes(c.t, std::max(c.a.hidden, c.a.intermediate)));
  share_flat(
      c, me, [&](const Active &e) { return c.shared_x ? 0 : (int64_t)e.x.blocks(); },
      [&](Active &e, int64_t b) { c.t.quantize_block(c.x(), (int)c.a.dtype, c.token + e.first, e.x, (int)b); });
  share_flat(
      c, me, [](const Active &e) { return ranks(e.gate) + ranks(e.up); },
      [&](Active &e, int64_t i) { project_x(c, e, i, scratch); });
  share_flat(
      c, me, [](const Active &e) { return units(e.up); },
      [&](Active &e, int64_t u) { gate_up(c, e, u, gate, up, scratch); });
  share_flat(
      c, me, [](const Active &e) { return ranks(e.down); },
      [&](Active &e, int64_t i) { project(c, e.down, i, e.h, e.z_down, scratch); });
  if (c.results) down_apart(c, me, most, ws, scratch);
  else down_together(c, me, most, ws, scratch);
}

bool pass(const trilobite_experts_args &a, int64_t start, int64_t tokens) {
  Workspace &ws = call_workspace();
  Call c{a, tier(), start, tokens, nullptr, 0, nullptr, nullptr, tokens == 1, false, nullptr, nullptr};
  route(c, ws);
  int most = 0;
  int64_t work = 0, pairs = 0;
  bool lattice = false;
  for (int64_t i = 0; i < c.count; i++) {
    if (!read_matrices(a, c.active[i])) return false;
    const Active &e = c.active[i];
    const Matrix &m = e.up;  // gate and down are as large
    lattice |= m.lattice() || e.gate.lattice() || e.down.lattice();
    c.sums |= m.sub || e.gate.sub || e.down.sub;
    most = std::max(most, e.count), pairs += e.count;
    work += 3 * e.count * m.bands * m.groups * m.tile_bytes;
  }
  if (most > 1) c.shared_x = false;  // one token that chose an expert twice has two rows there
  const int threads = work < SMALL ? 1 : (int)a.threads;
  if (lattice && a.sums) return fail("experts: sums of several calls are not for lattice formats");
  if (lattice) return lattice_pass(c, ws, threads, most), true;
  if (pairs <= FEW * c.count) {
    find_pairs(c, ws, pairs);
    c.results = ws.get<float>(pairs * a.hidden);
  }
  allocate(c, ws);
  run_team(threads, [&](Member &me) { phases(c, me, most); });
  return true;
}

}  // namespace

bool experts(const trilobite_experts_args &a) {
  const int64_t waiting = MOST_WAITING / std::max<int64_t>(1, std::max(a.hidden, a.intermediate));
  const int64_t pairs = a.rotate_hidden ? std::min(PAIRS, waiting) : PAIRS;
  const int64_t step = std::max<int64_t>(1, pairs / std::max<int64_t>(1, a.active));
  for (int64_t t = 0; t < a.tokens; t += step)
    if (!pass(a, t, std::min(step, a.tokens - t))) return false;
  return true;
}

}  // namespace trilobite
