// Some tokens of 16 bits in exact mode, and codes of 8 bits or under super-scales, where no instruction multiplies any two bytes but one
// multiplies two 16-bit numbers of each lane: the upper two of three digits are one such number, a code is one. A segment of
// a band is decoded once into the first-level cache, and as many tokens as there are registers for sums of them multiply it.
// They are the integers, and make the bits of results, that rows.h makes of digits. Of the lowest digit, which is mostly zero,
// the few pairs of columns that have one are multiplied (`LowPairs`), or all of them.

constexpr int MOST_WORDS = 4;  // tokens, of which GCC 12 keeps all sums in registers

struct WordSegment {
  alignas(64) uint8_t codes[64 * ROWS * lines(Form::WORDS)];
  Affine w;
};

// Tokens of a block from one of them on, in a segment.
struct WordTokens {
  const int16_t *q;
  const int8_t *lowest;
  const float *scale, *sum;
  const LowPairs *low;
};

// sum += a line of codes, of two columns, times two words of a token.
template <typename V = Isa> static inline void add_line(Isa::Ints &sum, const uint8_t *line, const int16_t *two) {
  V::add_words(sum, Isa::load(line), Isa::quad((const int8_t *)two));
}

template <typename V = Isa> static inline Isa::Ints sum_listed(const uint8_t *codes, const LowPairs &low) {
  Isa::Ints sum = Isa::zero();
  UNROLL for (int i = 0; i < LowPairs::MOST; i++) add_line<V>(sum, codes + low.line[i] * 64, low.two[i]);
  return sum;
}

// Sums of the words of NT tokens.
template <int NT, int SEG, typename V = Isa>
static inline void sum_words(const WordSegment &p, const int16_t *q, Isa::Ints a[NT]) {
  UNROLL for (int t = 0; t < NT; t++) a[t] = Isa::zero();
  for (int c = 0; c < SEG; c += HALF) UNROLL for (int i = 0; i < HALF; i += 2) {
      const Isa::Bytes line = Isa::load(p.codes + (c + i) * ROWS * 2);
      UNROLL for (int t = 0; t < NT; t++) V::add_words(a[t], line, Isa::quad((const int8_t *)(q + t * SEG + c + i)));
    }
}

// The lowest digits of NT tokens as words, and their sums.
template <int NT, int SEG>
__attribute__((noinline)) static void sum_lowest(const WordSegment &p, const int8_t *lowest, Isa::Ints low[NT]) {
  int16_t q[NT * SEG];
  for (int i = 0; i < NT * SEG; i++) q[i] = lowest[i];
  sum_words<NT, SEG>(p, q, low);
}

// Which lowest digits there may be: none, those that are listed, all.
enum class Lowest { NONE, LISTED, ALL };

// out [NT][ROWS] += products of a segment.
template <Lowest LOW, int NT, int SEG>
static inline void add_tokens(const WordSegment &p, const WordTokens &x, float *out) {
  Isa::Ints a[NT], low[NT];
  if constexpr (LOW == Lowest::ALL) sum_lowest<NT, SEG>(p, x.lowest, low);
  sum_words<NT, SEG>(p, x.q, a);
  UNROLL for (int t = 0; t < NT; t++) {
    Isa::Floats dot = Isa::to_float(a[t]);
    if constexpr (LOW == Lowest::ALL) dot = combine_low(dot, low[t]);
    if constexpr (LOW == Lowest::LISTED) dot = combine_low(dot, sum_listed(p.codes, x.low[t]));
    // A power of two.
    const float scale = LOW == Lowest::NONE ? x.scale[t] * 256 : x.scale[t];
    add_product(p.w, Isa::mul(dot, Isa::set1(scale)), x.sum[t], out + t * ROWS);
  }
}

// next: words to the next segment.
template <bool LOW, int NT, int SEG>
static void multiply_words(const WordSegment &p, const WordTokens &x, int64_t next, float *out) {
  // Other blocks are far from here.
  UNROLL for (int i = 0; i < NT * SEG; i += 32) __builtin_prefetch(x.q + next + i, 0, 3);
  if constexpr (!LOW) return add_tokens<Lowest::NONE, NT, SEG>(p, x, out);
  int more = 0;
  UNROLL for (int t = 0; t < NT; t++) more |= x.low[t].more;
  if (more) add_tokens<Lowest::ALL, NT, SEG>(p, x, out);
  else add_tokens<Lowest::LISTED, NT, SEG>(p, x, out);
}

// The loop is that of short_many.h; one function for both makes codes of 3 bits a tenth slower there (GCC 12).
template <bool LOW, int SEG>
static void word_band(const Matrix &m, int64_t band, const Digits &x, float *out, int64_t ld) {
  const uint8_t *tile = m.packed + band * m.groups * m.tile_bytes;
  WordSegment p;
  PassSums<1> sums(m, x, out, ld);
  for (int64_t g = 0, s = 0; g < m.groups; g++, tile += m.tile_bytes) {
    const uint8_t *meta = tile + m.code_bytes;
    __builtin_prefetch(meta + PANEL_NEAR, 0, 3);
    p.w = read_affine(m, meta, band, g);
    for (int at = 0; at < m.group; at += SEG, s++) {
      decode_columns<Form::WORDS, PANEL_NEAR>(m, tile, at, SEG, p.codes);
      for (int block = 0; block < x.blocks(); block++) {
        const int rows = x.rows(block);
        const int64_t first = s * rows, next = (int64_t)x.digits * rows * SEG / 2;
        in_runs<MOST_WORDS>(rows, [&](auto count, int t) {
          const WordTokens some{x.word(block, s, t), x.lowest(block, s, t), x.scale_block(block) + first + t,
                                x.sum_block(block) + first + t, x.pairs_block(block) + first + t};
          multiply_words<LOW, decltype(count)::VALUE, SEG>(p, some, next, sums.of(block) + t * ROWS);
        });
      }
    }
  }
  sums.store(x, out, ld);
}

template <bool LOW, int SEG>
static void word_bands(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  in_passes(x, out, ld, [&](const Digits &some, float *to) {
    for (int b = 0; b < bands; b++) word_band<LOW, SEG>(m, band + b, some, to + b * ROWS, ld);
  });
}

template <typename V = Isa>
static void rows_words(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  if (x.two)
    return x.seg == 64 ? word_bands<false, 64>(m, band, bands, x, out, ld)
                       : word_bands<false, BLOCK>(m, band, bands, x, out, ld);
  if (x.seg == 64) word_bands<true, 64>(m, band, bands, x, out, ld);
  else word_bands<true, BLOCK>(m, band, bands, x, out, ld);
}
