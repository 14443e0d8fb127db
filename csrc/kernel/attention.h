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

// Registers of sums that scores, or values, take at a time.
constexpr int WAITING = Isa::LANES == 16 ? 16 : 4;

// Which of WAITING sums of one register each is to be number `at` of `all_totals`.
constexpr int sum_of(int at) { return WAITING == 16 ? at % 4 * 4 + at / 4 : at; }

// The totals of WAITING registers, in the order that `sum_of` says. V: not every Isa adds up several at once.
template <typename V = Isa> static inline void all_totals(const Isa::Floats sums[WAITING], float out[WAITING]) {
  if constexpr (WAITING == 16) V::totals(sums, out);
  else
    for (int i = 0; i < WAITING; i++) out[i] = total(sums[i]);
}

// out[g * ld + r] = q[g] . k[r] for G heads that share R rows at[..] of keys; q is [G, width].
template <int DTYPE, int G, int R>
static inline void scores_of(const void *k, const int64_t *at, const float *q, int64_t width, float *out, int64_t ld) {
  Isa::Floats acc[R * G];
  for (int i = 0; i < R * G; i++) acc[i] = Isa::set1(0);
  for (int64_t i = 0; i < width; i += ROWS) {
    Isa::Floats query[G];
    UNROLL for (int g = 0; g < G; g++) query[g] = Isa::load(q + g * width + i);
    UNROLL for (int r = 0; r < R; r++) {
      const Isa::Floats key = some_of<DTYPE>(k, at[r] + i);
      UNROLL for (int g = 0; g < G; g++) {
        Isa::Floats &sum = acc[R * G == WAITING ? sum_of(g * R + r) : g * R + r];
        sum = Isa::fma(key, query[g], sum);
      }
    }
  }
  if constexpr (R * G == WAITING) {
    float totals[WAITING];
    all_totals(acc, totals);
    for (int g = 0; g < G; g++) memcpy(out + g * ld, totals + g * R, R * sizeof(float));
  } else {
    for (int i = 0; i < R * G; i++) out[i / R * ld + i % R] = total(acc[i]);
  }
}

// Scores of a part's rows for one head of q += what is added for how far before the last row of the text each lies.
static inline void add_bias(const trilobite_attention_args &a, const AttentionPart &p, int64_t head, float *scores) {
  const float *bias = a.bias + head * a.distances;
  const int64_t last = a.ends[p.text] - 1 - p.row;
  for (int64_t s = 0; s < p.length; s++) scores[s] += bias[last - s < a.distances ? last - s : a.distances - 1];
}

typedef float Scores __attribute__((vector_size(64)));

// Scores -> weights relative to the largest score; returns that and their sum. Lanes beyond the last are filled up.
static inline void weigh(const trilobite_attention_args &a, float *scores, int64_t length, float *top, float *sum) {
  constexpr int N = sizeof(Scores) / sizeof(float);
  if (a.softcap > 0)
    for (int64_t s = 0; s < length; s++) scores[s] = a.softcap * tanhf(scores[s] / a.softcap);
  const int64_t ld = ceil_div(length, N) * N;
  for (int64_t s = length; s < ld; s++) scores[s] = scores[0];
  Scores most, all{};
  memcpy(&most, scores, sizeof most);
  for (int64_t s = N; s < ld; s += N) {
    Scores some;
    memcpy(&some, scores + s, sizeof some);
    most = some > most ? some : most;
  }
  float largest = most[0], whole = 0;
  for (int i = 1; i < N; i++) largest = most[i] > largest ? most[i] : largest;
  for (int64_t s = 0; s < ld; s++) scores[s] = fast_exp(scores[s] - largest);
  for (int64_t s = length; s < ld; s++) scores[s] = 0;
  for (int64_t s = 0; s < ld; s += N) {
    Scores some;
    memcpy(&some, scores + s, sizeof some);
    all += some;
  }
  for (int i = 0; i < N; i++) whole += all[i];
  *top = largest, *sum = whole;
}

constexpr int BLOCKS_AHEAD = 2;  // that are prefetched
constexpr int TOGETHER = 16;     // rows of one head at a time, as many as there are lanes in `Scores`

// Rows of one head, as many as are worked on at a time: head h of k of those of a part, rows [s, s + count) of it.
struct Block {
  int64_t h, s;
  int count;
  int64_t at[TOGETHER];  // elements from the cache's beginning
};

template <int DTYPE> constexpr int64_t SIZE = DTYPE == TRILOBITE_F32 ? 4 : 2;

// What will be read: a few rows at a time, since many lines at once would stop who asks for them.
template <int DTYPE> static inline void fetch(const void *cache, const int64_t *at, int rows, int64_t width) {
  for (int r = 0; r < rows; r++)
    for (int64_t i = 0; i < width * SIZE<DTYPE>; i += 64)
      __builtin_prefetch((const uint8_t *)cache + at[r] * SIZE<DTYPE> + i, 0, Isa::LOCALITY);
}

