// y = W x for rows of a dense matrix and a few tokens, whose sums are made in fp32 in one order: that of the columns.

// w [.., k] from row `row`, x [tokens, k] and out [tokens, ld] of fp32.
template <int DTYPE>
static void dense_as(const void *w, int64_t row, int64_t rows, int64_t k, const float *x, int64_t tokens, float *out,
                     int64_t ld) {
  constexpr int SUMS = 4;  // that do not wait for each other
  const Isa::Floats one = Isa::set1(1);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t t = 0; t < tokens; t++) {
      const int64_t at = (row + r) * k;
      const float *v = x + t * k;
      Isa::Floats acc[SUMS];
      for (int s = 0; s < SUMS; s++) acc[s] = Isa::set1(0);
      int64_t i = 0;
      for (; i + SUMS * ROWS <= k; i += SUMS * ROWS)
        UNROLL for (int s = 0; s < SUMS; s++) acc[s] =
            Isa::fma(some_of<DTYPE>(w, at + i + s * ROWS), Isa::load(v + i + s * ROWS), acc[s]);
      for (; i + ROWS <= k; i += ROWS) acc[0] = Isa::fma(some_of<DTYPE>(w, at + i), Isa::load(v + i), acc[0]);
      const Isa::Floats two = Isa::fma(acc[0], one, acc[1]), more = Isa::fma(acc[2], one, acc[3]);
      float sum = total(Isa::fma(two, one, more));
      for (; i < k; i++) sum += element(w, DTYPE, at + i) * v[i];
      out[t * ld + r] = sum;
    }
}

static void dense_rows(const void *w, int dtype, int64_t row, int64_t rows, int64_t k, const float *x, int64_t tokens,
                       float *out, int64_t ld) {
  if (dtype == TRILOBITE_F32) dense_as<TRILOBITE_F32>(w, row, rows, k, x, tokens, out, ld);
  else if (dtype == TRILOBITE_F16) dense_as<TRILOBITE_F16>(w, row, rows, k, x, tokens, out, ld);
  else dense_as<TRILOBITE_BF16>(w, row, rows, k, x, tokens, out, ld);
}
