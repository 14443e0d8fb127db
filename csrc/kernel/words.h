// Some tokens in exact mode where an instruction multiplies two 16-bit numbers of each lane: the upper two of three digits
// are one such number, a code is one. A segment of some bands is decoded once into the first-level cache, and as many tokens
// as there are registers for sums of them multiply it. They are the integers, and make the bits of results, that rows.h makes
// of digits.

constexpr int WORDS_A_PASS = 128;  // tokens: more than others have, as codes of 16 bits take longer to decode

struct WordSegment {
  alignas(64) uint8_t codes[64 * ROWS * lines(Form::WORDS)];
  Affine w;
};

// Sums of WIDE bands of the words of NT tokens. V: not every Isa has them.
template <int NT, int WIDE, int SEG, typename V = Isa>
static inline void sum_words(const WordSegment *p, const int16_t *q, Isa::Ints a[WIDE][NT]) {
  UNROLL for (int n = 0; n < WIDE; n++) UNROLL for (int t = 0; t < NT; t++) a[n][t] = Isa::zero();
  for (int c = 0; c < SEG; c += HALF) UNROLL for (int i = 0; i < HALF; i += 2) {
      Isa::Bytes lines[WIDE];
      UNROLL for (int n = 0; n < WIDE; n++) lines[n] = Isa::load(p[n].codes + (c + i) * ROWS * 2);
      UNROLL for (int t = 0; t < NT; t++) {
        const auto two = Isa::quad((const int8_t *)(q + t * SEG + c + i));
        UNROLL for (int n = 0; n < WIDE; n++) V::add_words(a[n][t], lines[n], two);
      }
    }
}

// Products of a segment of NB bands with the lowest digits of a block's tokens, in units of x. Tokens that have none, as most
// do, share a row of zeros.
template <int NB> struct LowSums {
  alignas(64) float rows[1 + TOKENS][NB][ROWS];
  int32_t row[TOKENS];

  LowSums() { memset(rows[0], 0, sizeof rows[0]); }
  void clear() { memset(row, 0, sizeof row); }
  float *add(int token) { return rows[row[token] = 1 + token][0]; }
  const float *of(int token) const { return rows[row[token]][0]; }
};

template <int NB, typename V = Isa>
__attribute__((noinline)) static void add_listed(const WordSegment p[NB], const LowPairs &low, const float *scale,
                                                 LowSums<NB> &sums) {
  for (int i = 0; i < low.count;) {
    const int token = low.pairs[i].token;
    Isa::Ints a[NB];
    UNROLL for (int n = 0; n < NB; n++) a[n] = Isa::zero();
    for (; i < low.count && low.pairs[i].token == token; i++) {
      const LowPairs::Pair &pair = low.pairs[i];
      const uint32_t both = (uint16_t)pair.two[0] | (uint32_t)pair.two[1] << 16;  // as 16-bit numbers
      const auto two = Isa::quad((const int8_t *)&both);
      UNROLL for (int n = 0; n < NB; n++) V::add_words(a[n], Isa::load(p[n].codes + pair.line * 64), two);
    }
    const Isa::Floats unit = Isa::set1(scale[token] * LOWEST);
    float *sum = sums.add(token);
    UNROLL for (int n = 0; n < NB; n++) Isa::store(sum + n * ROWS, Isa::mul(Isa::to_float(a[n]), unit));
  }
}

// Of lowest digits [rows][SEG] that are not listed.
template <int NB, int SEG>
__attribute__((noinline)) static void add_all(const WordSegment p[NB], const int8_t *lowest, const float *scale,
                                              int rows, LowSums<NB> &sums) {
  for (int t = 0; t < rows; t++) {
    int16_t q[SEG];
    for (int i = 0; i < SEG; i++) q[i] = lowest[t * SEG + i];
    float *sum = sums.add(t);
    for (int n = 0; n < NB; n++) {
      Isa::Ints a[1][1];
      sum_words<1, 1, SEG>(p + n, q, a);
      Isa::store(sum + n * ROWS, Isa::mul(Isa::to_float(a[0][0]), Isa::set1(scale[t] * LOWEST)));
    }
  }
}

