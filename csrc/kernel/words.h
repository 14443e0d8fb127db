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

// Products of a segment of NB bands with the lowest digits of a block's tokens, in units of x. Most are zero, as digits are:
// what was added is cleared again.
template <int NB> struct LowSums {
  alignas(64) float of[TOKENS][NB][ROWS] = {};

  void clear(const LowPairs &low) {
    if (low.count > LowPairs::MOST) memset(of, 0, sizeof of);
    else
      for (int i = 0; i < low.count; i++)
        UNROLL for (int n = 0; n < NB; n++) Isa::store(of[low.pairs[i].token][n], Isa::set1(0));
  }
};

template <int NB, typename V = Isa>
__attribute__((noinline)) static void add_listed(const WordSegment p[NB], const LowPairs &low, const float *scale,
                                                 LowSums<NB> &sums) {
  for (int i = 0; i < low.count; i++) {
    const LowPairs::Pair &pair = low.pairs[i];
    const auto two = Isa::quad((const int8_t *)pair.two);
    const Isa::Floats unit = Isa::set1(scale[pair.token] * LOWEST);
    UNROLL for (int n = 0; n < NB; n++) {
      float *sum = sums.of[pair.token][n];
      const Isa::Ints dot = V::dot_words(Isa::load(p[n].codes + pair.line * 64), two);
      Isa::store(sum, Isa::fma(Isa::to_float(dot), unit, Isa::load(sum)));
    }
  }
}

// Of lowest digits [rows][SEG] that are not listed.
template <int NB, int SEG>
__attribute__((noinline)) static void add_all(const WordSegment p[NB], const int8_t *lowest, const float *scale,
                                              int rows, LowSums<NB> &sums) {
  for (int t = 0; t < rows; t++) {
    int16_t q[SEG];
    for (int i = 0; i < SEG; i++) q[i] = lowest[t * SEG + i];
    for (int n = 0; n < NB; n++) {
      Isa::Ints a[1][1];
      sum_words<1, 1, SEG>(p + n, q, a);
      Isa::store(sums.of[t][n], Isa::mul(Isa::to_float(a[0][0]), Isa::set1(scale[t] * LOWEST)));
    }
  }
}

// out [NT][NB][ROWS] += products of a segment. low, likewise: those of lowest digits. next: words to the next segment.
template <int NT, int NB, int SEG>
__attribute__((noinline)) static void multiply_words(const WordSegment p[NB], const int16_t *q, const float *scale,
                                                     const float *sum, const float *low, int64_t next, float *out) {
  // Other blocks are far from here.
  UNROLL for (int i = 0; i < NT * SEG; i += 32) __builtin_prefetch(q + next + i, 0, 3);
  constexpr int WIDE = NB < Isa::BANDS_AT_ONCE ? NB : Isa::BANDS_AT_ONCE;
  for (int first = 0; first < NB; first += WIDE) {
    Isa::Ints a[WIDE][NT];
    sum_words<NT, WIDE, SEG>(p + first, q, a);
    UNROLL for (int n = 0; n < WIDE; n++) {
      const Affine w = p[first + n].w;
      UNROLL for (int t = 0; t < NT; t++) {
        const int at = (t * NB + first + n) * ROWS;
        const Isa::Floats dot = Isa::fma(Isa::to_float(a[n][t]), Isa::set1(scale[t]), Isa::load(low + at));
        add_product(w, dot, sum[t], out + at);
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
        const int64_t next = (int64_t)x.digits * rows * SEG / 2;
        const float *scale = x.scale_block(block) + s * rows, *sum = x.sum_block(block) + s * rows;
        const LowPairs &low = x.pairs_block(block)[s];
        __builtin_prefetch(&low + 1, 0, 3);
        if (low.count > LowPairs::MOST) add_all<NB, SEG>(p, x.lowest(block, s, 0), scale, rows, lows);
        else add_listed<NB>(p, low, scale, lows);
        in_runs<MOST_SUMS>(rows, [&](auto count, int t) {
          multiply_words<decltype(count)::VALUE, NB, SEG>(p, x.word(block, s, t), scale + t, sum + t, lows.of[t][0],
                                                          next, sums.of(block) + t * NB * ROWS);
        });
        lows.clear(low);
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
