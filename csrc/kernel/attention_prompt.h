// Attention of a block of a prompt, by the order of FlashAttention-2 (Dao 2023, Algorithm 1): some rows at a time, weights
// relative to the largest score so far. Queries lie side by side, in lanes; keys and values stay as they lie, and each of
// their numbers meets all queries. Scores, weights and sums are fp32.

constexpr int ACROSS = Isa::LANES == 16 ? QUERIES / ROWS : 1;  // registers of queries that sums are kept of at a time
constexpr int RUN = 6;                                         // keys, or columns of values, likewise
constexpr float LEAST_SCORE = -3e38f;

// out [R][C * ROWS queries], or 0, += sum over i < depth of a[r][i * step] times b [i][queries]. PAIRS: numbers are two of
// bfloat16. V: not every Isa has these.
template <int R, int C, bool PAIRS, typename V = Isa>
__attribute__((noinline)) static void add_outer(const float *const *a, int64_t step, int64_t depth, const float *b,
                                                bool fresh, float *out) {
  Isa::Floats acc[R][C];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) acc[r][c] = Isa::set1(0);
  if (!fresh)
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) acc[r][c] =
        Isa::load(out + r * QUERIES + c * ROWS);
  for (int64_t i = 0; i < depth; i++) {
    Isa::Floats some[C];
    UNROLL for (int c = 0; c < C; c++) some[c] = Isa::load(b + i * QUERIES + c * ROWS);
    UNROLL for (int r = 0; r < R; r++) {
      float number;
      memcpy(&number, a[r] + i * step, sizeof number);  // of a cache, which may lie anywhere
      const Isa::Floats x = Isa::set1(number);
      UNROLL for (int c = 0; c < C; c++) {
        if constexpr (PAIRS) acc[r][c] = V::dot_part(acc[r][c], some[c], x);
        else acc[r][c] = Isa::fma(some[c], x, acc[r][c]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++)
      Isa::store(out + r * QUERIES + c * ROWS, acc[r][c]);
}

// The same for `count` rows of any number, of `sides` registers of queries.
template <int C, bool PAIRS>
static void add_outers(const float *const *a, int count, int64_t step, int64_t depth, const float *b, int sides,
                       bool fresh, float *out) {
  for (int r = 0, n; r < count; r += n) {
    const int rest = count - r;
    n = rest <= RUN ? rest : rest < 2 * RUN ? rest / 2 : RUN;
    const auto run = [&](auto size, int first) {
      for (int s = 0; s < sides; s += C)
        add_outer<decltype(size)::VALUE, C, PAIRS>(a + first, step, depth, b + s * ROWS, fresh,
                                                   out + first * QUERIES + s * ROWS);
    };
    call_with<RUN>(n, r, run);
  }
}

// The queries of a block: which rows each looks at, from the block's base on, and what it has found so far.
struct Queries {
  alignas(64) int32_t start[QUERIES], end[QUERIES];
  alignas(64) float top[QUERIES], total[QUERIES];

  Queries(const trilobite_attention_args &a, const PromptPart &p) {
    const int count = (int)(p.tokens * p.heads);
    for (int i = 0; i < QUERIES; i++) {
      const int64_t query = i < count ? i : count - 1, text = p.text + query / p.heads;
      const float *sink = a.sinks ? a.sinks + p.head + query % p.heads : nullptr;
      start[i] = (int32_t)(a.starts[text] - p.base), end[i] = (int32_t)(a.ends[text] - p.base);
      top[i] = sink ? *sink : LEAST_SCORE, total[i] = sink ? 1 : 0;
    }
  }
};

// Scores [count][queries] of rows from `row` on -> weights; factor: what sums of the rows before them are to be multiplied by.
// Whether any is not 1. MASKED: some queries do not look at some of the rows.
template <bool MASKED>
static bool weigh_rows(const trilobite_attention_args &a, float *scores, int count, int row, int sides, Queries &x,
                       float *factor) {
  bool changed = false;
  for (int s = 0; s < sides * ROWS; s += ROWS) {
    const int32_t *start = x.start + s, *end = x.end + s;
    float most[ROWS], sum[ROWS];
    for (int i = 0; i < ROWS; i++) most[i] = x.top[s + i];
    for (int r = 0; r < count; r++) {
      float *score = scores + r * QUERIES + s;
      for (int i = 0; i < ROWS; i++) score[i] *= a.scale;
      if (a.softcap > 0)
        for (int i = 0; i < ROWS; i++) score[i] = a.softcap * tanhf(score[i] / a.softcap);
      if (MASKED)
        for (int i = 0; i < ROWS; i++) score[i] = row + r >= start[i] && row + r < end[i] ? score[i] : LEAST_SCORE;
      for (int i = 0; i < ROWS; i++) most[i] = score[i] > most[i] ? score[i] : most[i];
    }
    for (int i = 0; i < ROWS; i++) {
      factor[s + i] = fast_exp(x.top[s + i] - most[i]);
      changed |= x.top[s + i] != most[i];
      sum[i] = x.total[s + i] * factor[s + i];
    }
    for (int r = 0; r < count; r++) {
      float *score = scores + r * QUERIES + s;
      for (int i = 0; i < ROWS; i++) {
        const float weight = fast_exp(score[i] - most[i]);
        score[i] = MASKED && score[i] == LEAST_SCORE ? 0 : weight;
        sum[i] += score[i];
      }
    }
    for (int i = 0; i < ROWS; i++) x.top[s + i] = most[i], x.total[s + i] = sum[i];
  }
  return changed;
}

// q [queries] -> [columns][queries], of fp32 or of pairs; those beyond the last are zero.
template <int DTYPE, bool PAIRS>
__attribute__((noinline)) static void turn_queries(const trilobite_attention_args &a, const PromptPart &p, int sides,
                                                   float *row, float *out) {
  const int64_t width = a.width, depth = PAIRS ? width / 2 : width;
  for (int i = 0; i < sides * ROWS; i++) {
    if (i >= p.tokens * p.heads) {
      for (int64_t c = 0; c < depth; c++) out[c * QUERIES + i] = 0;
      continue;
    }
    const int64_t at = ((p.text + i / p.heads) * a.heads + p.head + i % p.heads) * width;
    if (PAIRS) memcpy(row, (const uint16_t *)a.q + at, width * 2);
    else load_floats(a.q, DTYPE, at, width, row);
    for (int64_t c = 0; c < depth; c++) out[c * QUERIES + i] = row[c];
  }
}

// sums [columns][queries] -> results.
template <int DTYPE>
static void store_results(const trilobite_attention_args &a, const PromptPart &p, const Queries &x, const float *sums,
                          float *row) {
  for (int i = 0; i < p.tokens * p.heads; i++) {
    const float inverse = 1.0f / x.total[i];
    for (int64_t c = 0; c < a.width; c++) row[c] = sums[c * QUERIES + i] * inverse;
    const int64_t at = ((p.text + i / p.heads) * a.heads + p.head + i % p.heads) * a.width;
    store_floats(row, a.width, (uint8_t *)a.y + at * SIZE<DTYPE>, DTYPE);
  }
}

__attribute__((noinline)) static void rescale(float *sums, int64_t width, int sides, const float *factor) {
  for (int64_t c = 0; c < width; c++)
    for (int i = 0; i < sides * ROWS; i++) sums[c * QUERIES + i] *= factor[i];
}

template <int DTYPE, int C>
static void prompt_block(const trilobite_attention_args &a, const PromptPart &p, int sides, float *scratch) {
  constexpr bool PAIRS = DTYPE == TRILOBITE_BF16 && Isa::FORM == Form::PAIRS;
  const int64_t width = a.width, kept = p.head / (a.heads / a.kv_heads) * a.head_stride;
  float *q = scratch, *sums = q + width * QUERIES, *scores = sums + width * QUERIES;
  float *values = scores + PROMPT_ROWS * QUERIES, *keys = values + PROMPT_ROWS * width;
  alignas(64) float factor[QUERIES];
  Queries x(a, p);
  turn_queries<DTYPE, PAIRS>(a, p, sides, values, q);
  const int last = (int)(p.tokens * p.heads) - 1, end = x.end[last];
  for (int row = x.start[0], next; row < end; row = next) {
    next = row / PROMPT_ROWS * PROMPT_ROWS + PROMPT_ROWS;
    next = next < end ? next : end;
    const int count = next - row;
    const float *key[PROMPT_ROWS];
    for (int r = 0; r < count; r++) {
      const int64_t at = a.rows[p.base + row + r] * a.row_stride + kept;
      load_floats(a.v, DTYPE, at, width, values + r * width);
      if (!PAIRS) load_floats(a.k, DTYPE, at, width, keys + r * width);
      key[r] = PAIRS ? (const float *)((const uint16_t *)a.k + at) : keys + r * width;
    }
    add_outers<C, PAIRS>(key, count, 1, PAIRS ? width / 2 : width, q, sides, true, scores);
    const bool first = row == x.start[0], masked = row < x.start[last] || next > x.end[0];
    const bool changed = masked ? weigh_rows<true>(a, scores, count, row, sides, x, factor)
                                : weigh_rows<false>(a, scores, count, row, sides, x, factor);
    if (changed && !first) rescale(sums, width, sides, factor);
    for (int64_t c = 0; c < width; c += ROWS) {
      const float *column[ROWS];
      for (int i = 0; i < ROWS; i++) column[i] = values + c + i;
      add_outers<C, false>(column, ROWS, width, count, scores, sides, first, sums + c * QUERIES);
    }
  }
  store_results<DTYPE>(a, p, x, sums, values);
}

template <int DTYPE> static void prompt_as(const trilobite_attention_args &a, const PromptPart &p, float *scratch) {
  const int64_t registers = ceil_div(p.tokens * p.heads, ROWS);
  const int sides = registers > 2 ? 4 : (int)registers;
  if (ACROSS == 1 || sides == 1) prompt_block<DTYPE, 1>(a, p, sides, scratch);
  else if (sides == 2) prompt_block<DTYPE, ACROSS == 1 ? 1 : 2>(a, p, sides, scratch);
  else prompt_block<DTYPE, ACROSS>(a, p, sides, scratch);
}

static void attend_prompt(const trilobite_attention_args &a, const PromptPart &p, float *scratch) {
  switch (a.dtype) {
    case TRILOBITE_F32: return prompt_as<TRILOBITE_F32>(a, p, scratch);
    case TRILOBITE_F16: return prompt_as<TRILOBITE_F16>(a, p, scratch);
    default: return prompt_as<TRILOBITE_BF16>(a, p, scratch);
  }
}
