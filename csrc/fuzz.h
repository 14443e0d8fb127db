// What the fuzz drivers make up: numbers, packed matrices of any format, layers of experts. All buffers are exactly as large
// as the format says.
#ifndef TRILOBITE_FUZZ_H
#define TRILOBITE_FUZZ_H
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <random>
#include <vector>

#include "kernel_convert.h"
#include "step.h"
#include "trilobite.h"

namespace fuzz {

inline std::mt19937_64 g_random;

inline int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(g_random); }
inline float gaussian() { return std::normal_distribution<float>()(g_random); }

using Bytes = std::vector<uint8_t>;

inline Bytes noise(int64_t size) {
  Bytes b(size);
  for (auto &v : b) v = (uint8_t)g_random();
  return b;
}

inline void put_half(uint8_t *at, uint16_t h) { memcpy(at, &h, 2); }
// fp16 in +-[2^-7, 2^-5): ordinary scales, never infinite.
inline uint16_t some_half() { return (uint16_t)((g_random() & 0x83ff) | (pick(8, 9) << 10)); }

struct Weight {
  trilobite_matrix m{};
  Bytes packed, scale, lra, lrb, lattice, signs_in, signs_out;

  void point() {
    m.packed = packed.data();
    m.scale = scale.empty() ? nullptr : scale.data();
    m.lra = lra.empty() ? nullptr : lra.data();
    m.lrb = lrb.empty() ? nullptr : lrb.data();
    m.lattice = lattice.empty() ? nullptr : lattice.data();
    m.signs_in = signs_in.data(), m.signs_out = signs_out.data();
  }
};

inline Bytes factor(int64_t rank, int64_t length, int64_t bits) {
  const int64_t groups = (length + 63) / 64, size = 8 * bits + 2;
  Bytes b = noise(bits == 16 ? rank * length * 2 : rank * groups * size);
  if (bits == 16)
    for (int64_t i = 0; i < rank * length; i++) put_half(&b[2 * i], some_half());
  else
    for (int64_t i = 0; i < rank * groups; i++) put_half(&b[(i + 1) * size - 2], some_half());
  return b;
}

// Under super-scales; tiles are of 64 columns, or of 32. Scales are small enough that no code counts more than 254.
inline void super_codes(Weight &w, int64_t n, int64_t k) {
  w.m.metadata = TRILOBITE_SUPER;
  const int64_t bands = (n + 15) / 16, supers = bands * ((k + 255) / 256) * 16;
  w.packed = noise(bands * (k * w.m.bits * 2 + 16 * k / w.m.group));
  const int64_t tile = k % 64 ? 32 : 64, codes = tile * w.m.bits * 2, bytes = codes + 16 * tile / w.m.group;
  for (int64_t i = 0; i < (int64_t)w.packed.size(); i++)
    if (i % bytes >= codes) w.packed[i] &= w.m.bits == 4 ? 0xf7 : 0xff;  // 8 * 15 + 8 * 15
  w.scale = Bytes(2 * supers);
  for (int64_t i = 0; i < supers; i++) put_half(&w.scale[2 * i], some_half());
}

// Scales and offsets in fp16.
inline void plain_codes(Weight &w, int64_t n, int64_t k) {
  const int64_t tiles = (n + 15) / 16 * (k / w.m.group), code = w.m.group * w.m.bits * 2;
  const int64_t values = w.m.symmetric ? 16 : 32, tile = code + values * 2;
  w.packed = noise(tiles * tile);
  for (int64_t t = 0; t < tiles; t++)
    for (int64_t i = 0; i < values; i++) put_half(&w.packed[t * tile + code + 2 * i], some_half());
}

inline void some_factors(Weight &w, int64_t n, int64_t k) {
  constexpr int64_t RANK_BITS[] = {3, 8, 16};
  w.m.rank = pick(0, 2) ? 0 : pick(1, 40);
  if (w.m.rank) {
    w.m.rank_bits = RANK_BITS[pick(0, 2)];
    w.lra = factor(w.m.rank, n, w.m.rank_bits);
    w.lrb = factor(w.m.rank, k, w.m.rank_bits);
  }
  w.point();
}

