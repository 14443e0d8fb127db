// y = W x for rows of a dense matrix and some tokens, whose sums are made in fp32 in one order: that of the columns, ROWS of
// them side by side, whatever rows and tokens are computed together.

// R rows of w [.., k] from `row`, for T tokens: x [T, k] and out [T, ld] of fp32.
template <int DTYPE, int R, int T>
static inline void dense_block(const void *w, int64_t row, int64_t k, const float *x, float *out, int64_t ld) {
  Isa::Floats sums[R][T];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) sums[r][t] = Isa::set1(0);
  int64_t i = 0;
  for (; i + ROWS <= k; i += ROWS) {
    Isa::Floats weights[R];
    UNROLL for (int r = 0; r < R; r++) weights[r] = some_of<DTYPE>(w, (row + r) * k + i);
    UNROLL for (int t = 0; t < T; t++) {
      const Isa::Floats v = Isa::load(x + t * k + i);
      UNROLL for (int r = 0; r < R; r++) sums[r][t] = Isa::fma(weights[r], v, sums[r][t]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) {
      float sum = total(sums[r][t]);
      for (int64_t j = i; j < k; j++) sum += element(w, DTYPE, (row + r) * k + j) * x[t * k + j];
      out[t * ld + r] = sum;
    }
}

template <int DTYPE, int R>
static void dense_strip(const void *w, int64_t row, int64_t k, const float *x, int64_t tokens, float *out, int64_t ld) {
  constexpr int T = Isa::SUMS >= 16 ? 4 : 2;
  int64_t t = 0;
  for (; t + T <= tokens; t += T) dense_block<DTYPE, R, T>(w, row, k, x + t * k, out + t * ld, ld);
  for (; t < tokens; t++) dense_block<DTYPE, R, 1>(w, row, k, x + t * k, out + t * ld, ld);
}

// w [.., k] from row `row`, x [tokens, k] and out [tokens, ld] of fp32.
template <int DTYPE>
static void dense_as(const void *w, int64_t row, int64_t rows, int64_t k, const float *x, int64_t tokens, float *out,
                     int64_t ld) {
  constexpr int R = Isa::SUMS >= 16 ? 4 : 2;
  int64_t r = 0;
  for (; r + R <= rows; r += R) dense_strip<DTYPE, R>(w, row + r, k, x, tokens, out + r, ld);
  for (; r < rows; r++) dense_strip<DTYPE, 1>(w, row + r, k, x, tokens, out + r, ld);
}

static void dense_rows(const void *w, int dtype, int64_t row, int64_t rows, int64_t k, const float *x, int64_t tokens,
                       float *out, int64_t ld) {
  if (dtype == TRILOBITE_F32) dense_as<TRILOBITE_F32>(w, row, rows, k, x, tokens, out, ld);
  else if (dtype == TRILOBITE_F16) dense_as<TRILOBITE_F16>(w, row, rows, k, x, tokens, out, ld);
  else dense_as<TRILOBITE_BF16>(w, row, rows, k, x, tokens, out, ld);
}
