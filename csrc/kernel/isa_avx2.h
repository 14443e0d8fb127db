// AVX2: a register of the layout is two ymm, rows 0-7 and rows 8-15. Byte products go through int16 pairs, or with VNNI
// where the translation unit is compiled for it.
#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL16 _Pragma("GCC unroll 16")
#ifdef TRILOBITE_EVEX
#define TRILOBITE_ENCODING "%{evex%} "  // of VNNI's instructions: AVX-512's
#else
#define TRILOBITE_ENCODING "%{vex%} "
#endif
struct Isa {
  static constexpr int LANES = 8;  // floats in a register
  static constexpr int TOKENS_AT_ONCE = 2;
  static constexpr int STREAMS = 1;                      // bands that one token reads at a time
  static constexpr int SHORT_EXACT = 2, SHORT_INT8 = 4;  // tokens that short.h multiplies
  static constexpr bool MATRICES = false;                // products of two rows and two tokens (isa_neon.h)
  // For many tokens (many.h): from how many on, bands that share a broadcast, sums that registers hold, form of codes.
  static constexpr int BANDS_AT_ONCE = 1, SUMS = 6;
#ifdef __AVXVNNI__
  // words.h: tokens from which on codes of up to 4 bits, and bytes, are multiplied so (0: never).
  static constexpr int WORDS = 3, WORDS_OF_BYTES = 3;
  static constexpr int LOCALITY = 3;  // of what is prefetched: the first-level cache, or with 2 the second
  static constexpr int MANY = 3;
  static constexpr int STEPS = 8;  // of 4 columns, decoded at a time
  static constexpr Form FORM = Form::BYTES;
#else
  static constexpr int WORDS = 12, WORDS_OF_BYTES = 4;
  static constexpr int LOCALITY = 2;
  static constexpr int MANY = 4;
  static constexpr int STEPS = 4;
  static constexpr Form FORM = Form::SINGLES;
#endif
  struct Bytes { __m256i a, b; };
  struct Ints { __m256i a, b; };
  struct Floats { __m256 a, b; };

  static Bytes load(const uint8_t *p) {
    return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))};
  }
  // As if v were made here: what is computed of it is computed anew.
  static void hide(Bytes &v) {
    __m256i a = v.a, b = v.b;
    __asm__("" : "+x"(a), "+x"(b));
    v = {a, b};
  }
  static void store(uint8_t *p, Bytes v) {
    _mm256_storeu_si256((__m256i *)p, v.a);
    _mm256_storeu_si256((__m256i *)(p + 32), v.b);
  }
  static Bytes mask(Bytes v, uint8_t m) {
    const __m256i k = _mm256_set1_epi8((char)m);
    return {_mm256_and_si256(v.a, k), _mm256_and_si256(v.b, k)};
  }
  // Shifts 16-bit lanes: bits of the neighbour come in, a mask always follows.
  template <int SHIFT> static Bytes shr(Bytes v) {
    return {_mm256_srli_epi16(v.a, SHIFT), _mm256_srli_epi16(v.b, SHIFT)};
  }
  static Bytes either(Bytes x, Bytes y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
  // Bits [FROM, FROM + WIDTH) of every byte, moved to bit TO.
  template <int FROM, int WIDTH, int TO = 0> static Bytes field(Bytes v) {
    return mask(shr<FROM - TO>(v), (uint8_t)(((1 << WIDTH) - 1) << TO));
  }

  static Bytes bytes(uint8_t x) { return {_mm256_set1_epi8((char)x), _mm256_set1_epi8((char)x)}; }
  // `count` bytes of each of 16 rows -> the lowest bytes of 16 lanes of four.
  static Bytes load_lanes(const uint8_t *p, int count) {
    if (count == 4) return load(p);
    const __m128i a = _mm_loadu_si128((const __m128i *)p);
    if (count == 2) return {_mm256_cvtepu16_epi32(a), _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 16)))};
    return {_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))};
  }
  // Byte j of each lane, in all four.
  static Bytes spread(Bytes v, int j) {
    const __m256i at = _mm256_load_si256((const __m256i *)SPREAD.bytes[j]);
    return {_mm256_shuffle_epi8(v.a, at), _mm256_shuffle_epi8(v.b, at)};
  }
  // The same, or a constant, as the second factor of `times`, which carries nothing over in products of 16 bits.
  static Bytes factor(Bytes v, int j) {
    const __m256i at = _mm256_load_si256((const __m256i *)SPREAD.words[j]);
    return {_mm256_shuffle_epi8(v.a, at), _mm256_shuffle_epi8(v.b, at)};
  }
  static Bytes factor(int x) { return {_mm256_set1_epi16((short)x), _mm256_set1_epi16((short)x)}; }
  static Bytes plus(Bytes x, Bytes y) { return {_mm256_add_epi8(x.a, y.a), _mm256_add_epi8(x.b, y.b)}; }
  // Products below 256.
  static Bytes times(Bytes x, Bytes y) { return {_mm256_mullo_epi16(x.a, y.a), _mm256_mullo_epi16(x.b, y.b)}; }

  static Ints zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  // Four digits, for every lane.
  static __m256i quad(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
  }
  static __m256i quad_once(const int8_t *x) { return quad(x); }