inline void fill(Weight &w, int64_t n, int64_t k, int64_t group) {
  constexpr int64_t BITS[] = {2, 3, 4, 8};
  w.m.n = n, w.m.k = k;
  if (!pick(0, 3)) {
    w.m.bits = pick(2, 4), w.m.group = pick(0, 1) ? 16 : 32;
    super_codes(w, n, k);
    return some_factors(w, n, k);
  }
  w.m.bits = BITS[pick(0, 3)];
  w.m.group = group = w.m.bits != 3 && !pick(0, 3) ? 16 : group;
  w.m.symmetric = pick(0, 1), w.m.metadata = pick(0, 1);
  if (!w.m.metadata) plain_codes(w, n, k);
  if (w.m.metadata) {
    const int64_t bands = (n + 15) / 16, groups = k / group, values = w.m.symmetric ? 16 : 32;
    w.packed = noise(bands * groups * (group * w.m.bits * 2 + values));
    const int64_t per = w.m.bits >= 4 ? 16 : 8, pairs = bands * ((groups + per - 1) / per) * (w.m.symmetric ? 1 : 2);
    w.scale.resize(pairs * 8);
    for (int64_t i = 0; i < pairs; i++) {
      const float pair[2] = {1e-4f, 0.01f * gaussian()};
      memcpy(&w.scale[8 * i], pair, 8);
    }
  }
  some_factors(w, n, k);
}

// Whatever Hadamard matrix: the tiers must agree on any core.
struct Turn {
  std::vector<float> core;
  trilobite_rotation r{};

  explicit Turn(int64_t n) {
    r.n = n;
    for (int64_t order : {3, 5})
      if (n % order == 0) r.order[r.count++] = order;
    for (int64_t i = 0; i < 25; i++) core.push_back(pick(0, 1) ? 1.0f : -1.0f);
    for (int64_t i = 0; i < r.count; i++) r.core[i] = core.data();
  }
};

// A length of the form 2^a, 3 * 2^a, 5 * 2^a or 15 * 2^a, a at least `low`.
inline int64_t some_length(int64_t low, int64_t high) {
  constexpr int64_t CORES[] = {1, 3, 5, 15};
  return CORES[pick(0, 3)] << pick(low, high);
}

inline int64_t some_tokens() { return pick(0, 1) ? 1 : pick(1, 40); }

// Of a matrix: bands of whole units, too, which may lie apart.
inline int64_t some_rows() { return pick(0, 1) ? pick(1, 150) : 64 * pick(1, 5); }

inline Bytes some_signs(int64_t n, bool tuned) {
  Bytes b = noise(tuned ? 2 * n : (n + 7) / 8);
  for (int64_t i = 0; tuned && i < n; i++) put_half(&b[2 * i], some_half());
  return b;
}

inline void fill_lattice(Weight &w, int64_t n, int64_t k, const Turn &in, const Turn &out) {
  w.m.n = n, w.m.k = k, w.m.bits = pick(1, 4), w.m.tuned = pick(0, 1);
  w.m.rotate_in = &in.r, w.m.rotate_out = &out.r;
  w.packed = noise((n + 15) / 16 * (k / 8) * 16 * w.m.bits);
  w.lattice = Bytes(12);
  w.lattice[1] = (uint8_t)w.m.bits;
  const float scales[2] = {0.05f, w.m.bits > 2 ? 0.02f : 0.0f};
  memcpy(&w.lattice[4], scales, sizeof scales);
  w.signs_in = some_signs(k, w.m.tuned), w.signs_out = some_signs(n, w.m.tuned);
  w.m.rank = pick(0, 2) ? 0 : pick(1, 20), w.m.rank_bits = 3;
  if (w.m.rank) w.lra = factor(w.m.rank, n, 3), w.lrb = factor(w.m.rank, k, 3);
  w.point();
}

