// All routed experts of one MoE layer for some tokens (one: experts_token.cpp), in one job. Phases, with a barrier after each:
//   0  the tokens of each active expert are gathered and turned into digits
//   1  V x of gate and up, where they have compensators
//   2  (active expert x 64 rows of gate and up): products, activation, digits of the result
//   3  V h of down, where it has a compensator
//   4  (rows of down): products of all active experts, summed with the routing weights
// A task of phase 4 owns its columns of the result, so nothing is un-permuted, no sum is shared between threads, and
// the result does not depend on their number.
#include <string.h>

#include <algorithm>

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

int down_bands(const ExpertsCall &c, int threads) {
  const int64_t bands = ceil_div(c.a.hidden, ROWS);
  int units = c.tokens >= 64 ? 4 : 1;
  while (units > 1 && bands < (int64_t)units * UNIT_BANDS * threads * 4) units /= 2;
  return units * UNIT_BANDS;
}

namespace {

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

void allocate(Call &c, Workspace &ws) {
  const auto digits = [&](int count, int64_t k, int seg, bool computed, bool bytes) {
    return ws.digits(c.t, {count, k, seg, (int)c.a.dtype, (int)c.a.digits, computed, bytes, c.sums});
  };
  for (int64_t i = 0; i < c.count; i++) {
    Active &e = c.active[i];
    const int seg = std::min(segment(e.up.group), e.gated ? segment(e.gate.group) : 64);
    e.x = digits(e.count, c.a.hidden, seg, false, e.up.has_bytes() || (e.gated && e.gate.has_bytes()));
    e.h = digits(e.count, c.a.intermediate, segment(e.down.group), true, e.down.has_bytes());
    if (e.gated) e.z_gate = low_rank_buffer(ws, e.gate, e.count);
    e.z_up = low_rank_buffer(ws, e.up, e.count);
    e.z_down = low_rank_buffer(ws, e.down, e.count);
  }
}

// 64 rows of gate and up -> digits of act(gate) * up.
void gate_up(const Call &c, Active &e, int64_t unit, float *gate, float *up, void *scratch) {
  const trilobite_experts_args &a = c.a;
  const int64_t band = unit * UNIT_BANDS, row = band * ROWS;
  const int bands = (int)std::min<int64_t>(UNIT_BANDS, e.up.bands - band);
  const int64_t width = std::min<int64_t>(UNIT, a.intermediate - row);
  product(c.t, e.up, band, bands, e.x, e.z_up, up, UNIT, scratch);
  add_bias(a, a.gate_up_bias, up_bias(a, e.expert) + row, width, e.count, up, UNIT);
  if (e.gated) {
    product(c.t, e.gate, band, bands, e.x, e.z_gate, gate, UNIT, scratch);
    add_bias(a, a.gate_up_bias, gate_bias(a, e.expert) + row, width, e.count, gate, UNIT);
  }
  float *h = e.gated ? gate : up;
  for (int t = 0; t < e.count; t++)
    c.t.activate((int)a.activation, a.numbers, h + t * UNIT, e.gated ? up + t * UNIT : nullptr, width);
  c.t.quantize_columns(h, UNIT, row, (int)width, e.h);
}

// Rows [band * 16, ...) of the layer's result, all experts and tokens.
void down(const Call &c, int64_t band, int bands, float *sum, float *out, void *scratch) {
  const trilobite_experts_args &a = c.a;
  const int64_t ld = (int64_t)ceil_div(bands, UNIT_BANDS) * UNIT, row = band * ROWS;
  const int64_t width = std::min<int64_t>(bands * ROWS, a.hidden - row), size = element_size(a.dtype);
  float *kept = a.sums ? a.sums + c.start * a.hidden + row : nullptr;
  memset(sum, 0, c.tokens * ld * sizeof(float));
  for (int64_t t = 0; kept && t < c.tokens; t++) memcpy(sum + t * ld, kept + t * a.hidden, width * sizeof(float));
  for (int64_t i = 0; i < c.count; i++) {
    const Active &e = c.active[i];
    product(c.t, e.down, band, bands, e.h, e.z_down, out, ld, scratch);
    add_bias(a, a.down_bias, e.expert * a.hidden + row, width, e.count, out, ld);
    for (int t = 0; t < e.count; t++) {
      const float w = c.weight[e.first + t];
      float *s = sum + c.token[e.first + t] * ld, *o = out + t * ld;
      for (int64_t j = 0; j < width; j++) s[j] += w * o[j];
    }
  }
  for (int64_t t = 0; kept && t < c.tokens; t++) memcpy(kept + t * a.hidden, sum + t * ld, width * sizeof(float));
  auto *y = (uint8_t *)a.y + ((c.start * a.hidden) + row) * size;
  for (int64_t t = 0; t < c.tokens; t++) c.t.store(sum + t * ld, width, y + t * a.hidden * size, (int)a.dtype);
}

void phases(const Call &c, Member &me, int most) {
  Workspace &ws = worker_workspace();
  const int per_task = down_bands(c, me.threads());
  const int64_t widest = std::max<int64_t>(UNIT, (int64_t)per_task * ROWS);
  // `down` keeps sums of all tokens in `two` and products of one expert in `one`; `gate_up` needs less of both.
  float *one = ws.get<float>(most * widest), *two = ws.get<float>(std::max<int64_t>(most * UNIT, c.tokens * widest));
  void *scratch = ws.get<uint8_t>(scratch_bytes(c.t, std::max(c.a.hidden, c.a.intermediate)));
  share_flat(
      c, me, [](const Active &e) { return (int64_t)e.x.blocks(); },
      [&](Active &e, int64_t b) { c.t.quantize_block(c.x(), (int)c.a.dtype, c.token + e.first, e.x, (int)b); });
  share_flat(
      c, me, [](const Active &e) { return ranks(e.gate) + ranks(e.up); },
      [&](Active &e, int64_t i) { project_x(c, e, i, scratch); });
  share_flat(
      c, me, [](const Active &e) { return ceil_div(e.up.bands, UNIT_BANDS); },
      [&](Active &e, int64_t u) { gate_up(c, e, u, one, two, scratch); });
  share_flat(
      c, me, [](const Active &e) { return ranks(e.down); },
      [&](Active &e, int64_t i) { project(c, e.down, i, e.h, e.z_down, scratch); });
  const int64_t bands = ceil_div(c.a.hidden, ROWS);
  me.share(ceil_div(bands, per_task), [&](int64_t i) {
    down(c, i * per_task, (int)std::min<int64_t>(per_task, bands - i * per_task), two, one, scratch);
  });
}

bool pass(const trilobite_experts_args &a, int64_t start, int64_t tokens) {
  Workspace &ws = call_workspace();
  Call c{a, tier(), start, tokens, nullptr, 0, nullptr, nullptr, tokens == 1, false};
  route(c, ws);
  int most = 0;
  int64_t work = 0;
  bool lattice = false;
  for (int64_t i = 0; i < c.count; i++) {
    if (!read_matrices(a, c.active[i])) return false;
    const Active &e = c.active[i];
    const Matrix &m = e.up;  // gate and down are as large
    lattice |= m.lattice() || e.gate.lattice() || e.down.lattice();
    c.sums |= m.sub || e.gate.sub || e.down.sub;
    most = std::max(most, e.count);
    work += 3 * e.count * m.bands * m.groups * m.tile_bytes;
  }
  if (most > 1) c.shared_x = false;  // one token that chose an expert twice has two rows there
  const int threads = work < SMALL ? 1 : (int)a.threads;
  if (lattice && a.sums) return fail("experts: sums of several calls are not for lattice formats");
  if (lattice) return lattice_pass(c, ws, threads, most), true;
  if (c.shared_x) return token_pass(c, ws, threads), true;
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
