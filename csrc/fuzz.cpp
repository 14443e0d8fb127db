// Random shapes through the C interface, every tier against the portable one. Meant for a build with sanitizers: all
// buffers are exactly as large as the format says, so that reading one byte too many is found.
//     fuzz [rounds] [seed]
#include "fuzz.h"

using namespace fuzz;

namespace {

// Activations of any type, or such of 16 bits that one value of 64 is 2^11 times the others, which are all there or few: in
// exact mode those have lowest digits then. A bias takes away what the large ones, the same for all tokens, make of the
// result, so that it shows what became of the small ones, though it is rounded to 16 bits.
struct Inputs {
  std::vector<float> x, bias;
  int64_t dtype = some_dtype();
  double tolerance = dtype == TRILOBITE_F32 ? 1e-5 : 1e-2;

  Inputs(const Weight &w, int64_t tokens, int64_t digits) : x(activations(tokens * w.m.k)), bias(activations(w.m.n)) {
    if (dtype == TRILOBITE_F32 || digits != TRILOBITE_EXACT || pick(0, 1)) return;
    std::vector<float> large(w.m.k);
    const int64_t rare = pick(0, 1) ? 0 : 15;
    for (float &v : x) v *= pick(0, rare) ? 0 : 0x1p-11f;
    for (int64_t c = pick(0, 63); c < w.m.k; c += 64) {
      large[c] = pick(0, 1) ? 1.0f : -1.5f;
      for (int64_t t = 0; t < tokens; t++) x[t * w.m.k + c] = large[c];
    }
    trilobite_set_tier("scalar");
    trilobite_linear(large.data(), TRILOBITE_F32, 1, &w.m, nullptr, TRILOBITE_F32, bias.data(), digits, 1);
    for (float &b : bias) b = -b;
  }
};

bool fuzz_linear() {
  const int64_t group = 32 * pick(1, 5), k = group * pick(1, 5), n = some_rows(),
                tokens = pick(0, 3) ? some_tokens() : 0;
  Weight w;
  fill(w, n, k, group);
  const int64_t digits = pick(0, 1) ? TRILOBITE_EXACT : TRILOBITE_INT8, threads = pick(1, 2);
  const Inputs in(w, tokens, digits);
  const Bytes x = stored(in.x, in.dtype);
  Bytes made(tokens * n * trilobite::size_of(in.dtype));
  char what[200];
  snprintf(what, sizeof what, "linear n=%ld k=%ld tokens=%ld bits=%ld group=%ld rank=%ld/%ld digits=%ld dtype=%ld",
           (long)n, (long)k, (long)tokens, (long)w.m.bits, (long)group, (long)w.m.rank, (long)w.m.rank_bits,
           (long)digits, (long)in.dtype);
  return agree(what, tokens * n, in.tolerance, [&](float *y) {
    const int code =
        trilobite_linear(x.data(), in.dtype, tokens, &w.m, in.bias.data(), TRILOBITE_F32, made.data(), digits, threads);
    load(made, in.dtype, y);
    return code;
  });
}

// Matrices that read the same x, some of other groups, have the bits of calls of their own, on every tier.
bool fuzz_together() {
  const int64_t count = pick(1, 10), k = 64 * pick(1, 6), tokens = some_tokens();
  const int64_t digits = pick(0, 1) ? TRILOBITE_EXACT : TRILOBITE_INT8;
  const int64_t dtype = some_dtype();
  const Bytes x = stored(activations(tokens * k), dtype);
  const auto bias = activations(320);
  const Turn in(k);
  std::vector<Turn> turns;
  std::vector<Weight> weights(count);
  std::vector<trilobite_product> products(count);
  std::vector<Bytes> made(count), alone(count);
  turns.reserve(count);
  for (int64_t i = 0; i < count; i++) {
    const bool lattice = !pick(0, 5);
    const int64_t n = lattice ? some_length(0, 6) : some_rows();
    turns.emplace_back(n);
    if (lattice) fill_lattice(weights[i], n, k, in, turns.back());
    else fill(weights[i], n, k, pick(0, 2) ? 64 : 32);
    weights[i].point();
    made[i].resize(tokens * n * trilobite::size_of(dtype)), alone[i].resize(made[i].size());
    products[i] = {&weights[i].m, pick(0, 1) && n <= 320 ? bias.data() : nullptr, TRILOBITE_F32, made[i].data()};
  }
  for (const char *tier : TIERS) {
    trilobite_set_tier(tier);
    int code = trilobite_linears(x.data(), dtype, tokens, products.data(), count, digits, pick(1, 3));
    for (int64_t i = 0; i < count && code == 0; i++) {
      const trilobite_product &p = products[i];
      code = trilobite_linear(x.data(), dtype, tokens, p.w, p.bias, p.bias_dtype, alone[i].data(), digits, 1);
      if (code || alone[i] != made[i]) {
        printf("together: matrix %ld of %ld, %ld x %ld, tokens=%ld on %s: %s\n", (long)i, (long)count, (long)p.w->n,
               (long)k, (long)tokens, tier, code ? trilobite_error() : "other bits");
        return false;
      }
    }
    if (code) return printf("together: %s\n", trilobite_error()), false;
  }
  return true;
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

bool fuzz_experts(bool lattice) {
  const int64_t group = lattice ? 32 : 32 * pick(1, 3), hidden = lattice ? some_length(5, 6) : group * pick(1, 3);
  const int64_t intermediate = lattice ? some_length(5, 6) : group * pick(1, 3);
  const Turn h(hidden), i(intermediate);
  const int64_t experts = pick(1, 6), active = pick(1, 3), tokens = some_tokens();
  const bool gated = pick(0, 3) > 0;
  Layer l = some_layer(experts, hidden, intermediate, group, gated, lattice ? &h : nullptr, lattice ? &i : nullptr);
  if (pick(0, 3) == 0)
    l.table[pick(0, (int64_t)l.table.size() - 1)] = (int64_t)g_random() >> pick(0, 63);  // a broken table
  const int64_t dtype = some_dtype();
  const Bytes x = stored(activations(tokens * hidden), dtype);
  const auto weights = activations(tokens * active);
  Bytes made(tokens * hidden * trilobite::size_of(dtype));
  const auto gate_up_bias = activations(experts * (1 + gated) * intermediate), down_bias = activations(experts * hidden);
  std::vector<int64_t> index(tokens * active);
  for (auto &e : index) e = pick(-1, experts + 1);
  trilobite_experts_args a{};
  a.dtype = dtype, a.x = x.data(), a.y = made.data(), a.index = index.data(), a.weights = weights.data(),
  a.slab = l.slab.data(), a.table = l.table.data();
  a.index_bytes = 8, a.tokens = tokens, a.active = active, a.experts = experts, a.hidden = hidden;
  a.intermediate = intermediate, a.slab_bytes = (int64_t)l.slab.size(), a.activation = pick(0, gated ? 12 : 8);
  a.numbers[0] = (float)pick(1, 3), a.numbers[1] = (float)pick(2, 9);
  a.digits = TRILOBITE_EXACT, a.threads = pick(1, 2), a.gated = gated;
  if (pick(0, 1)) a.gate_up_bias = gate_up_bias.data(), a.down_bias = down_bias.data();
  if (lattice) a.rotate_hidden = &h.r, a.rotate_intermediate = &i.r;
  // Activations amplify: a broken table may also decode to anything, so there only the codes are compared.
  return agree("experts", tokens * hidden, dtype == TRILOBITE_F32 ? 1e-3 : 3e-2, [&](float *y) {
    const int code = trilobite_experts(&a);
    load(made, dtype, y);
    for (int64_t i = 0; i < tokens * hidden; i++)
      if (!isfinite(y[i]) || fabsf(y[i]) > 1e6f) y[i] = 0;
    return code;
  });
}

// Rows of a cache that is exactly as large as they need, of any element type; heads lie side by side or apart.
bool fuzz_attention() {
  const bool prompt = pick(0, 2) == 0;
  const int64_t texts = prompt ? pick(6, 40) : pick(1, 5), kv_heads = pick(1, 4), width = 16 * pick(1, 9);
  const int64_t heads = kv_heads * (pick(0, 9) ? pick(1, 6) : 70);
  const int64_t limit = pick(1, 60), dtype = some_dtype();
  std::vector<int64_t> rows, starts{0};
  for (int64_t t = 0; t < texts; t++) {
    for (int64_t i = pick(1, 70); i > 0; i--) rows.push_back(pick(0, limit - 1));
    starts.push_back((int64_t)rows.size());
  }
  std::vector<int64_t> ends(starts.begin() + 1, starts.end());
  starts.pop_back();
  const int64_t before = (int64_t)rows.size() - texts, window = pick(1, before + texts);
  for (int64_t t = 0; prompt && t < texts; t++)
    ends[t] = before + t + 1, starts[t] = std::max<int64_t>(0, ends[t] - window);
  for (int64_t t = 0; !prompt && pick(0, 1) && t < texts; t++) {  // or they share rows
    starts[t] = pick(0, (int64_t)rows.size() - 1);
    ends[t] = pick(starts[t] + 1, (int64_t)rows.size());
  }
  if (pick(0, 9) == 0) rows[pick(0, (int64_t)rows.size() - 1)] = pick(0, 1) ? -1 : limit;
  const int64_t elements = limit * kv_heads * width;
  const Bytes q = stored(activations(texts * heads * width), dtype), k = stored(activations(elements), dtype);
  const Bytes v = stored(activations(elements), dtype);
  const int64_t distances = pick(1, 40);
  const auto sinks = activations(heads), bias = activations(heads * distances);
  trilobite_attention_args a{};
  a.q = q.data(), a.k = k.data(), a.v = v.data(), a.rows = rows.data();
  a.starts = starts.data(), a.ends = ends.data();
  a.dtype = dtype, a.texts = texts, a.heads = heads, a.kv_heads = kv_heads, a.width = width, a.limit = limit;
  const bool apart = pick(0, 1);
  a.row_stride = apart ? width : kv_heads * width, a.head_stride = apart ? limit * width : width;
  a.threads = pick(1, 3), a.scale = 0.2f, a.softcap = pick(0, 3) ? 0 : 5.0f,
  a.sinks = pick(0, 1) ? sinks.data() : nullptr;
  a.bias = pick(0, 1) ? bias.data() : nullptr, a.distances = distances;
  Bytes made(q.size());
  return agree("attention", texts * heads * width, dtype ? 2e-2 : 1e-5, [&](float *y) {
    a.y = made.data();
    const int code = trilobite_attention(&a);
    load(made, dtype, y);
    return code;
  });
}

bool fuzz_dense() {
  const int64_t tokens = pick(1, 70), n = pick(1, 150), k = pick(0, 1) ? 16 * pick(1, 40) : pick(1, 700);
  const int64_t heads = pick(0, 1) ? 1 : pick(1, 5);
  const auto x = activations(heads * tokens * k), w = activations(heads * n * k), bias = activations(heads * n);
  trilobite_dense_args a{};
  a.x = x.data(), a.w = w.data(), a.bias = pick(0, 1) ? bias.data() : nullptr;
  a.heads = heads, a.tokens = tokens, a.n = n, a.k = k, a.threads = pick(1, 3);
  return agree("dense", heads * tokens * n, 1e-5, [&](float *y) {
    a.y = y;
    return trilobite_dense(&a);
  });
}

// Results and states of one token, of each of the layers that keep some.
bool fuzz_convolution() {
  const int64_t channels = pick(1, 300), taps = pick(1, 9);
  const auto x = activations(channels), w = activations(channels * taps), bias = activations(channels);
  const auto before = activations(channels * taps);
  trilobite_convolution_args a{};
  a.x = x.data(), a.w = w.data(), a.bias = pick(0, 1) ? bias.data() : nullptr;
  a.channels = channels, a.taps = taps, a.silu = pick(0, 1), a.threads = pick(1, 3);
  return agree("convolution", channels * (taps + 1), 1e-5, [&](float *y) {
    a.y = y, a.state = memcpy(y + channels, before.data(), before.size() * 4);
    return trilobite_convolve(&a);
  });
}

bool fuzz_delta() {
  const int64_t keys = pick(1, 3), heads = keys * pick(1, 3), width = pick(1, 70), columns = 16 * pick(1, 10);
  const int64_t tokens = pick(0, 1) ? 1 : pick(1, 70);
  const auto q = activations(tokens * keys * width), k = activations(tokens * keys * width);
  const auto v = activations(tokens * heads * columns), before = activations(heads * width * columns);
  auto decay = activations(tokens * heads * width), beta = activations(tokens * heads);
  for (auto &d : decay) d = -fabsf(d);
  for (auto &b : beta) b = 1 / (1 + expf(-b));
  trilobite_delta_args a{};
  a.q = q.data(), a.k = k.data(), a.v = v.data(), a.decay = decay.data(), a.beta = beta.data();
  a.tokens = tokens, a.heads = heads, a.key_heads = keys, a.width = width, a.value_width = columns;
  a.wide_decay = pick(0, 1), a.normed = tokens > 1 || pick(0, 1), a.threads = pick(1, 3);
  return agree("delta rule", heads * columns * (tokens + width), 1e-4, [&](float *y) {
    a.y = y, a.state = (float *)memcpy(y + tokens * heads * columns, before.data(), before.size() * 4);
    return trilobite_delta(&a);
  });
}

bool fuzz_scan() {
  const int64_t groups = pick(1, 3), heads = groups * pick(1, 3), width = pick(1, 40), size = 16 * pick(1, 9);
  const int64_t tokens = some_tokens();
  const auto x = activations(tokens * heads * width), b = activations(tokens * groups * size);
  const auto c = activations(tokens * groups * size), skip = activations(heads);
  auto step = activations(tokens * heads), decay = activations(heads);
  for (auto &s : step) s = fabsf(s);
  for (auto &d : decay) d = -fabsf(d);
  const auto before = activations(heads * width * size);
  trilobite_scan_args a{};
  a.x = x.data(), a.b = b.data(), a.c = c.data(), a.step = step.data(), a.decay = decay.data();
  a.skip = pick(0, 1) ? skip.data() : nullptr, a.tokens = tokens;
  a.heads = heads, a.groups = groups, a.width = width, a.size = size, a.threads = pick(1, 3);
  return agree("state space", heads * width * (tokens + size), 1e-5, [&](float *y) {
    a.y = y, a.state = (float *)memcpy(y + tokens * heads * width, before.data(), before.size() * 4);
    return trilobite_scan(&a);
  });
}

// Vectors of any numbers, damaged ones too: codes are those of points.
bool fuzz_nearest() {
  const int64_t count = pick(0, 60), bits = pick(1, 4);
  auto x = activations(8 * count);
  for (int64_t i = pick(0, 3) ? 0 : pick(0, count); i > 0; i--) {
    const uint32_t any = (uint32_t)g_random();
    memcpy(&x[pick(0, 8 * count - 1)], &any, 4);
  }
  std::vector<int64_t> codes(count);
  std::vector<float> points(8 * count);
  if (trilobite_nearest_points(x.data(), count, bits, 0.5 * (double)pick(1, 8), codes.data(), points.data()))
    return printf("nearest points: %s\n", trilobite_error()), false;
  for (int64_t code : codes)
    if (code < 0 || code >> (8 * bits))
      return printf("nearest points of %ld bits: %ld\n", (long)bits, (long)code), false;
  return true;
}

}  // namespace

int main(int argc, char **argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 200;
  g_random.seed(argc > 2 ? atoi(argv[2]) : 1);
  for (int i = 0; i < rounds; i++)
    if (!fuzz_linear() || !fuzz_linear() || !fuzz_linear() || !fuzz_together() || !fuzz_lattice() ||
        !fuzz_experts(false) || !fuzz_experts(true) || !fuzz_attention() || !fuzz_dense() || !fuzz_convolution() ||
        !fuzz_delta() || !fuzz_scan() || !fuzz_nearest() || !fuzz_step()) {
      printf("failed in round %d\n", i);
      return 1;
    }
  printf("%d rounds on tiers up to %s; of %lld lists of nodes %lld were broken, %lld of these refused\n", rounds,
         trilobite_tier(), (long long)g_steps.lists, (long long)g_steps.broken, (long long)g_steps.refused);
  return 0;
}