#ifdef __AVXVNNI__
  static constexpr bool SHORT_SUMS = false;
  // For short.h.
  using Run = Ints;
  static Run no_run() { return zero(); }
  static Run first_of_run(Bytes c, __m256i v) { return dot<8>(zero(), c, v); }
  static void add_to_run(Run &run, Bytes c, __m256i v) { run = dot<8>(run, c, v); }
  static Ints end_run(Ints acc, Run run) { return {_mm256_add_epi32(acc.a, run.a), _mm256_add_epi32(acc.b, run.b)}; }
  // Times byte j of each lane, above which are zeros; the sum fits 16 bits.
  static Ints end_run(Ints acc, Run run, Bytes scale, int j) {
    const __m256i at = _mm256_load_si256((const __m256i *)SPREAD.ones[j]);
    return dot_shorts(acc, {run.a, run.b}, {_mm256_shuffle_epi8(scale.a, at), _mm256_shuffle_epi8(scale.b, at)});
  }
  // acc[row] += x0 * y0 + x1 * y1 of two 16-bit numbers each.
  static Ints dot_shorts(Ints acc, Bytes x, Bytes y) {
    __asm__(TRILOBITE_ENCODING "vpdpwssd %2, %1, %0" : "+x"(acc.a) : "x"(x.a), "x"(y.a));
    __asm__(TRILOBITE_ENCODING "vpdpwssd %2, %1, %0" : "+x"(acc.b) : "x"(x.b), "x"(y.b));
    return acc;
  }
#else
  // Codes of up to 4 bits: 8 sums of two products, of at most 2 * 15 * 128, fit int16.
  static constexpr bool SHORT_SUMS = true;
  template <int STEPS> static Ints dots(Ints acc, const Bytes c[STEPS], const int8_t *x) {
    __m256i v = quad(x);
    Ints s{_mm256_maddubs_epi16(c[0].a, v), _mm256_maddubs_epi16(c[0].b, v)};
    UNROLL for (int i = 1; i < STEPS; i++) {
      v = quad(x + 4 * i);
      s.a = _mm256_add_epi16(s.a, _mm256_maddubs_epi16(c[i].a, v));
      s.b = _mm256_add_epi16(s.b, _mm256_maddubs_epi16(c[i].b, v));
    }
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(s.a, ones)),
            _mm256_add_epi32(acc.b, _mm256_madd_epi16(s.b, ones))};
  }
  // For short.h, in 16 bits: of 2 x 2 products of codes and digits sums of two.
  using Run = Bytes;
  static Run no_run() { return bytes(0); }
  static Run first_of_run(Bytes c, __m256i v) { return {_mm256_maddubs_epi16(c.a, v), _mm256_maddubs_epi16(c.b, v)}; }
  // GCC 12 would make the products of many steps first and add them up from the stack, or move sums from register to
  // register.
  static void add_to_run(Run &run, Bytes c, __m256i v) {
    const Run p = first_of_run(c, v);
    __asm__("vpaddw %1, %0, %0" : "+x"(run.a) : "x"(p.a));
    __asm__("vpaddw %1, %0, %0" : "+x"(run.b) : "x"(p.b));
  }
  static Ints end_run(Ints acc, Run run) { return dot_shorts(acc, run, factor(1)); }
  static Ints end_run(Ints acc, Run run, Bytes scale, int j) { return dot_shorts(acc, run, factor(scale, j)); }
  static Bytes add_shorts(Bytes x, Bytes y) { return {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)}; }
  // acc[row] += x0 * y0 + x1 * y1 of two 16-bit numbers each.
  static Ints dot_shorts(Ints acc, Bytes x, Bytes y) {
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(x.b, y.b))};
  }
