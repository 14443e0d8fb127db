// Attention of one token of one text over rows of a cache, which are read once, in the order in which they lie. Scores,
// weights and sums are fp32.

// 16 elements of a cache.
template <int DTYPE> static inline Isa::Floats some_of(const void *p, int64_t at) {
  if constexpr (DTYPE == TRILOBITE_F32) return Isa::load((const float *)p + at);
  else if constexpr (DTYPE == TRILOBITE_F16) return Isa::from_half((const uint8_t *)p + 2 * at);
  else return Isa::from_bf16((const uint16_t *)p + at);
}

typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));

static inline float total(const Isa::Floats &f) {
  Half h[2];
  memcpy(h, &f, sizeof h);
  const Half half = h[0] + h[1];
  Quarter q[2];
  memcpy(q, &half, sizeof q);
  const Quarter four = q[0] + q[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
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

// Scores -> weights relative to the largest score; returns that and their sum.
static inline void weigh(const trilobite_attention_args &a, float *scores, int64_t length, float *top, float *sum) {
  if (a.softcap > 0)
    for (int64_t s = 0; s < length; s++) scores[s] = a.softcap * tanhf(scores[s] / a.softcap);
  *top = scores[0], *sum = 0;
  for (int64_t s = 1; s < length; s++) *top = scores[s] > *top ? scores[s] : *top;
  for (int64_t s = 0; s < length; s++) scores[s] = fast_exp(scores[s] - *top);
  for (int64_t s = 0; s < length; s++) *sum += scores[s];
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

template <int DTYPE> static void attend_as(const trilobite_attention_args &a, const AttentionPart &p, float *scratch) {
  const int64_t shared = a.heads / a.kv_heads, heads = p.heads * shared, width = a.width, length = p.length;
  const int64_t *rows = a.rows + p.row, ld = ceil_div(length, TOGETHER) * TOGETHER;
  float *q = scratch, *scores = q + heads * width;
  load_floats(a.q, DTYPE, (p.text * a.heads + p.head * shared) * width, heads * width, q);
  for (int64_t i = 0; i < heads * width; i++) q[i] *= a.scale, p.sums[i] = 0;
  // visit(s, h): s counts `step` rows at a time, h the heads of k; the inner loop is the one that stays near.
  const auto all = [&](int64_t steps, auto visit) {
    if (a.head_stride < a.row_stride)
      for (int64_t s = 0; s < steps; s++)
        for (int64_t h = 0; h < p.heads; h++) visit(s, h);
    else
      for (int64_t h = 0; h < p.heads; h++)
        for (int64_t s = 0; s < steps; s++) visit(s, h);
  };
  const auto place = [&](int64_t s, int64_t h) { return rows[s] * a.row_stride + (p.head + h) * a.head_stride; };
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
  for (int64_t h = 0; h < heads; h++) {
    weigh(a, scores + h * ld, length, p.top + h, p.total + h);
    for (int64_t s = length; s < ld; s++) scores[h * ld + s] = 0;
  }
  all(ld / TOGETHER, [&](int64_t s, int64_t h) {
    int64_t at[TOGETHER];
    for (int r = 0; r < TOGETHER; r++) {
      const int64_t row = s * TOGETHER + r;
      at[r] = place(row < length ? row : length - 1, h);
    }
    const float *weights = scores + h * shared * ld + s * TOGETHER;
    add_values<DTYPE>(a.v, at, weights, ld, shared, width, p.sums + h * shared * width);
  });
}

static void attend(const trilobite_attention_args &a, const AttentionPart &p, float *scratch) {
  switch (a.dtype) {
    case TRILOBITE_F32: return attend_as<TRILOBITE_F32>(a, p, scratch);
    case TRILOBITE_F16: return attend_as<TRILOBITE_F16>(a, p, scratch);
    default: return attend_as<TRILOBITE_BF16>(a, p, scratch);
  }
}

// The parts of one head of one text, `ld` heads apart -> its result. Parts are `count`, their sums at width * ld.
static void attend_join(const trilobite_attention_args &a, int64_t text, int64_t head, const AttentionPart &p,
                        int64_t count, float *out) {
  const int64_t ld = a.heads, width = a.width;
  const float *sink = a.sinks ? a.sinks + head : nullptr;
  float top = sink ? *sink : p.top[0];
  for (int64_t c = 0; c < count; c++) top = p.top[c * ld] > top ? p.top[c * ld] : top;
  float total = sink ? fast_exp(*sink - top) : 0;
  for (int64_t i = 0; i < width; i++) out[i] = 0;
  for (int64_t c = 0; c < count; c++) {
    const float weight = fast_exp(p.top[c * ld] - top), *sums = p.sums + c * ld * width;
    total += weight * p.total[c * ld];
    for (int64_t i = 0; i < width; i++) out[i] += weight * sums[i];
  }
  const float inverse = 1.0f / total;
  for (int64_t i = 0; i < width; i++) out[i] *= inverse;
  store_floats(out, width, (uint8_t *)a.y + (text * a.heads + head) * width * (a.dtype == TRILOBITE_F32 ? 4 : 2),
               (int)a.dtype);
}
