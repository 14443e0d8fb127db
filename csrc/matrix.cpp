#include "matrix.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

namespace trilobite {
namespace {

constexpr int64_t RECORD_BYTES = 12;  // of `weight_lattice`

thread_local char g_error[512];

int64_t packed_bytes(const Matrix &m) { return m.bands * m.groups * m.tile_bytes; }
int64_t scale_bytes(const Matrix &m) { return m.bands * m.supers * (m.sub ? 2 * ROWS : m.symmetric ? 8 : 16); }
int64_t factor_bytes(const Matrix &m, int64_t length) {
  if (m.rank_bits == 16) return m.rank * length * 2;
  return m.rank * ceil_div(length, LR_GROUP) * (LR_GROUP / 8 * m.rank_bits + 2);
}

bool part(const uint8_t *slab, int64_t slab_bytes, int64_t at, int64_t bytes, const char *name, const void **out) {
  if (at < 0 || at > slab_bytes || bytes > slab_bytes - at)
    return fail("experts: part '%s' of %lld bytes at %lld does not fit a slab of %lld bytes", name, (long long)bytes,
                (long long)at, (long long)slab_bytes);
  *out = slab + at;
  return true;
}

// A stage of a lattice format: the scale of its points, and with it those of the codes that `decode` leaves.
void set_stage(Matrix *m, int kind, float scale) {
  m->kind = kind, m->scale = scale / 2, m->offset = kind == E8 ? -2 * scale : -3.75f * scale;
}

bool describe_super(const trilobite_matrix &w, Matrix *m) {
  if (!is_under_super(w.k, w.group, w.bits) || w.symmetric)
    return fail(
        "K=%lld, groups of %lld columns of %lld bits; under super-scales K is a multiple of %d, groups have %d or %d "
        "columns of 2, 3 or 4 bits, and offsets",
        (long long)w.k, (long long)w.group, (long long)w.bits, BLOCK, HALF, BLOCK);
  m->bits = (int)w.bits, m->kind = SUPER + m->bits, m->sub = (int)w.group;
  m->group = (int)tile_width(w.k);
  m->groups = w.k / m->group;
  m->code_bytes = (int64_t)m->group * m->bits * ROWS / 8;
  m->tile_bytes = m->code_bytes + ROWS * (m->group / m->sub);
  m->supers = ceil_div(w.k, SPAN);
  return true;
}

bool describe_lattice(const trilobite_matrix &w, Matrix *m) {
  uint8_t head[4];
  float scale[2];
  memcpy(head, w.lattice, sizeof head);
  memcpy(scale, (const uint8_t *)w.lattice + sizeof head, sizeof scale);
  const int bits = head[1];
  if (head[0] != 0 || bits < 1 || bits > 4 || head[2] != 0 || head[3] != 0)
    return fail("a lattice record of codebook %d, %d bits, transform %d; the native engine runs e8p with hadamard",
                head[0], bits, head[2]);
  if (w.bits != bits) return fail("%lld bits; the lattice record says %d", (long long)w.bits, bits);
  if (!(scale[0] >= 0 && scale[0] < INFINITY && scale[1] >= 0 && scale[1] < INFINITY))
    return fail("a lattice record with scales %g and %g", scale[0], scale[1]);
  if (w.k % BLOCK) return fail("a lattice matrix with K=%lld, which is no multiple of %d", (long long)w.k, BLOCK);
  if (!fits(w.rotate_in, w.k) || !fits(w.rotate_out, w.n))
    return fail("a lattice matrix of [%lld, %lld] with transforms of other lengths", (long long)w.n, (long long)w.k);
  m->in = {(const uint8_t *)w.signs_in, w.tuned != 0, w.rotate_in};
  m->out = {(const uint8_t *)w.signs_out, w.tuned != 0, w.rotate_out};
  m->group = 512;
  while (w.k % m->group) m->group /= 2;
  m->bits = bits, m->groups = w.k / m->group;
  m->tile_bytes = m->code_bytes = (int64_t)m->group * bits * ROWS / 8;
  m->second = bits > 2 ? scale[1] : 0;
  set_stage(m, bits == 1 ? E8 : E8P, scale[0]);
  return true;
}

}  // namespace

bool fits(const trilobite_rotation *r, int64_t n) {
  if (r == nullptr || r->n != n || r->count < 0 || r->count > TRILOBITE_CORES) return false;
  for (int64_t i = 0; i < r->count; i++) {
    if (r->order[i] < 2 || n % r->order[i] || r->core[i] == nullptr) return false;
    n /= r->order[i];
  }
  return (n & (n - 1)) == 0;
}

Matrix second_stage(const Matrix &first) {
  Matrix m = first;
  m.packed += 2 * ROWS, m.add = true;
  set_stage(&m, m.bits == 3 ? E8 : E8P, m.second);
  return m;
}

bool fail(const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(g_error, sizeof g_error, format, args);
  va_end(args);
  return false;
}

const char *last_error() { return g_error; }

bool describe(const trilobite_matrix &w, Matrix *m) {
  if (w.n < 1 || w.k < 1 || w.n > MOST_SIDE || w.k > MOST_SIDE)
    return fail("a matrix of [%lld, %lld] is out of range", (long long)w.n, (long long)w.k);
  if (w.rank < 0 || w.rank > MOST_SIDE || (w.rank > 0 && w.rank_bits != 3 && w.rank_bits != 8 && w.rank_bits != 16))
    return fail("a compensator of rank %lld in %lld bits; supported are 3, 8 and 16 bits", (long long)w.rank,
                (long long)w.rank_bits);
  *m = Matrix{};
  m->packed = (const uint8_t *)w.packed, m->super = (const uint8_t *)w.scale;
  m->lra = (const uint8_t *)w.lra, m->lrb = (const uint8_t *)w.lrb;
  m->n = w.n, m->k = w.k, m->rank = w.rank, m->rank_bits = w.rank > 0 ? (int)w.rank_bits : 0;
  m->bands = ceil_div(w.n, ROWS);
  if (w.lattice != nullptr) return describe_lattice(w, m);
  if (w.metadata == TRILOBITE_SUPER) return describe_super(w, m);
  if (w.metadata != TRILOBITE_PLAIN && w.metadata != TRILOBITE_DOUBLE)
    return fail("scales of kind %lld; known are 0, 1 and 2", (long long)w.metadata);
  const int64_t group = w.group == 0 ? w.k : w.group;
  if (w.bits != 2 && w.bits != 3 && w.bits != 4 && w.bits != 8)
    return fail("%lld bits; supported are 2, 3, 4 and 8", (long long)w.bits);
  if (!is_group(group, w.bits) || w.k % group || w.k % BLOCK)
    return fail(
        "K=%lld does not divide into groups of %lld columns; K is a multiple of %d, a group divides it and is a "
        "multiple of %d, or %d unless codes have 3 bits",
        (long long)w.k, (long long)group, BLOCK, BLOCK, HALF);
  m->bits = m->kind = (int)w.bits, m->group = (int)group, m->symmetric = w.symmetric != 0,
  m->double_quant = w.metadata == TRILOBITE_DOUBLE;
  m->groups = w.k / group;
  m->code_bytes = group * m->bits * ROWS / 8;
  m->tile_bytes = m->code_bytes + ROWS * (m->symmetric ? 1 : 2) * (m->double_quant ? 1 : 2);
  m->supers = m->double_quant ? ceil_div(m->groups, m->bits >= 4 ? 16 : 8) : 0;
  return true;
}

bool from_table(const uint8_t *slab, int64_t slab_bytes, const int64_t *row, int64_t n, int64_t k,
                const trilobite_rotation *in, const trilobite_rotation *out, Matrix *m, bool *present) {
  *present = row[0] >= 0;
  if (!*present) return true;
  trilobite_matrix w{};
  const void *p = nullptr;
  if (row[10] >= 0) {
    w.tuned = row[13] > 0, w.rotate_in = in, w.rotate_out = out;
    if (!part(slab, slab_bytes, row[10], RECORD_BYTES, "lattice", &w.lattice)) return false;
    if (!part(slab, slab_bytes, row[11], w.tuned ? 2 * k : ceil_div(k, 8), "signs_in", &w.signs_in)) return false;
    if (!part(slab, slab_bytes, row[12], w.tuned ? 2 * n : ceil_div(n, 8), "signs_out", &w.signs_out)) return false;
  }
  w.n = n, w.k = k, w.rank = row[4], w.rank_bits = row[5], w.bits = row[6], w.group = row[7];
  w.symmetric = row[8], w.metadata = row[9];
  if (!describe(w, m)) return false;
  if (!part(slab, slab_bytes, row[0], packed_bytes(*m), "packed", &p)) return false;
  m->packed = (const uint8_t *)p;
  if (m->supers > 0) {
    if (!part(slab, slab_bytes, row[1], scale_bytes(*m), "scale", &p)) return false;
    m->super = (const uint8_t *)p;
  }
  if (m->rank > 0) {
    if (!part(slab, slab_bytes, row[2], factor_bytes(*m, n), "lra", &p)) return false;
    m->lra = (const uint8_t *)p;
    if (!part(slab, slab_bytes, row[3], factor_bytes(*m, k), "lrb", &p)) return false;
    m->lrb = (const uint8_t *)p;
  }
  return true;
}

}  // namespace trilobite