#endif
  // For group_sums.h. Two 16-bit numbers, for every lane.
  static Bytes two(int32_t both) { return {_mm256_set1_epi32(both), _mm256_set1_epi32(both)}; }
  // Bytes 2 j and 2 j + 1 of each lane, as 16-bit numbers.
  static Bytes two_of(Bytes v, int j) {
    const __m256i at = _mm256_load_si256((const __m256i *)SPREAD.pairs[j]);
    return {_mm256_shuffle_epi8(v.a, at), _mm256_shuffle_epi8(v.b, at)};
  }
  // For words.h. Bytes J and J + 2 of each lane as 16-bit numbers, with a sign or without.
  template <int J, bool SIGNS> static Bytes words(Bytes v) {
    const auto half = [](__m256i x) {
      if (SIGNS) return _mm256_srai_epi16(J ? x : _mm256_slli_epi16(x, 8), 8);
      return J ? _mm256_srli_epi16(x, 8) : _mm256_and_si256(x, _mm256_set1_epi16(255));
    };
    return {half(v.a), half(v.b)};
  }
  // sum[row] += x0 * y0 + x1 * y1 of two 16-bit numbers each.
  static Ints dot_words(Bytes x, __m256i y) { return {_mm256_madd_epi16(x.a, y), _mm256_madd_epi16(x.b, y)}; }
  static void add_words(Ints &sum, Bytes x, __m256i y) {
#ifdef __AVXVNNI__
    sum = dot_shorts(sum, x, {y, y});
#else
    const Ints p = dot_words(x, y);
    __asm__("vpaddd %1, %0, %0" : "+x"(sum.a) : "x"(p.a));
    __asm__("vpaddd %1, %0, %0" : "+x"(sum.b) : "x"(p.b));
#endif
  }
  // acc[row] += sum of 4 codes of the row times 4 digits.
  template <int BITS> static Ints dot(Ints acc, Bytes c, __m256i v) {
    return {dot1<BITS>(acc.a, c.a, v), dot1<BITS>(acc.b, c.b, v)};
  }
  // The same for what codes under super-scales count, which are less by COUNT_BIAS.
#ifdef __AVXVNNI__
  static constexpr bool ANY_BYTE = true;
  static constexpr int COUNT_BIAS = 0;
  static Ints dot_counts(Ints acc, Bytes c, __m256i v) { return dot<8>(acc, c, v); }
#else
  static constexpr bool ANY_BYTE = false;
  static constexpr int COUNT_BIAS = 127;  // with signs the sums of two products fit int16
  static Ints dot_counts(Ints acc, Bytes c, __m256i v) {
    const __m256i size = _mm256_abs_epi8(v);  // a digit may be -128, whose sign no byte can turn
    return {_mm256_add_epi32(acc.a, pairs(size, _mm256_sign_epi8(c.a, v))),
            _mm256_add_epi32(acc.b, pairs(size, _mm256_sign_epi8(c.b, v)))};
  }
#endif
  static Ints shl8_add(Ints h, Ints l) {
    return {_mm256_add_epi32(_mm256_slli_epi32(h.a, 8), l.a), _mm256_add_epi32(_mm256_slli_epi32(h.b, 8), l.b)};
  }
  static Floats to_float(Ints v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
  static Floats load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float *p, Floats v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
  }
  static Floats set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static Floats fma(Floats x, Floats y, Floats z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
  // acc[row] += code * x, in the form of codes for many tokens.
  static Floats dot_part(Floats acc, Floats codes, Floats x) { return fma(codes, x, acc); }
  // Byte J of each lane, with a sign or without.
  template <int J, bool SIGNS = false> static Floats from_byte(Bytes v) {
    return {_mm256_cvtepi32_ps(byte<J, SIGNS>(v.a)), _mm256_cvtepi32_ps(byte<J, SIGNS>(v.b))};
  }
  static Floats from_half(const uint8_t *p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 16)))};
  }
  static Floats from_bf16(const uint16_t *p) {
    const auto eight = [](const uint16_t *h) {
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)h)), 16));
    };
    return {eight(p), eight(p + 8)};
  }
  static Floats from_u8(const uint8_t *p) {
    const __m128i v = _mm_loadu_si128((const __m128i *)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)))};
  }

 private:
  template <int J, bool SIGNS> static __m256i byte(__m256i v) {
    if (SIGNS) return _mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * J), 24);
    return _mm256_and_si256(_mm256_srli_epi32(v, 8 * J), _mm256_set1_epi32(255));
  }
  static __m256i pairs(__m256i c, __m256i x) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(c, x), _mm256_set1_epi16(1));
  }
  // Codes of up to 4 bits cannot saturate an int16 pair; 8-bit codes go nibble by nibble.
  template <int BITS> static __m256i dot1(__m256i acc, __m256i c, __m256i x) {
#ifdef __AVXVNNI__
    // GCC 12 copies and spills the sums around its own intrinsic.
    __asm__(TRILOBITE_ENCODING "vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(c), "x"(x));
    return acc;
#else
    if (BITS < 8) return _mm256_add_epi32(acc, pairs(c, x));
    const __m256i m = _mm256_set1_epi8(15);
    const __m256i high = pairs(_mm256_and_si256(_mm256_srli_epi16(c, 4), m), x);
    return _mm256_add_epi32(_mm256_add_epi32(acc, pairs(_mm256_and_si256(c, m), x)), _mm256_slli_epi32(high, 4));
#endif
  }
};
