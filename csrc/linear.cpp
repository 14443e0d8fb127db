// y = x (dequant(W) + U V)^T + bias, for one matrix or some that read the same x.
#include "engine.h"
#include "dispatch.h"
#include "kernel_convert.h"
#include "matrix.h"
#include "pool.h"

namespace trilobite {

int64_t scratch_bytes(const Tier &t, int64_t k) {
  return (int64_t)t.scratch_bytes + ceil_div(k, HALF) * (HALF * ROWS + 2 * ROWS * 4) + 4096;
}

void product(const Tier &t, const Matrix &m, int64_t band, int bands, const Digits &x, const float *z, float *out,
             int64_t ld, void *scratch) {
  t.rows(m, band, bands, x, out, ld, scratch);
  if (m.second > 0) t.rows(second_stage(m), band, bands, x, out, ld, scratch);
  if (z == nullptr) return;
  for (int b = 0; b < bands; b += UNIT_BANDS) t.low_rank_u(m, (band + b) * ROWS, z, m.rank, x.count, out + b * ROWS, ld);
}

namespace {

constexpr int64_t PASS = 512;  // tokens prepared at a time; bounds the memory of a long prefill

struct Call {
  const Tier &t;
  const uint8_t *x;
  int dtype, digits, threads;
};

// Rows of one task: enough that its stream is long, few enough that threads finish together.
int bands_per_task(const Matrix &m, int64_t tokens, int threads) {
  int units = tokens >= 64 ? 4 : 1;
  while (units > 1 && m.bands < (int64_t)units * UNIT_BANDS * threads * 4) units /= 2;
  return units * UNIT_BANDS;
}

int64_t tile_bytes(const Matrix &m) { return m.bands * m.groups * m.tile_bytes; }

// Rows `row` and on of all tokens, to their places behind the `first` tokens that are done.
void finish_rows(const Call &c, const Product &p, int64_t row, int64_t width, int64_t first, int64_t tokens, float *out,
                 int64_t ld) {
  const int64_t size = c.dtype == TRILOBITE_F32 ? 4 : 2;
  for (int64_t t = 0; t < tokens; t++) {
    float *o = out + t * ld;
    if (p.bias)
      for (int64_t i = 0; i < width; i++) o[i] += element((const uint8_t *)p.bias, p.bias_dtype, row + i);
    c.t.store(o, width, (uint8_t *)p.y + ((first + t) * p.m->n + row) * size, c.dtype);
  }
}

// The tasks of some matrices as one range: where those of each begin, and whose a task is.
struct Tasks {
  int64_t start[MOST_TOGETHER + 1] = {0};
  int count = 0;

