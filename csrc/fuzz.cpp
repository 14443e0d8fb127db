// Random shapes through the C interface, every tier against the portable one. Meant for a build with sanitizers: all
// buffers are exactly as large as the format says, so that reading one byte too many is found.
//     fuzz [rounds] [seed]
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <random>
#include <vector>

#include "trilobite.h"

namespace {

std::mt19937_64 g_random;

int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(g_random); }
float gaussian() { return std::normal_distribution<float>()(g_random); }

using Bytes = std::vector<uint8_t>;

Bytes noise(int64_t size) {
  Bytes b(size);
  for (auto &v : b) v = (uint8_t)g_random();
  return b;
}

void put_half(uint8_t *at, uint16_t h) { memcpy(at, &h, 2); }
// fp16 in +-[2^-7, 2^-5): ordinary scales, never infinite.
uint16_t some_half() { return (uint16_t)((g_random() & 0x83ff) | (pick(8, 9) << 10)); }

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

Bytes factor(int64_t rank, int64_t length, int64_t bits) {
  const int64_t groups = (length + 63) / 64, size = 8 * bits + 2;
  Bytes b = noise(bits == 16 ? rank * length * 2 : rank * groups * size);
  if (bits == 16)
    for (int64_t i = 0; i < rank * length; i++) put_half(&b[2 * i], some_half());
  else
    for (int64_t i = 0; i < rank * groups; i++) put_half(&b[(i + 1) * size - 2], some_half());
  return b;
}

// Under super-scales; tiles are of 64 columns, or of 32. Scales are small enough that no code counts more than 254.
void fill_super(Weight &w, int64_t n, int64_t k) {
  w.m.n = n, w.m.k = k, w.m.bits = pick(2, 4), w.m.group = pick(0, 1) ? 16 : 32, w.m.metadata = TRILOBITE_SUPER;
  const int64_t bands = (n + 15) / 16, supers = bands * ((k + 255) / 256) * 16;
  w.packed = noise(bands * (k * w.m.bits * 2 + 16 * k / w.m.group));
  const int64_t tile = k % 64 ? 32 : 64, codes = tile * w.m.bits * 2, bytes = codes + 16 * tile / w.m.group;
  for (int64_t i = 0; i < (int64_t)w.packed.size(); i++)
    if (i % bytes >= codes) w.packed[i] &= w.m.bits == 4 ? 0xf7 : 0xff;  // 8 * 15 + 8 * 15
  w.scale = Bytes(2 * supers);
  for (int64_t i = 0; i < supers; i++) put_half(&w.scale[2 * i], some_half());
}

void some_factors(Weight &w, int64_t n, int64_t k) {
  constexpr int64_t RANK_BITS[] = {3, 8, 16};
  w.m.rank = pick(0, 2) ? 0 : pick(1, 40);
  if (w.m.rank) {
    w.m.rank_bits = RANK_BITS[pick(0, 2)];
    w.lra = factor(w.m.rank, n, w.m.rank_bits);
    w.lrb = factor(w.m.rank, k, w.m.rank_bits);
  }
  w.point();
}