// out [NT][NB][ROWS] += products of a segment with a block's tokens from `token` on. low: with their lowest digits. next: words
// to those that are multiplied next.
template <int NT, int NB, int SEG>
__attribute__((noinline)) static void multiply_words(const WordSegment p[NB], const int16_t *q, const float *scale,
                                                     const float *sum, const LowSums<NB> &low, int token, int64_t next,
                                                     float *out) {
  UNROLL for (int i = 0; i < NT * SEG; i += 32) __builtin_prefetch(q + next + i, 0, 3);
  constexpr int WIDE = NB < Isa::BANDS_AT_ONCE ? NB : Isa::BANDS_AT_ONCE;
  for (int first = 0; first < NB; first += WIDE) {
    Isa::Ints a[WIDE][NT];
    sum_words<NT, WIDE, SEG>(p + first, q, a);
    UNROLL for (int n = 0; n < WIDE; n++) {
      const Affine w = p[first + n].w;
      UNROLL for (int t = 0; t < NT; t++) {
        const int at = (first + n) * ROWS;
        const Isa::Floats lowest = Isa::load(low.of(token + t) + at);
        const Isa::Floats dot = Isa::fma(Isa::to_float(a[n][t]), Isa::set1(scale[t]), lowest);
        add_product(w, dot, sum[t], out + t * NB * ROWS + at);
      }
    }
  }
}

template <int NB, int SEG>
static void word_bands(const Matrix &m, int64_t band, const Digits &x, float *out, int64_t ld) {
  const int64_t stride = m.groups * m.tile_bytes;
  const uint8_t *tile = m.packed + band * stride;
  WordSegment p[NB];
  LowSums<NB> lows;
  PassSums<NB, WORDS_A_PASS> sums(m, x, out, ld);
  for (int64_t g = 0, s = 0; g < m.groups; g++, tile += m.tile_bytes) {
    for (int n = 0; n < NB; n++) {
      const uint8_t *meta = tile + n * stride + m.code_bytes;
      __builtin_prefetch(meta + PANEL_NEAR, 0, 3);
      p[n].w = read_affine(m, meta, band + n, g);
    }
    for (int at = 0; at < m.group; at += SEG, s++) {
      for (int n = 0; n < NB; n++) decode_columns<Form::WORDS, PANEL_NEAR>(m, tile + n * stride, at, SEG, p[n].codes);
      for (int block = 0; block < x.blocks(); block++) {
        const int rows = x.rows(block);
        const float *scale = x.scale_block(block) + s * rows, *sum = x.sum_block(block) + s * rows;
        const LowPairs &low = x.pairs_block(block)[s];
        // What is multiplied next lies far from here. What comes after all blocks the first-level cache would not keep.
        const bool last = block + 1 == x.blocks();
        const int after = last ? 0 : block + 1;
        const int64_t then = s + last;
        const int64_t next = x.word(after, then, 0) - x.word(block, s, 0);
        __builtin_prefetch(x.pairs_block(after) + then, 0, 3);
        __builtin_prefetch(x.scale_block(after) + then * x.rows(after), 0, 3);
        __builtin_prefetch(x.sum_block(after) + then * x.rows(after), 0, 3);
        lows.clear();
        if (low.count > LowPairs::MOST) add_all<NB, SEG>(p, x.lowest(block, s, 0), scale, rows, lows);
        else add_listed<NB>(p, low, scale, lows);
        in_runs<MOST_SUMS>(rows, [&](auto count, int t) {
          multiply_words<decltype(count)::VALUE, NB, SEG>(p, x.word(block, s, t), scale + t, sum + t, lows, t, next,
                                                          sums.of(block) + t * NB * ROWS);
        });
      }
    }
  }
  sums.store(x, out, ld);
}

template <int SEG>
static void rows_words(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  in_passes<WORDS_A_PASS>(x, out, ld, [&](const Digits &some, float *to) {
    int b = 0;
    for (; b + UNIT_BANDS <= bands; b += UNIT_BANDS) word_bands<UNIT_BANDS, SEG>(m, band + b, some, to + b * ROWS, ld);
    for (; b < bands; b++) word_bands<1, SEG>(m, band + b, some, to + b * ROWS, ld);
  });
}

template <typename V = Isa>
static void rows_words(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  if (x.seg == 64) rows_words<64>(m, band, bands, x, out, ld);
  else rows_words<BLOCK>(m, band, bands, x, out, ld);
}