inline std::vector<float> activations(int64_t count) {
  std::vector<float> x(count);
  for (auto &v : x) v = gaussian();
  return x;
}

inline int64_t some_dtype() { return pick(0, 2); }

inline Bytes stored(const std::vector<float> &x, int64_t dtype) {
  Bytes b(x.size() * trilobite::size_of(dtype));
  if (!b.empty()) trilobite::store_floats(x.data(), (int64_t)x.size(), b.data(), (int)dtype);
  return b;
}

inline void load(const Bytes &b, int64_t dtype, float *x) {
  if (!b.empty()) trilobite::load_floats(b.data(), (int)dtype, 0, (int64_t)b.size() / trilobite::size_of(dtype), x);
}

struct Layer {
  Bytes slab;
  std::vector<int64_t> table;

  int64_t add(const Bytes &part) {
    const auto at = (int64_t)slab.size();
    slab.insert(slab.end(), part.begin(), part.end());
    return part.empty() ? -1 : at;
  }
};

// With transforms, some of the matrices are in lattice formats.
inline Layer some_layer(int64_t experts, int64_t hidden, int64_t intermediate, int64_t group, bool gated,
                        const Turn *h = nullptr, const Turn *i = nullptr) {
  Layer l;
  for (int64_t e = 0; e < experts; e++)
    for (int p = 0; p < 3; p++) {
      if (p == 0 && !gated) {
        l.table.insert(l.table.end(), TRILOBITE_COLUMNS, -1);
        continue;
      }
      Weight w;
      const bool lattice = h && pick(0, 3);
      if (lattice && p == 2) fill_lattice(w, hidden, intermediate, *i, *h);
      else if (lattice) fill_lattice(w, intermediate, hidden, *h, *i);
      else fill(w, p == 2 ? hidden : intermediate, p == 2 ? intermediate : hidden, group);
      const int64_t row[] = {l.add(w.packed), l.add(w.scale), l.add(w.lra), l.add(w.lrb),  w.m.rank,
                             w.m.rank_bits,   w.m.bits,       w.m.group,    w.m.symmetric, w.m.metadata};
      l.table.insert(l.table.end(), row, row + 10);
      const int64_t more[] = {l.add(w.lattice), l.add(w.signs_in), l.add(w.signs_out), w.m.tuned, 0, 0};
      l.table.insert(l.table.end(), more, more + 6);
    }
  return l;
}

inline double difference(const std::vector<float> &a, const std::vector<float> &b) {
  double d = 0, n = 1e-30;
  for (size_t i = 0; i < a.size(); i++) d += (a[i] - b[i]) * (double)(a[i] - b[i]), n += b[i] * (double)b[i];
  return sqrt(d / n);
}

inline constexpr const char *TIERS[] = {"scalar", "neon",        "neon_i8mm",   "avx2",        "avx_vnni",
                                        "avx512", "avx512_vnni", "avx512_gfni", "avx512_bf16", "amx"};

// Runs call(out) on every tier; all must return the same code and, where it is 0, the same numbers.
template <typename Call> bool agree(const char *what, int64_t size, double tolerance, Call call) {
  std::vector<float> first;
  int expected = 0;
  for (const char *tier : TIERS) {
    trilobite_set_tier(tier);
    std::vector<float> out(size);
    const int code = call(out.data());
    if (tier == TIERS[0]) first = out, expected = code;
    const double d = code ? 0 : difference(out, first);
    if (code != expected || !(d < tolerance)) {
      printf("%s: tier %s returns %d (scalar %d), difference %g\n", what, tier, code, expected, d);
      return false;
    }
  }
  return true;
}

// Lists of nodes, of which most are broken: `check` refuses them, or they run; says how many it accepted of how many.
bool fuzz_step();
struct StepCount { int64_t lists, broken, refused; };
extern StepCount g_steps;

}  // namespace fuzz
#endif
