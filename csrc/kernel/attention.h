// Attention of one token of one text over rows of a cache, which are read once, in the order in which they lie. Scores,
// weights and sums are fp32.

// 16 elements of a cache.
template <int DTYPE> static inline Isa::Floats some_of(const void *p, int64_t at) {
  if constexpr (DTYPE == TRILOBITE_F32) return Isa::load((const float *)p + at);
  else if constexpr (DTYPE == TRILOBITE_F16) return Isa::from_half((const uint8_t *)p + 2 * at);
  else return Isa::from_bf16((const uint16_t *)p + at);
}

static inline float total(const Isa::Floats &f) {
  alignas(64) float v[ROWS];
  Isa::store(v, f);
  for (int width = ROWS / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) v[i] += v[i + width];
  return v[0];
}

template <int N> struct Count { static constexpr int value = N; };

// out[g * ld] = q[g] . k for G heads that share k; q is [G, width].
template <int DTYPE, int G>
static inline void scores_of(const void *k, int64_t at, const float *q, int64_t width, float *out, int64_t ld) {
  Isa::Floats acc[G];
  for (int g = 0; g < G; g++) acc[g] = Isa::set1(0);
  for (int64_t i = 0; i < width; i += ROWS) {
    const Isa::Floats key = some_of<DTYPE>(k, at + i);
    UNROLL for (int g = 0; g < G; g++) acc[g] = Isa::fma(key, Isa::load(q + g * width + i), acc[g]);
  }
  for (int g = 0; g < G; g++) out[g * ld] = total(acc[g]);
}

// Scores -> weights that do not yet sum to 1; returns their sum.
static inline float weigh(const trilobite_attention_args &a, float *scores, int64_t length, const float *sink) {
  if (a.softcap > 0)
    for (int64_t s = 0; s < length; s++) scores[s] = a.softcap * tanhf(scores[s] / a.softcap);
  float top = sink ? *sink : scores[0], sum = 0;
  for (int64_t s = 0; s < length; s++) top = scores[s] > top ? scores[s] : top;
  for (int64_t s = 0; s < length; s++) scores[s] = fast_exp(scores[s] - top);
  for (int64_t s = 0; s < length; s++) sum += scores[s];
  return sink ? sum + fast_exp(*sink - top) : sum;
}

constexpr int TOGETHER = 4;  // rows whose values are added up at a time

// sums[g] += the weighted values of rows at[..] for `heads` heads that share them; weights are [heads, ld].
template <int DTYPE>
static inline void add_values(const void *v, const int64_t at[TOGETHER], const float *weights, int64_t ld, int64_t heads,
                              int64_t width, float *sums) {
  for (int64_t i = 0; i < width; i += ROWS) {
    Isa::Floats value[TOGETHER];
    UNROLL for (int r = 0; r < TOGETHER; r++) value[r] = some_of<DTYPE>(v, at[r] + i);
    for (int64_t g = 0; g < heads; g++) {
      Isa::Floats sum = Isa::load(sums + g * width + i);
      UNROLL for (int r = 0; r < TOGETHER; r++) sum = Isa::fma(value[r], Isa::set1(weights[g * ld + r]), sum);
      Isa::store(sums + g * width + i, sum);
    }
  }
}

template <int DTYPE>
static void attend_as(const trilobite_attention_args &a, int64_t text, int64_t first, int64_t count, float *scratch) {
  const int64_t shared = a.heads / a.kv_heads, heads = count * shared, width = a.width;
  const int64_t *rows = a.rows + a.starts[text], length = a.starts[text + 1] - a.starts[text];
  const int64_t ld = ceil_div(length, TOGETHER) * TOGETHER, begin = (text * a.heads + first * shared) * width;
  float *q = scratch, *sums = q + heads * width, *scores = sums + heads * width;
  load_floats(a.q, DTYPE, begin, heads * width, q);
  for (int64_t i = 0; i < heads * width; i++) q[i] *= a.scale, sums[i] = 0;
  // visit(s, h): s counts `step` rows at a time, h the heads of k; the inner loop is the one that stays near.
  const auto all = [&](int64_t steps, auto visit) {
    if (a.head_stride < a.row_stride)
      for (int64_t s = 0; s < steps; s++)
        for (int64_t h = 0; h < count; h++) visit(s, h);
    else
      for (int64_t h = 0; h < count; h++)
        for (int64_t s = 0; s < steps; s++) visit(s, h);
  };
  const auto place = [&](int64_t s, int64_t h) { return rows[s] * a.row_stride + (first + h) * a.head_stride; };
  all(length, [&](int64_t s, int64_t h) {
    int64_t g = 0;
    const auto part = [&](auto some) {
      constexpr int G = decltype(some)::value;
      for (; g + G <= shared; g += G) {
        const int64_t head = h * shared + g;
        scores_of<DTYPE, G>(a.k, place(s, h), q + head * width, width, scores + head * ld + s, ld);
      }
    };
    part(Count<4>());
    part(Count<1>());
  });
  float *inverse = scores + heads * ld;
  for (int64_t h = 0; h < heads; h++) {
    float *own = scores + h * ld;
    inverse[h] = 1.0f / weigh(a, own, length, a.sinks ? a.sinks + first * shared + h : nullptr);
    for (int64_t s = length; s < ld; s++) own[s] = 0;
  }
  all(ld / TOGETHER, [&](int64_t s, int64_t h) {
    int64_t at[TOGETHER];
    for (int r = 0; r < TOGETHER; r++) {
      const int64_t row = s * TOGETHER + r;
      at[r] = place(row < length ? row : length - 1, h);
    }
    const float *weights = scores + h * shared * ld + s * TOGETHER;
    add_values<DTYPE>(a.v, at, weights, ld, shared, width, sums + h * shared * width);
  });
  for (int64_t h = 0; h < heads; h++)
    for (int64_t i = 0; i < width; i++) sums[h * width + i] *= inverse[h];
  store_floats(sums, heads * width, (uint8_t *)a.y + begin * (DTYPE == TRILOBITE_F32 ? 4 : 2), DTYPE);
}

static void attend(const trilobite_attention_args &a, int64_t text, int64_t first, int64_t count, float *scratch) {
  switch (a.dtype) {
    case TRILOBITE_F32: return attend_as<TRILOBITE_F32>(a, text, first, count, scratch);
    case TRILOBITE_F16: return attend_as<TRILOBITE_F16>(a, text, first, count, scratch);
    default: return attend_as<TRILOBITE_BF16>(a, text, first, count, scratch);
  }
}
