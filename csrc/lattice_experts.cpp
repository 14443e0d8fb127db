// All routed experts of a layer where matrices are in a lattice format (QuIP#, Algorithm 2): as experts.cpp, with what the
// rotations need between its phases. Whole rows pass through a rotation, so the results of gate and up, and of the layer,
// are kept in fp32 until all of them are there.
//   0  x is rotated, once for all matrices that rotate it alike
//   1  the tokens of each active expert are gathered and turned into digits, rotated or not
//   2  V x of gate and up, where they have compensators
//   3  (active expert x 64 rows of gate and up): products
//   4  (active expert x 16 tokens): rotated back, compensators, activation; h rotated, digits
//   5  V h of down
//   6  (rows of down): products of all active experts, summed with the routing weights
//   7  the sums are rotated back, once for all matrices that rotate alike
#include <string.h>

#include <algorithm>

#include "experts.h"
#include "kernel_convert.h"
#include "matrix.h"

namespace trilobite {
namespace {

// x of all tokens of the pass as some matrices want it; without signs, the plain x.
struct Input {
  Rotation r;
  float *x;
};

// Digits of the rows of an input that go to an expert.
struct View {
  Digits d;
  const Input *input;
  const int32_t *index;
};

// A sum [tokens, hidden] over experts in the coordinates that some down projections share; without signs, the plain ones.
struct Output {
  Rotation r;
  float *sum;
};

struct Work {
  Active *e;
  const View *gate, *up, *plain;  // plain: for compensators
  float *gate_rows, *up_rows;     // [count, ld]
  Digits h, h_plain;              // for the codes of down; for its compensator
  const Output *out;
};

struct Layer {
  const ExpertsCall &c;
  Workspace &ws;
  Input *inputs;
  View *views;
  Output *outputs;
  Work *work;
  int64_t input_count, view_count, output_count, ld;
};

bool same(const Rotation &a, const Rotation &b) {
  if (a.signs == nullptr || b.signs == nullptr) return a.signs == b.signs;
  return a.tuned == b.tuned && (a.signs == b.signs || memcmp(a.signs, b.signs, a.bytes()) == 0);
}

const Input *input_of(Layer &l, const Rotation &r) {
  for (int64_t i = 0; i < l.input_count; i++)
    if (same(l.inputs[i].r, r)) return &l.inputs[i];
  Input &in = l.inputs[l.input_count++];
  in = {r, r.signs ? l.ws.get<float>(l.c.tokens * l.c.a.hidden) : nullptr};
  return &in;
}

const View *view_of(Layer &l, const Active &e, const Rotation &r, int seg, bool bytes) {
  const ExpertsCall &c = l.c;
  const Input *in = input_of(l, r);
  const int32_t *index = c.shared_x ? nullptr : c.token + e.first;
  for (int64_t i = 0; i < l.view_count; i++) {
    const View &v = l.views[i];
    if (v.input == in && v.index == index && v.d.seg == seg) return &v;
  }
  const int count = c.shared_x ? 1 : e.count;
  const bool rotated = r.signs != nullptr;
  View &v = l.views[l.view_count++];
  v = {l.ws.digits(c.t, {count, c.a.hidden, seg, (int)c.a.dtype, (int)c.a.digits, rotated, bytes, c.sums}), in, index};
  return &v;
}

const Output *output_of(Layer &l, const Rotation &r) {
  for (int64_t i = 0; i < l.output_count; i++)
    if (same(l.outputs[i].r, r)) return &l.outputs[i];
  Output &out = l.outputs[l.output_count++];
  out = {r, l.ws.get<float>(l.c.tokens * l.c.a.hidden)};
  return &out;
}

Digits intermediate(const Layer &l, int count, int seg, bool bytes) {
  const ExpertsCall &c = l.c;
  return l.ws.digits(c.t, {count, c.a.intermediate, seg, (int)c.a.dtype, (int)c.a.digits, true, bytes, c.sums});
}

Work prepare(Layer &l, Active &e) {
  Work w{};
  w.e = &e;
  const bool bytes = e.up.has_bytes() || (e.gated && e.gate.has_bytes());
  w.up = view_of(l, e, e.up.in, segment(e.up.group), bytes);
  w.up_rows = l.ws.get<float>(e.count * l.ld);
  e.z_up = low_rank_buffer(l.ws, e.up, e.count);
  if (e.gated) {
    w.gate = view_of(l, e, e.gate.in, segment(e.gate.group), bytes);
    w.gate_rows = l.ws.get<float>(e.count * l.ld);
    e.z_gate = low_rank_buffer(l.ws, e.gate, e.count);
  }
  if (e.z_up || e.z_gate) w.plain = view_of(l, e, Rotation{}, segment(l.c.a.hidden), bytes);
  w.h = intermediate(l, e.count, segment(e.down.group), e.down.has_bytes());
  e.z_down = low_rank_buffer(l.ws, e.down, e.count);
  if (e.z_down) w.h_plain = intermediate(l, e.count, segment(l.c.a.intermediate), e.down.has_bytes());
  w.out = output_of(l, e.down.out);
  return w;
}

void rotate_token(const Layer &l, int64_t i, float *buffer) {
  const ExpertsCall &c = l.c;
  const int64_t hidden = c.a.hidden, token = i % c.tokens;
  const Input &in = l.inputs[1 + i / c.tokens];  // the first is the plain x
  load_floats(c.x(), (int)c.a.dtype, token * hidden, hidden, in.x + token * hidden);
  c.t.rotate(in.r, false, in.x + token * hidden, buffer);
}

void quantize_view(const Layer &l, const View &v, int block) {
  const ExpertsCall &c = l.c;
  if (v.input->x) c.t.quantize_block(v.input->x, TRILOBITE_F32, v.index, v.d, block);
  else c.t.quantize_block(c.x(), (int)c.a.dtype, v.index, v.d, block);
}

void multiply_unit(const Layer &l, const Work &w, int64_t unit, void *scratch) {
  const int64_t band = unit * UNIT_BANDS;
  const int bands = (int)std::min<int64_t>(UNIT_BANDS, w.e->up.bands - band);
  product(l.c.t, w.e->up, band, bands, w.up->d, nullptr, w.up_rows + band * ROWS, l.ld, scratch);
  if (w.gate) product(l.c.t, w.e->gate, band, bands, w.gate->d, nullptr, w.gate_rows + band * ROWS, l.ld, scratch);
}

// Rows of gate or up: back to plain coordinates, plus compensator and bias.
void complete(const Layer &l, const Matrix &m, const float *z, int count, const void *bias, int64_t at, float *rows,
              float *buffer) {
  for (int t = 0; m.lattice() && t < count; t++) l.c.t.rotate(m.out, true, rows + t * l.ld, buffer);
  for (int64_t row = 0; z && row < m.n; row += UNIT) l.c.t.low_rank_u(m, row, z, m.rank, count, rows + row, l.ld);
  add_bias(l.c.a, bias, at, m.n, count, rows, l.ld);
}

void finish_block(const Layer &l, const Work &w, int64_t block, float *buffer) {
  const trilobite_experts_args &a = l.c.a;
  const Active &e = *w.e;
  const int64_t first = block * TOKENS, n = a.intermediate;
  const int count = (int)std::min<int64_t>(TOKENS, e.count - first);
  float *up = w.up_rows + first * l.ld, *h = up;
  complete(l, e.up, e.z_up ? e.z_up + first * e.up.rank : nullptr, count, a.gate_up_bias, up_bias(a, e.expert), up,
           buffer);
  if (e.gated) {
    h = w.gate_rows + first * l.ld;
    complete(l, e.gate, e.z_gate ? e.z_gate + first * e.gate.rank : nullptr, count, a.gate_up_bias,
             gate_bias(a, e.expert), h, buffer);
  }
  for (int t = 0; t < count; t++)
    l.c.t.activate((int)a.activation, a.numbers, h + t * l.ld, e.gated ? up + t * l.ld : nullptr, n);
  if (e.z_down) l.c.t.quantize_columns(h, l.ld, 0, (int)n, w.h_plain.blocks_from((int)block, 1));
  for (int t = 0; e.down.lattice() && t < count; t++) l.c.t.rotate(e.down.in, false, h + t * l.ld, buffer);
  l.c.t.quantize_columns(h, l.ld, 0, (int)n, w.h.blocks_from((int)block, 1));
}

// sum[token of the pair] += weight * rows, in `width` columns from `column`.
void accumulate(const ExpertsCall &c, const Active &e, const float *rows, int64_t ld, int64_t column, int64_t width,
                float *sum) {
  for (int t = 0; t < e.count; t++) {
    const float weight = c.weight[e.first + t];
    float *s = sum + c.token[e.first + t] * c.a.hidden + column;
    for (int64_t j = 0; j < width; j++) s[j] += weight * rows[t * ld + j];
  }
}

void down(const Layer &l, int64_t band, int bands, float *rows, void *scratch) {
  const ExpertsCall &c = l.c;
  const int64_t ld = ceil_div(bands, UNIT_BANDS) * UNIT, row = band * ROWS;
  const int64_t width = std::min<int64_t>(bands * ROWS, c.a.hidden - row);
  for (int64_t i = 0; i < l.output_count; i++)
    for (int64_t t = 0; t < c.tokens; t++) memset(l.outputs[i].sum + t * c.a.hidden + row, 0, width * sizeof(float));
  for (int64_t i = 0; i < c.count; i++) {
    const Work &w = l.work[i];
    const Active &e = *w.e;
    product(c.t, e.down, band, bands, w.h, nullptr, rows, ld, scratch);
    accumulate(c, e, rows, ld, row, width, w.out->sum);
    if (e.z_down == nullptr && c.a.down_bias == nullptr) continue;
    memset(rows, 0, e.count * ld * sizeof(float));
    for (int64_t at = 0; e.z_down && at < ld; at += UNIT)
      c.t.low_rank_u(e.down, row + at, e.z_down, e.down.rank, e.count, rows + at, ld);
    add_bias(c.a, c.a.down_bias, e.expert * c.a.hidden + row, width, e.count, rows, ld);
    accumulate(c, e, rows, ld, row, width, l.outputs[0].sum);
  }
}

void finish_token(const Layer &l, int64_t token, float *buffer) {
  const ExpertsCall &c = l.c;
  const int64_t hidden = c.a.hidden, size = element_size(c.a.dtype);
  float *total = l.outputs[0].sum + token * hidden;
  for (int64_t i = 1; i < l.output_count; i++) {
    float *sum = l.outputs[i].sum + token * hidden;
    c.t.rotate(l.outputs[i].r, true, sum, buffer);
    for (int64_t j = 0; j < hidden; j++) total[j] += sum[j];
  }
  c.t.store(total, hidden, (uint8_t *)c.a.y + (c.start + token) * hidden * size, (int)c.a.dtype);
}

void phases(const Layer &l, Member &me, int most) {
  const ExpertsCall &c = l.c;
  Workspace &ws = worker_workspace();
  const int per_task = down_bands(c, me.threads());
  const int64_t bands = ceil_div(c.a.hidden, ROWS), longest = std::max(c.a.hidden, c.a.intermediate);
  float *rows = ws.get<float>(most * std::max<int64_t>(UNIT, (int64_t)per_task * ROWS)),
        *buffer = ws.get<float>(longest);
  void *scratch = ws.get<uint8_t>(scratch_bytes(c.t, longest));
  const auto work = [&](const Active &e) -> const Work & { return l.work[&e - c.active]; };
  const auto project = [&](const Matrix &m, int64_t i, const Digits &x, float *z) {
    c.t.low_rank_v(m, i * ROWS, x, z + i * ROWS, m.rank, scratch);
  };
  me.share((l.input_count - 1) * c.tokens, [&](int64_t i) { rotate_token(l, i, buffer); });
  me.share(l.view_count, [&](int64_t i) {
    for (int block = 0; block < l.views[i].d.blocks(); block++) quantize_view(l, l.views[i], block);
  });
  share_flat(
      c, me, [](const Active &e) { return ranks(e.gate) + ranks(e.up); },
      [&](Active &e, int64_t i) {
        const int64_t gates = ranks(e.gate);
        if (i < gates) project(e.gate, i, work(e).plain->d, e.z_gate);
        else project(e.up, i - gates, work(e).plain->d, e.z_up);
      });
  share_flat(
      c, me, [](const Active &e) { return ceil_div(e.up.bands, UNIT_BANDS); },
      [&](Active &e, int64_t unit) { multiply_unit(l, work(e), unit, scratch); });
  share_flat(
      c, me, [](const Active &e) { return ceil_div(e.count, TOKENS); },
      [&](Active &e, int64_t block) { finish_block(l, work(e), block, buffer); });
  share_flat(
      c, me, [](const Active &e) { return ranks(e.down); },
      [&](Active &e, int64_t i) { project(e.down, i, work(e).h_plain, e.z_down); });
  me.share(ceil_div(bands, per_task), [&](int64_t i) {
    down(l, i * per_task, (int)std::min<int64_t>(per_task, bands - i * per_task), rows, scratch);
  });
  me.share(c.tokens, [&](int64_t token) { finish_token(l, token, buffer); });
}

}  // namespace

void lattice_pass(const ExpertsCall &c, Workspace &ws, int threads, int most) {
  Layer l{c,
          ws,
          ws.get<Input>(2 * c.count + 1),
          ws.get<View>(3 * c.count),
          ws.get<Output>(c.count + 1),
          ws.get<Work>(c.count),
          0,
          0,
          0,
          ceil_div(c.a.intermediate, UNIT) * UNIT};
  input_of(l, Rotation{});
  output_of(l, Rotation{});
  for (int64_t i = 0; i < c.count; i++) l.work[i] = prepare(l, c.active[i]);
  run_team(threads, [&](Member &me) { phases(l, me, most); });
}

}  // namespace trilobite