  void add(int64_t tasks) { start[count + 1] = start[count] + tasks, count++; }
  int64_t all() const { return start[count]; }
  int owner(int64_t task) const {
    int i = 0;
    while (task >= start[i + 1]) i++;
    return i;
  }
};

// Matrices that need the same digits of x: it is prepared once, and threads wait for each other once.
void pass(const Call &c, const Product *products, int count, int64_t first, int64_t tokens) {
  Workspace &ws = call_workspace();
  const Matrix &any = *products[0].m;
  const uint8_t *x = c.x + first * any.k * (c.dtype == TRILOBITE_F32 ? 4 : 2);
  int64_t bytes = 0;
  bool sums = false;
  for (int i = 0; i < count; i++) bytes += tile_bytes(*products[i].m), sums |= products[i].m->sub;
  const Digits d = ws.digits(c.t, {tokens, any.k, segment(any.group), c.dtype, c.digits, false, any.has_bytes(), sums});
  const int threads = bytes * tokens < SMALL ? 1 : c.threads;
  Matrix matrices[MOST_TOGETHER];
  float *z[MOST_TOGETHER] = {nullptr};
  int per_task[MOST_TOGETHER];
  Tasks ranks, rows;
  int64_t ld = 0;
  for (int i = 0; i < count; i++) {
    const Matrix &m = matrices[i] = spread_bands(*products[i].m, tokens);
    if (m.rank > 0) z[i] = ws.get<float>(tokens * m.rank);
    per_task[i] = bands_per_task(m, tokens, threads);
    ranks.add(ceil_div(m.rank, ROWS)), rows.add(ceil_div(m.bands, per_task[i]));
    if (ld < (int64_t)per_task[i] * ROWS) ld = (int64_t)per_task[i] * ROWS;
  }
  const int64_t scratch = scratch_bytes(c.t, any.k);
  // One block of tokens is too little to share: it would cost a barrier.
  const bool prepared = d.blocks() == 1;
  if (prepared) c.t.quantize_block(x, c.dtype, nullptr, d, 0);
  run_team(threads, [&](Member &me) {
    Workspace &local = worker_workspace();
    float *out = local.get<float>(tokens * ld);
    void *work = local.get<uint8_t>(scratch);
    if (!prepared) me.share(d.blocks(), [&](int64_t b) { c.t.quantize_block(x, c.dtype, nullptr, d, (int)b); });
    if (ranks.all())
      me.share(ranks.all(), [&](int64_t task) {
        const int i = ranks.owner(task);
        const Matrix &m = matrices[i];
        const int64_t rank = (task - ranks.start[i]) * ROWS;
        c.t.low_rank_v(m, rank, d, z[i] + rank, m.rank, work);
      });
    me.share(rows.all(), [&](int64_t task) {
      const int i = rows.owner(task);
      const Matrix &m = matrices[i];
      const int64_t band = first_band(m, task - rows.start[i], per_task[i]);
      const int bands = (int)(m.bands - band < per_task[i] ? m.bands - band : per_task[i]);
      product(c.t, m, band, bands, d, z[i], out, ld, work);
      for_pieces(m, band, bands, [&](int64_t row, int64_t width, int64_t column) {
        finish_rows(c, products[i], row, width, first, tokens, out + column, ld);
      });
    });
  });
}

// One token of x as fp32, rotated -> to [.., k].
void rotate_input(const Call &c, const Matrix &m, const uint8_t *x, int64_t token, float *to, float *buffer) {
  load_floats(x, c.dtype, token * m.k, m.k, to + token * m.k);
  c.t.rotate(m.in, false, to + token * m.k, buffer);
}

// A lattice matrix (QuIP#, Algorithm 2): rotate x, multiply by what the codes stand for, rotate back. The compensator
// belongs to the plain coordinates.
void pass_lattice(const Call &c, const Product &p, int64_t first, int64_t tokens) {
  Workspace &ws = call_workspace();
  const Matrix &m = *p.m;
  const uint8_t *x = c.x + first * m.k * (c.dtype == TRILOBITE_F32 ? 4 : 2);
  const int count = (int)tokens, seg = segment(m.group);
  const int64_t ld = ceil_div(m.n, UNIT) * UNIT, scratch = scratch_bytes(c.t, m.k);
  float *turned = ws.get<float>(tokens * m.k), *out = ws.get<float>(tokens * ld);
  const Digits d = ws.digits(c.t, {tokens, m.k, seg, c.dtype, c.digits, true, false, false});
  Digits plain{};
  float *z = nullptr;
  if (m.rank > 0) {
    plain = ws.digits(c.t, {tokens, m.k, seg, c.dtype, c.digits, false, m.has_bytes(), false});
    z = ws.get<float>(tokens * m.rank);
  }
  const int threads = tile_bytes(m) * tokens < SMALL ? 1 : c.threads;
  const int per_task = bands_per_task(m, tokens, threads);
  run_team(threads, [&](Member &me) {
    Workspace &local = worker_workspace();
    float *buffer = local.get<float>(m.n > m.k ? m.n : m.k);
    void *work = local.get<uint8_t>(scratch);
    me.share(tokens, [&](int64_t t) { rotate_input(c, m, x, t, turned, buffer); });
    me.share(d.blocks(), [&](int64_t b) {
      c.t.quantize_block(turned, TRILOBITE_F32, nullptr, d, (int)b);
      if (z) c.t.quantize_block(x, c.dtype, nullptr, plain, (int)b);
    });
    if (z)
      me.share(ceil_div(m.rank, ROWS),
               [&](int64_t i) { c.t.low_rank_v(m, i * ROWS, plain, z + i * ROWS, m.rank, work); });
    me.share(ceil_div(m.bands, per_task), [&](int64_t task) {
      const int64_t band = task * per_task;
      const int bands = (int)(m.bands - band < per_task ? m.bands - band : per_task);
      product(c.t, m, band, bands, d, nullptr, out + band * ROWS, ld, work);
    });
    me.share(tokens, [&](int64_t t) { c.t.rotate(m.out, true, out + t * ld, buffer); });
    me.share(ld / UNIT, [&](int64_t unit) {
      const int64_t row = unit * UNIT, width = m.n - row < UNIT ? m.n - row : UNIT;
      if (z) c.t.low_rank_u(m, row, z, m.rank, count, out + row, ld);
      finish_rows(c, p, row, width, first, tokens, out + row, ld);
    });
  });
}

}  // namespace

bool together(const Matrix &a, const Matrix &b, int64_t tokens) {
  return (tokens == 1 || a.has_bytes() == b.has_bytes()) && !a.lattice() && !b.lattice() && a.k == b.k &&
         segment(a.group) == segment(b.group);
}

void linear(const void *x, int dtype, int64_t tokens, const Product *products, int count, int digits, int threads) {
  const Call c{tier(), (const uint8_t *)x, dtype, digits, threads};
  for (int64_t first = 0; first < tokens; first += PASS) {
    const int64_t some = tokens - first < PASS ? tokens - first : PASS;
    if (products[0].m->lattice()) pass_lattice(c, products[0], first, some);
    else pass(c, products, count, first, some);
  }
}

}  // namespace trilobite
