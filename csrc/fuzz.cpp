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
  Bytes packed, scale, lra, lrb;

  void point() {
    m.packed = packed.data();
    m.scale = scale.empty() ? nullptr : scale.data();
    m.lra = lra.empty() ? nullptr : lra.data();
    m.lrb = lrb.empty() ? nullptr : lrb.data();
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

void fill(Weight &w, int64_t n, int64_t k, int64_t group) {
  constexpr int64_t BITS[] = {2, 3, 4, 8}, RANK_BITS[] = {3, 8, 16};
  w.m.n = n, w.m.k = k, w.m.group = group, w.m.bits = BITS[pick(0, 3)];
  w.m.symmetric = pick(0, 1), w.m.double_quant = pick(0, 1);
  const int64_t bands = (n + 15) / 16, groups = k / group, code = group * w.m.bits * 2;
  const int64_t values = w.m.symmetric ? 16 : 32, tile = code + values * (w.m.double_quant ? 1 : 2);
  w.packed = noise(bands * groups * tile);
  if (!w.m.double_quant)
    for (int64_t t = 0; t < bands * groups; t++)
      for (int64_t i = 0; i < values; i++) put_half(&w.packed[t * tile + code + 2 * i], some_half());
  if (w.m.double_quant) {
    const int64_t per = w.m.bits >= 4 ? 16 : 8, pairs = bands * ((groups + per - 1) / per) * (w.m.symmetric ? 1 : 2);
    w.scale.resize(pairs * 8);
    for (int64_t i = 0; i < pairs; i++) {
      const float pair[2] = {1e-4f, 0.01f * gaussian()};
      memcpy(&w.scale[8 * i], pair, 8);
    }
  }
  w.m.rank = pick(0, 2) ? 0 : pick(1, 40);
  if (w.m.rank) {
    w.m.rank_bits = RANK_BITS[pick(0, 2)];
    w.lra = factor(w.m.rank, n, w.m.rank_bits);
    w.lrb = factor(w.m.rank, k, w.m.rank_bits);
  }
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

constexpr const char *TIERS[] = {"scalar", "neon", "avx2", "avx512", "avx512_vnni", "amx"};

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
  snprintf(what, sizeof what, "linear n=%ld k=%ld tokens=%ld bits=%ld group=%ld rank=%ld/%ld digits=%ld", (long)n, (long)k,
           (long)tokens, (long)w.m.bits, (long)group, (long)w.m.rank, (long)w.m.rank_bits, (long)digits);
  return agree(what, tokens * n, 1e-5, [&](float *y) {
    return trilobite_linear(x.data(), TRILOBITE_F32, tokens, &w.m, pick(0, 1) ? bias.data() : bias.data(), TRILOBITE_F32, y,
                            digits, threads);
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

Layer some_layer(int64_t experts, int64_t hidden, int64_t intermediate, int64_t group, bool gated) {
  Layer l;
  for (int64_t e = 0; e < experts; e++)
    for (int p = 0; p < 3; p++) {
      if (p == 0 && !gated) {
        l.table.insert(l.table.end(), TRILOBITE_COLUMNS, -1);
        continue;
      }
      Weight w;
      fill(w, p == 2 ? hidden : intermediate, p == 2 ? intermediate : hidden, group);
      const int64_t row[] = {l.add(w.packed), l.add(w.scale), l.add(w.lra), l.add(w.lrb), w.m.rank, w.m.rank_bits,
                             w.m.bits, w.m.group, w.m.symmetric, w.m.double_quant};
      l.table.insert(l.table.end(), row, row + 10);
      l.table.insert(l.table.end(), TRILOBITE_COLUMNS - 10, -1);
    }
  return l;
}

bool fuzz_experts() {
  const int64_t group = 32 * pick(1, 3), hidden = group * pick(1, 3), intermediate = group * pick(1, 3);
  const int64_t experts = pick(1, 6), active = pick(1, 3), tokens = pick(1, 30);
  Layer l = some_layer(experts, hidden, intermediate, group, pick(0, 3) > 0);
  if (pick(0, 3) == 0) l.table[pick(0, (int64_t)l.table.size() - 1)] = (int64_t)g_random() >> pick(0, 63);  // a broken table
  const auto x = activations(tokens * hidden), weights = activations(tokens * active);
  std::vector<int64_t> index(tokens * active);
  for (auto &i : index) i = pick(-1, experts + 1);
  trilobite_experts_args a{};
  a.x = x.data(), a.index = index.data(), a.weights = weights.data(), a.slab = l.slab.data(), a.table = l.table.data();
  a.index_bytes = 8, a.tokens = tokens, a.active = active, a.experts = experts, a.hidden = hidden;
  a.intermediate = intermediate, a.slab_bytes = (int64_t)l.slab.size(), a.activation = pick(0, 8);
  a.digits = TRILOBITE_EXACT, a.threads = pick(1, 2);
  // Activations amplify: a broken table may also decode to anything, so there only the codes are compared.
  return agree("experts", tokens * hidden, 1e-3, [&](float *y) {
    a.y = y;
    const int code = trilobite_experts(&a);
    for (int64_t i = 0; i < tokens * hidden; i++)
      if (!isfinite(y[i]) || fabsf(y[i]) > 1e6f) y[i] = 0;
    return code;
  });
}

}  // namespace

int main(int argc, char **argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 200;
  g_random.seed(argc > 2 ? atoi(argv[2]) : 1);
  for (int i = 0; i < rounds; i++)
    if (!fuzz_linear() || !fuzz_experts()) {
      printf("failed in round %d\n", i);
      return 1;
    }
  printf("%d rounds on tiers up to %s\n", rounds, trilobite_tier());
  return 0;
}
