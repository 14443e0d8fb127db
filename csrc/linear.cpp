// y = x (dequant(W) + U V)^T + bias.
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
  const Matrix &m;
  const uint8_t *x, *bias;
  uint8_t *y;
  int dtype, bias_dtype, digits, threads;
};

// Rows of one task: enough that its stream is long, few enough that threads finish together.
int bands_per_task(const Matrix &m, int64_t tokens, int threads) {
  int units = tokens >= 64 ? 4 : 1;
  while (units > 1 && m.bands < (int64_t)units * UNIT_BANDS * threads * 4) units /= 2;
  return units * UNIT_BANDS;
}

void finish_rows(const Call &c, int64_t row, int64_t width, int64_t tokens, float *out, int64_t ld, uint8_t *y) {
  const int64_t size = c.dtype == TRILOBITE_F32 ? 4 : 2;
  for (int64_t t = 0; t < tokens; t++) {
    float *o = out + t * ld;
    if (c.bias)
      for (int64_t i = 0; i < width; i++) o[i] += element(c.bias, c.bias_dtype, row + i);
    c.t.store(o, width, y + (t * c.m.n + row) * size, c.dtype);
  }
}

void pass(const Call &c, const uint8_t *x, int64_t tokens, uint8_t *y) {
  Workspace &ws = call_workspace();
  const Matrix &m = c.m;
  const Digits d = ws.digits(tokens, m.k, segment(m.group), c.digits, c.t.parts((int)tokens, c.dtype, c.digits, false));
  float *z = m.rank > 0 ? ws.get<float>(tokens * m.rank) : nullptr;
  const int threads = m.bands * m.groups * m.tile_bytes * tokens < SMALL ? 1 : c.threads;
  const int per_task = bands_per_task(m, tokens, threads);
  const int64_t ld = (int64_t)per_task * ROWS, scratch = scratch_bytes(c.t, m.k);
  // One block of tokens is too little to share: it would cost a barrier.
  const bool prepared = d.blocks() == 1;
  if (prepared) c.t.quantize_block(x, c.dtype, nullptr, d, 0);
  run_team(threads, [&](Team &team, int thread) {
    Workspace &local = worker_workspace();
    float *out = local.get<float>(tokens * ld);
    void *work = local.get<uint8_t>(scratch);
    if (!prepared)
      team.share(thread, 0, d.blocks(), [&](int64_t b) { c.t.quantize_block(x, c.dtype, nullptr, d, (int)b); });
    if (z)
      team.share(thread, 1, ceil_div(m.rank, ROWS),
                 [&](int64_t i) { c.t.low_rank_v(m, i * ROWS, d, z + i * ROWS, m.rank, work); });
    team.share(thread, 2, ceil_div(m.bands, per_task), [&](int64_t task) {
      const int64_t band = task * per_task, row = band * ROWS;
      const int bands = (int)(m.bands - band < per_task ? m.bands - band : per_task);
      product(c.t, m, band, bands, d, z, out, ld, work);
      const int64_t width = m.n - row < ld ? m.n - row : ld;
      finish_rows(c, row, width, tokens, out, ld, y);
    });
  });
}

// One token of x as fp32, rotated -> to [.., k].
void rotate_input(const Call &c, const uint8_t *x, int64_t token, float *to, float *buffer) {
  const int64_t k = c.m.k;
  load_floats(x, c.dtype, token * k, k, to + token * k);
  c.t.rotate(c.m.in, false, to + token * k, buffer);
}

// A lattice matrix (QuIP#, Algorithm 2): rotate x, multiply by what the codes stand for, rotate back. The compensator
// belongs to the plain coordinates.
void pass_lattice(const Call &c, const uint8_t *x, int64_t tokens, uint8_t *y) {
  Workspace &ws = call_workspace();
  const Matrix &m = c.m;
  const int count = (int)tokens, seg = segment(m.group);
  const int64_t ld = ceil_div(m.n, UNIT) * UNIT, scratch = scratch_bytes(c.t, m.k);
  float *turned = ws.get<float>(tokens * m.k), *out = ws.get<float>(tokens * ld);
  // Rotated values fill all bits of an fp32, so they are kept as results of an activation function are.
  const Digits d = ws.digits(tokens, m.k, seg, c.digits, c.t.parts(count, c.dtype, c.digits, true));
  Digits plain{};
  float *z = nullptr;
  if (m.rank > 0) {
    plain = ws.digits(tokens, m.k, seg, c.digits, c.t.parts(count, c.dtype, c.digits, false));
    z = ws.get<float>(tokens * m.rank);
  }
  const int threads = m.bands * m.groups * m.tile_bytes * tokens < SMALL ? 1 : c.threads;
  const int per_task = bands_per_task(m, tokens, threads);
  run_team(threads, [&](Team &team, int thread) {
    Workspace &local = worker_workspace();
    float *buffer = local.get<float>(m.n > m.k ? m.n : m.k);
    void *work = local.get<uint8_t>(scratch);
    team.share(thread, 0, tokens, [&](int64_t t) { rotate_input(c, x, t, turned, buffer); });
    team.share(thread, 1, d.blocks(), [&](int64_t b) {
      c.t.quantize_block(turned, TRILOBITE_F32, nullptr, d, (int)b);
      if (z) c.t.quantize_block(x, c.dtype, nullptr, plain, (int)b);
    });
    if (z)
      team.share(thread, 2, ceil_div(m.rank, ROWS),
                 [&](int64_t i) { c.t.low_rank_v(m, i * ROWS, plain, z + i * ROWS, m.rank, work); });
    team.share(thread, 3, ceil_div(m.bands, per_task), [&](int64_t task) {
      const int64_t band = task * per_task;
      const int bands = (int)(m.bands - band < per_task ? m.bands - band : per_task);
      product(c.t, m, band, bands, d, nullptr, out + band * ROWS, ld, work);
    });
    team.share(thread, 4, tokens, [&](int64_t t) { c.t.rotate(m.out, true, out + t * ld, buffer); });
    team.share(thread, 5, ld / UNIT, [&](int64_t unit) {
      const int64_t row = unit * UNIT, width = m.n - row < UNIT ? m.n - row : UNIT;
      if (z) c.t.low_rank_u(m, row, z, m.rank, count, out + row, ld);
      finish_rows(c, row, width, tokens, out + row, ld, y);
    });
  });
}

}  // namespace

void linear(const void *x, int dtype, int64_t tokens, const Matrix &m, const void *bias, int bias_dtype, void *y,
            int digits, int threads) {
  const int64_t size = dtype == TRILOBITE_F32 ? 4 : 2;
  const Call c{tier(), m, (const uint8_t *)x, (const uint8_t *)bias, (uint8_t *)y, dtype, bias_dtype, digits, threads};
  const auto run = m.lattice() ? pass_lattice : pass;
  for (int64_t t = 0; t < tokens; t += PASS)
    run(c, c.x + t * m.k * size, tokens - t < PASS ? tokens - t : PASS, c.y + t * m.n * size);
}

}  // namespace trilobite