// sums[g] += weighted rows of values of G heads that share them, C * 16 columns; weights are [G, ld]. next: rows that are
// prefetched.
template <int DTYPE, int G, int C>
static inline void add_values(const void *v, const int64_t *at, int count, const int64_t *next, const float *weights,
                              int64_t ld, int64_t width, float *sums) {
  Isa::Floats acc[G][C];
  UNROLL for (int g = 0; g < G; g++) UNROLL for (int c = 0; c < C; c++) acc[g][c] =
      Isa::load(sums + g * width + c * ROWS);
  for (int r = 0; r < count; r++) {
    if (next) fetch<DTYPE>(v, next + r, 1, C * ROWS);
    Isa::Floats value[C];
    UNROLL for (int c = 0; c < C; c++) value[c] = some_of<DTYPE>(v, at[r] + c * ROWS);
    UNROLL for (int g = 0; g < G; g++) {
      const Isa::Floats weight = Isa::set1(weights[g * ld + r]);
      UNROLL for (int c = 0; c < C; c++) acc[g][c] = Isa::fma(value[c], weight, acc[g][c]);
    }
  }
  UNROLL for (int g = 0; g < G; g++) UNROLL for (int c = 0; c < C; c++)
      Isa::store(sums + g * width + c * ROWS, acc[g][c]);
}

// What a task does with a block, for G heads of q that share it. next: the block whose rows are prefetched, where none of
// the heads before these has done so.
template <int DTYPE, int G> struct Shared {
  const trilobite_attention_args &a;
  int64_t ld;

  void scores(const Block &x, const void *cache, const Block *next, const float *q, float *out) const {
    constexpr int R = 4;
    for (int r = 0; r < x.count; r += R) {
      if (next && r < next->count) fetch<DTYPE>(cache, next->at + r, next->count - r < R ? next->count - r : R, a.width);
      if (r + R <= x.count) scores_of<DTYPE, G, R>(a.k, x.at + r, q, a.width, out + r, ld);
      else
        for (int last = r; last < x.count; last++) scores_of<DTYPE, G, 1>(a.k, x.at + last, q, a.width, out + last, ld);
    }
  }

  void values(const Block &x, const Block *next, const float *weights, float *sums) const {
    constexpr int C = G == 1 ? WAITING / 2 : WAITING / G;
    const int64_t *ahead = next && next->count >= x.count ? next->at : nullptr;
    int64_t i = 0;
    const auto columns = [&] { return (const uint8_t *)a.v + i * SIZE<DTYPE>; };
    for (; i + C * ROWS <= a.width; i += C * ROWS)
      add_values<DTYPE, G, C>(columns(), x.at, x.count, ahead, weights, ld, a.width, sums + i);
    for (; i < a.width; i += ROWS)
      add_values<DTYPE, G, 1>(columns(), x.at, x.count, ahead, weights, ld, a.width, sums + i);
  }
};

template <int DTYPE> static void attend_as(const trilobite_attention_args &a, const AttentionPart &p, float *scratch) {
  const int64_t shared = a.heads / a.kv_heads, heads = p.heads * shared, width = a.width, length = p.length;
  const int64_t steps = ceil_div(length, TOGETHER), ld = steps * TOGETHER, blocks = steps * p.heads;
  const int64_t *rows = a.rows + p.row;
  float *q = scratch, *scores = q + heads * width;
  load_floats(a.q, DTYPE, (p.text * a.heads + p.head * shared) * width, heads * width, q);
  for (int64_t i = 0; i < heads * width; i++) q[i] *= a.scale, p.sums[i] = 0;
  // In the order in which they lie: heads of a row side by side, or rows of a head.
  const bool heads_near = a.head_stride < a.row_stride;
  const auto block = [&](int64_t b) {
    Block x;
    x.h = heads_near ? b % p.heads : b / steps, x.s = (heads_near ? b / p.heads : b % steps) * TOGETHER;
    x.count = (int)(length - x.s < TOGETHER ? length - x.s : TOGETHER);
    for (int r = 0; r < x.count; r++) x.at[r] = rows[x.s + r] * a.row_stride + (p.head + x.h) * a.head_stride;
    return x;
  };
  const Shared<DTYPE, 4> four{a, ld};
  const Shared<DTYPE, 1> one{a, ld};
  Block next;
  for (int64_t b = 0; b < blocks; b++) {
    const Block x = block(b);
    next = block((b + BLOCKS_AHEAD) % blocks);
    const void *cache = b + BLOCKS_AHEAD < blocks ? a.k : a.v;
    for (int64_t g = x.h * shared, end = g + shared, n; g < end; g += n) {
      const Block *fresh = g == x.h * shared ? &next : nullptr;
      n = g + 4 <= end ? 4 : 1;
      if (n == 4) four.scores(x, cache, fresh, q + g * width, scores + g * ld + x.s);
      else one.scores(x, cache, fresh, q + g * width, scores + g * ld + x.s);
    }
  }
  for (int64_t h = 0; h < heads; h++) {
    if (a.bias) add_bias(a, p, p.head * shared + h, scores + h * ld);
    weigh(a, scores + h * ld, length, p.top + h, p.total + h);
  }
  for (int64_t b = 0; b < blocks; b++) {
    const Block x = block(b);
    if (b + BLOCKS_AHEAD < blocks) next = block(b + BLOCKS_AHEAD);
    for (int64_t g = x.h * shared, end = g + shared, n; g < end; g += n) {
      const Block *fresh = g == x.h * shared && b + BLOCKS_AHEAD < blocks ? &next : nullptr;
      n = g + 4 <= end ? 4 : 1;
      if (n == 4) four.values(x, fresh, scores + g * ld + x.s, p.sums + g * width);
      else one.values(x, fresh, scores + g * ld + x.s, p.sums + g * width);
    }
  }
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