void fill(Weight &w, int64_t n, int64_t k, int64_t group) {
  constexpr int64_t BITS[] = {2, 3, 4, 8};
  if (!pick(0, 3)) {
    fill_super(w, n, k);
    return some_factors(w, n, k);
  }
  w.m.n = n, w.m.k = k, w.m.bits = BITS[pick(0, 3)];
  w.m.group = group = w.m.bits != 3 && !pick(0, 3) ? 16 : group;
  w.m.symmetric = pick(0, 1), w.m.metadata = pick(0, 1);
  const int64_t bands = (n + 15) / 16, groups = k / group, code = group * w.m.bits * 2;
  const int64_t values = w.m.symmetric ? 16 : 32, tile = code + values * (w.m.metadata ? 1 : 2);
  w.packed = noise(bands * groups * tile);
  if (!w.m.metadata)
    for (int64_t t = 0; t < bands * groups; t++)
      for (int64_t i = 0; i < values; i++) put_half(&w.packed[t * tile + code + 2 * i], some_half());
  if (w.m.metadata) {
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
int64_t some_length(int64_t low, int64_t high) {
  constexpr int64_t CORES[] = {1, 3, 5, 15};
  return CORES[pick(0, 3)] << pick(low, high);
}

Bytes some_signs(int64_t n, bool tuned) {
  Bytes b = noise(tuned ? 2 * n : (n + 7) / 8);
  for (int64_t i = 0; tuned && i < n; i++) put_half(&b[2 * i], some_half());
  return b;
}

void fill_lattice(Weight &w, int64_t n, int64_t k, const Turn &in, const Turn &out) {
  w.m.n = n, w.m.k = k, w.m.bits = pick(2, 4), w.m.tuned = pick(0, 1);
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

std::vector<float> activations(int64_t count) {
  std::vector<float> x(count);
  for (auto &v : x) v = gaussian();
  return x;
}

double difference(const std::vector<float> &a, const std::vector<float> &b) {
  double d = 0, n = 1e-30;
  for (size_t i = 0; i < a.size(); i++) d += (a[i] - b[i]) * (double)(a[i] - b[i]), n += b[i] * (double)b[i];
  return sqrt(d / n);
}

constexpr const char *TIERS[] = {"scalar",      "neon",        "avx2",        "avx_vnni", "avx512",
                                 "avx512_vnni", "avx512_gfni", "avx512_bf16", "amx"};

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

bool fuzz_linear() {
  const int64_t group = 32 * pick(1, 5), k = group * pick(1, 5), n = pick(1, 150), tokens = pick(0, 3) ? pick(1, 40) : 0;
  Weight w;
  fill(w, n, k, group);
  const auto x = activations(tokens * k), bias = activations(n);
  const int64_t digits = pick(0, 1) ? TRILOBITE_EXACT : TRILOBITE_INT8, threads = pick(1, 2);
  char what[200];
  snprintf(what, sizeof what, "linear n=%ld k=%ld tokens=%ld bits=%ld group=%ld rank=%ld/%ld digits=%ld", (long)n,
           (long)k, (long)tokens, (long)w.m.bits, (long)group, (long)w.m.rank, (long)w.m.rank_bits, (long)digits);
  return agree(what, tokens * n, 1e-5, [&](float *y) {
    return trilobite_linear(x.data(), TRILOBITE_F32, tokens, &w.m, bias.data(), TRILOBITE_F32, y, digits, threads);
  });
}

bool fuzz_lattice() {
  const int64_t k = some_length(5, 8), n = some_length(0, 6), tokens = pick(0, 40);
  const Turn in(k), out(n);
  Weight w;
  fill_lattice(w, n, k, in, out);
  const auto x = activations(tokens * k), bias = activations(n);
  const int64_t digits = pick(0, 1) ? TRILOBITE_EXACT : TRILOBITE_INT8, threads = pick(1, 2);
  char what[200];
  snprintf(what, sizeof what, "lattice n=%ld k=%ld tokens=%ld bits=%ld tuned=%ld rank=%ld digits=%ld", (long)n, (long)k,
           (long)tokens, (long)w.m.bits, (long)w.m.tuned, (long)w.m.rank, (long)digits);
  // With one digit a value that lies between two steps may round either way, as its last bit comes out of the rotation.
  return agree(what, tokens * n, digits == TRILOBITE_EXACT ? 1e-4 : 2e-2, [&](float *y) {
    return trilobite_linear(x.data(), TRILOBITE_F32, tokens, &w.m, bias.data(), TRILOBITE_F32, y, digits, threads);
  });
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
Layer some_layer(int64_t experts, int64_t hidden, int64_t intermediate, int64_t group, bool gated,
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

bool fuzz_experts(bool lattice) {
  const int64_t group = lattice ? 32 : 32 * pick(1, 3), hidden = lattice ? some_length(5, 6) : group * pick(1, 3);
  const int64_t intermediate = lattice ? some_length(5, 6) : group * pick(1, 3);
  const Turn h(hidden), i(intermediate);
  const int64_t experts = pick(1, 6), active = pick(1, 3), tokens = pick(1, 30);
  const bool gated = pick(0, 3) > 0;
  Layer l = some_layer(experts, hidden, intermediate, group, gated, lattice ? &h : nullptr, lattice ? &i : nullptr);
  if (pick(0, 3) == 0)
    l.table[pick(0, (int64_t)l.table.size() - 1)] = (int64_t)g_random() >> pick(0, 63);  // a broken table
  const auto x = activations(tokens * hidden), weights = activations(tokens * active);
  const auto gate_up_bias = activations(experts * (1 + gated) * intermediate), down_bias = activations(experts * hidden);
  std::vector<int64_t> index(tokens * active);
  for (auto &e : index) e = pick(-1, experts + 1);
  trilobite_experts_args a{};
  a.x = x.data(), a.index = index.data(), a.weights = weights.data(), a.slab = l.slab.data(), a.table = l.table.data();
  a.index_bytes = 8, a.tokens = tokens, a.active = active, a.experts = experts, a.hidden = hidden;
  a.intermediate = intermediate, a.slab_bytes = (int64_t)l.slab.size(), a.activation = pick(0, gated ? 12 : 8);
  a.numbers[0] = (float)pick(1, 3), a.numbers[1] = (float)pick(2, 9);
  a.digits = TRILOBITE_EXACT, a.threads = pick(1, 2), a.gated = gated;
  if (pick(0, 1)) a.gate_up_bias = gate_up_bias.data(), a.down_bias = down_bias.data();
  if (lattice) a.rotate_hidden = &h.r, a.rotate_intermediate = &i.r;
  // Activations amplify: a broken table may also decode to anything, so there only the codes are compared.
  return agree("experts", tokens * hidden, 1e-3, [&](float *y) {
    a.y = y;
    const int code = trilobite_experts(&a);
    for (int64_t i = 0; i < tokens * hidden; i++)
      if (!isfinite(y[i]) || fabsf(y[i]) > 1e6f) y[i] = 0;
    return code;
  });
}

// Rows of a cache that is exactly as large as they need, of any element type; heads lie side by side or apart.
bool fuzz_attention() {
  const int64_t texts = pick(1, 5), kv_heads = pick(1, 4), heads = kv_heads * pick(1, 6), width = 16 * pick(1, 9);
  const int64_t limit = pick(1, 60), dtype = pick(0, 2), size = dtype ? 2 : 4;
  std::vector<int64_t> rows, starts{0};
  for (int64_t t = 0; t < texts; t++) {
    for (int64_t i = pick(1, 70); i > 0; i--) rows.push_back(pick(0, limit - 1));
    starts.push_back((int64_t)rows.size());
  }
  if (pick(0, 9) == 0) rows[pick(0, (int64_t)rows.size() - 1)] = pick(0, 1) ? -1 : limit;
  const auto cache = [&](int64_t n) {
    Bytes b(n * size);
    for (int64_t i = 0; i < n; i++) {
      const float f = gaussian();
      uint32_t u;
      memcpy(&u, &f, 4);
      if (dtype == TRILOBITE_F32) memcpy(&b[4 * i], &f, 4);
      else put_half(&b[2 * i], dtype == TRILOBITE_BF16 ? (uint16_t)(u >> 16) : some_half());
    }
    return b;
  };
  const int64_t elements = limit * kv_heads * width;
  const Bytes q = cache(texts * heads * width), k = cache(elements), v = cache(elements);
  const auto sinks = activations(heads);
  trilobite_attention_args a{};
  a.q = q.data(), a.k = k.data(), a.v = v.data(), a.rows = rows.data(), a.starts = starts.data();
  a.dtype = dtype, a.texts = texts, a.heads = heads, a.kv_heads = kv_heads, a.width = width, a.limit = limit;
  const bool apart = pick(0, 1);
  a.row_stride = apart ? width : kv_heads * width, a.head_stride = apart ? limit * width : width;
  a.threads = pick(1, 3), a.scale = 0.2f, a.softcap = pick(0, 3) ? 0 : 5.0f,
  a.sinks = pick(0, 1) ? sinks.data() : nullptr;
  Bytes made(texts * heads * width * size);
  return agree("attention", texts * heads * width, dtype ? 2e-2 : 1e-5, [&](float *y) {
    a.y = made.data();
    const int code = trilobite_attention(&a);
    for (int64_t i = 0; i < texts * heads * width; i++) {
      if (dtype == TRILOBITE_F32) {
        memcpy(&y[i], &made[4 * i], 4);
        continue;
      }
      const uint32_t h = made[2 * i] | (uint32_t)made[2 * i + 1] << 8, bits = h << 16;
      const int exponent = h >> 10 & 31, fraction = (int)(h & 1023) + (exponent ? 1024 : 0);
      if (dtype == TRILOBITE_BF16) memcpy(&y[i], &bits, 4);
      else y[i] = (h >> 15 ? -1.0f : 1.0f) * ldexpf((float)fraction, (exponent ? exponent : 1) - 25);
    }
    return code;
  });
}

}  // namespace

int main(int argc, char **argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 200;
  g_random.seed(argc > 2 ? atoi(argv[2]) : 1);
  for (int i = 0; i < rounds; i++)
    if (!fuzz_linear() || !fuzz_lattice() || !fuzz_experts(false) || !fuzz_experts(true) || !fuzz_attention()) {
      printf("failed in round %d\n", i);
      return 1;
    }
  printf("%d rounds on tiers up to %s\n", rounds, trilobite_tier());
  return 0;
}
