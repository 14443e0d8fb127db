// AVX-512 (F, BW, VL, DQ), with VNNI where the translation unit is compiled for it. One zmm is one plane of a block.
#if defined(__AVX512BF16__) && !defined(__AMX_INT8__)
#define TRILOBITE_ZEN  // bfloat16 without matrices: Zen 4 and 5
#endif
#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL16 _Pragma("GCC unroll 16")
struct Isa {
  static constexpr int LANES = 16;  // floats in a register
  static constexpr int STEPS = 8;   // of 4 columns, decoded at a time
  static constexpr int TOKENS_AT_ONCE = 4;
  static constexpr bool MATRICES = false;
#ifdef __AVX512VNNI__
  // words.h: tokens from which on codes of up to 4 bits, and bytes, are multiplied so (0: never).
  static constexpr int WORDS = 5, WORDS_OF_BYTES = 5;
#else
  static constexpr int WORDS = 3, WORDS_OF_BYTES = 2;
#endif
#ifdef __AMX_INT8__
  static constexpr int SHORT_EXACT = 1, SHORT_INT8 = 2;  // tokens that short.h multiplies
#else
  static constexpr int SHORT_EXACT = 4, SHORT_INT8 = 4;
#endif
  // Bands that one token reads at a time, each a stream of its own, and the cache that these are prefetched into (3 the
  // first level, 2 the second): Zen 4 and 5 want fewer than others, and their first level waits for too few lines.
#ifdef TRILOBITE_ZEN
  static constexpr int STREAMS = 2, LOCALITY = 2;
#else
  static constexpr int STREAMS = 4, LOCALITY = 3;
#endif
  // For many tokens (many.h): from how many on, bands that share a broadcast, sums that registers hold, form of codes.
  static constexpr int BANDS_AT_ONCE = 4, SUMS = 24;
#if defined(__AVX512BF16__)
  static constexpr int MANY = 5;
  static constexpr Form FORM = Form::PAIRS;
#elif defined(__AVX512VNNI__)
  static constexpr int MANY = 5;
  static constexpr Form FORM = Form::BYTES;
#else
  static constexpr int MANY = 7;
  static constexpr Form FORM = Form::SINGLES;
#endif
  using Bytes = __m512i;
  using Ints = __m512i;
  using Floats = __m512;

  static Bytes load(const uint8_t *p) { return _mm512_loadu_si512(p); }
  // As if v were made here: it is in a register, and what is computed of it is computed anew.
  static void hide(Bytes &v) {
    Bytes made = v;
    __asm__("" : "+v"(made));
    v = made;
  }
  static void store(uint8_t *p, Bytes v) { _mm512_storeu_si512(p, v); }
  static Bytes mask(Bytes v, uint8_t m) { return _mm512_and_si512(v, _mm512_set1_epi8((char)m)); }
  // Shifts 16-bit lanes: bits of the neighbour come in, a mask always follows.
  template <int SHIFT> static Bytes shr(Bytes v) { return _mm512_srli_epi16(v, SHIFT); }
  static Bytes either(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
  // Bits [FROM, FROM + WIDTH) of every byte, moved to bit TO.
  template <int FROM, int WIDTH, int TO = 0> static Bytes field(Bytes v) {
    constexpr uint8_t kept = (uint8_t)(((1 << WIDTH) - 1) << TO);
    if (FROM == TO) return mask(v, kept);
#if defined(__GFNI__) && !defined(TRILOBITE_ZEN)
    // Any linear map of a byte's bits is one instruction: row 7 - i of the matrix picks bit i. (On Zen it waits for the same
    // units as products.)
    uint64_t matrix = 0;
    for (int i = 0; i < WIDTH; i++) matrix |= 1ull << (FROM + i) << 8 * (7 - TO - i);
    return _mm512_gf2p8affine_epi64_epi8(v, _mm512_set1_epi64((long long)matrix), 0);
#else
    return mask(shr<FROM - TO>(v), kept);
#endif
  }

  static Bytes bytes(uint8_t x) { return _mm512_set1_epi8((char)x); }
  // `count` bytes of each of 16 rows -> the lowest bytes of 16 lanes of four.
  static Bytes load_lanes(const uint8_t *p, int count) {
    if (count == 4) return load(p);
    if (count == 2) return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  }
  // Byte j of each lane, in all four.
  static Bytes spread(Bytes v, int j) { return _mm512_shuffle_epi8(v, _mm512_load_si512(SPREAD.bytes[j])); }
  // The same, or a constant, as the second factor of `times`, which carries nothing over in products of 16 bits.
  static Bytes factor(Bytes v, int j) { return _mm512_shuffle_epi8(v, _mm512_load_si512(SPREAD.words[j])); }
  static Bytes factor(int x) { return _mm512_set1_epi16((short)x); }
  static Bytes plus(Bytes a, Bytes b) { return _mm512_add_epi8(a, b); }
  // Products below 256.
  static Bytes times(Bytes a, Bytes b) { return _mm512_mullo_epi16(a, b); }

  static Ints zero() { return _mm512_setzero_si512(); }
  // Four digits, for every lane.
  static Bytes quad(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
  }
#ifdef __AVX512VNNI__
  static constexpr bool SHORT_SUMS = false;
  // For one use: the instruction reads them from memory, which saves a register.
  struct Near { const int8_t *x; };
  static Near quad_once(const int8_t *x) { return {x}; }
  template <int BITS> static Ints dot(Ints acc, Bytes c, Near v) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(c), "m"(*(const int8_t (*)[4])v.x));
    return acc;
  }
  static Ints dot_counts(Ints acc, Bytes c, Near v) { return dot<8>(acc, c, v); }
  // For short.h.
  using Run = Ints;
  static Run no_run() { return zero(); }
  static Run first_of_run(Bytes c, Near v) { return dot<8>(zero(), c, v); }
  static void add_to_run(Run &run, Bytes c, Near v) { run = dot<8>(run, c, v); }
  static Ints end_run(Ints acc, Run run) { return _mm512_add_epi32(acc, run); }
  // Times byte j of each lane, above which are zeros; the sum fits 16 bits.
  static Ints end_run(Ints acc, Run run, Bytes scale, int j) {
    return dot_shorts(acc, run, _mm512_shuffle_epi8(scale, _mm512_load_si512(SPREAD.ones[j])));
  }
  // acc[row] += x0 * y0 + x1 * y1 of two 16-bit numbers each.
  static Ints dot_shorts(Ints acc, Bytes x, Bytes y) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(x), "v"(y));
    return acc;
  }
#else
  static Bytes quad_once(const int8_t *x) { return quad(x); }
  // Codes of up to 4 bits: 8 sums of two products, of at most 2 * 15 * 128, fit int16.
  static constexpr bool SHORT_SUMS = true;
  template <int STEPS> static Ints dots(Ints acc, const Bytes c[STEPS], const int8_t *x) {
    __m512i s = _mm512_maddubs_epi16(c[0], quad(x));
    UNROLL for (int i = 1; i < STEPS; i++) s = _mm512_add_epi16(s, _mm512_maddubs_epi16(c[i], quad(x + 4 * i)));
    return _mm512_add_epi32(acc, _mm512_madd_epi16(s, _mm512_set1_epi16(1)));
  }
  // For short.h, in 16 bits: of 2 x 2 products of codes and digits sums of two.
  using Run = Bytes;
  static Run no_run() { return bytes(0); }
  static Run first_of_run(Bytes c, Bytes v) { return _mm512_maddubs_epi16(c, v); }
  static void add_to_run(Run &run, Bytes c, Bytes v) {
    // GCC 12 would make the products of many steps first and add them up from the stack.
    Run sum = run;  // or the sums of all lie there
    __asm__("vpaddw %1, %0, %0" : "+v"(sum) : "v"(first_of_run(c, v)));
    run = sum;
  }
  static Ints end_run(Ints acc, Run run) { return dot_shorts(acc, run, factor(1)); }
  static Ints end_run(Ints acc, Run run, Bytes scale, int j) { return dot_shorts(acc, run, factor(scale, j)); }
  static Bytes add_shorts(Bytes x, Bytes y) { return _mm512_add_epi16(x, y); }
  // acc[row] += x0 * y0 + x1 * y1 of two 16-bit numbers each.
  static Ints dot_shorts(Ints acc, Bytes x, Bytes y) { return _mm512_add_epi32(acc, _mm512_madd_epi16(x, y)); }
#endif
  // For group_sums.h. Two 16-bit numbers, for every lane.
  static Bytes two(int32_t both) { return _mm512_set1_epi32(both); }
  // Bytes 2 j and 2 j + 1 of each lane, as 16-bit numbers.
  static Bytes two_of(Bytes v, int j) { return _mm512_shuffle_epi8(v, _mm512_load_si512(SPREAD.pairs[j])); }
  // For words.h. Bytes J and J + 2 of each lane as 16-bit numbers, with a sign or without.
  template <int J, bool SIGNS> static Bytes words(Bytes v) {
    if (SIGNS) return _mm512_srai_epi16(J ? v : _mm512_slli_epi16(v, 8), 8);
    return J ? _mm512_srli_epi16(v, 8) : _mm512_and_si512(v, _mm512_set1_epi16(255));
  }
  // sum[row] += x0 * y0 + x1 * y1 of two 16-bit numbers each.
  static Ints dot_words(Bytes x, Bytes y) { return _mm512_madd_epi16(x, y); }
  static void add_words(Ints &sum, Bytes x, Bytes y) {
#ifdef __AVX512VNNI__
    sum = dot_shorts(sum, x, y);
#else
    __asm__("vpaddd %1, %0, %0" : "+v"(sum) : "v"(dot_words(x, y)));
#endif
  }
  // acc[row] += sum of 4 codes of the row times 4 digits.
  template <int BITS> static Ints dot(Ints acc, Bytes c, Bytes v) {
#ifdef __AVX512VNNI__
    // GCC 12 copies and spills the sums around its own intrinsic.
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(c), "v"(v));
    return acc;
#else
    if (BITS < 8) return _mm512_add_epi32(acc, pairs(c, v));  // cannot saturate int16
    const __m512i m = _mm512_set1_epi8(15);
    const __m512i high = pairs(_mm512_and_si512(_mm512_srli_epi16(c, 4), m), v);
    return _mm512_add_epi32(_mm512_add_epi32(acc, pairs(_mm512_and_si512(c, m), v)), _mm512_slli_epi32(high, 4));
#endif
  }
  // The same for what codes under super-scales count, which are less by COUNT_BIAS.
#ifdef __AVX512VNNI__
  static constexpr bool ANY_BYTE = true;
  static constexpr int COUNT_BIAS = 0;
  static Ints dot_counts(Ints acc, Bytes c, Bytes v) { return dot<8>(acc, c, v); }
#else
  static constexpr bool ANY_BYTE = false;
  static constexpr int COUNT_BIAS = 127;  // with signs the sums of two products fit int16
  static Ints dot_counts(Ints acc, Bytes c, Bytes v) {
    // A digit may be -128, whose sign no byte can turn.
    const __m512i turned = _mm512_mask_sub_epi8(c, _mm512_movepi8_mask(v), _mm512_setzero_si512(), c);
    return _mm512_add_epi32(acc, pairs(_mm512_abs_epi8(v), turned));
  }
#endif
  template <int SHIFT> static Ints shr_ints(Ints v) { return _mm512_srai_epi32(v, SHIFT); }
  static Ints shl8_add(Ints h, Ints l) { return _mm512_add_epi32(_mm512_slli_epi32(h, 8), l); }
  static Floats to_float(Ints v) { return _mm512_cvtepi32_ps(v); }
  static Floats load(const float *p) { return _mm512_loadu_ps(p); }
  static void store(float *p, Floats v) { _mm512_storeu_ps(p, v); }
  static Floats set1(float x) { return _mm512_set1_ps(x); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  // Sums of the lanes of 16 registers: number 4 i + j is that of register 4 j + i. Lanes are added up in the order of
  // `total` (attention.h).
  static void totals(const Floats f[16], float out[16]) {
    Floats four[4];
    UNROLL for (int j = 0; j < 4; j++) {
      Floats two[2];
      UNROLL for (int i = 0; i < 2; i++) {
        const Floats a = f[4 * j + 2 * i], b = f[4 * j + 2 * i + 1];
        two[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
      }
      four[j] = _mm512_add_ps(_mm512_shuffle_f32x4(two[0], two[1], 0x88), _mm512_shuffle_f32x4(two[0], two[1], 0xdd));
    }
    Floats two[2];
    UNROLL for (int i = 0; i < 2; i++) two[i] = _mm512_add_ps(_mm512_unpacklo_ps(four[2 * i], four[2 * i + 1]),
                                                              _mm512_unpackhi_ps(four[2 * i], four[2 * i + 1]));
    const __m512d low = _mm512_castps_pd(two[0]), high = _mm512_castps_pd(two[1]);
    store(out, _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(low, high))));
  }
  // acc[row] += code * x, in the form of codes for many tokens.
  static Floats dot_part(Floats acc, Floats codes, Floats x) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(acc, (__m512bh)codes, (__m512bh)x);
#else
    return fma(codes, x, acc);
#endif
  }
  // Byte J of each lane, with a sign or without.
  template <int J, bool SIGNS = false> static Floats from_byte(Bytes v) {
    if (SIGNS) return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * J), 24));
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(v, 8 * J), _mm512_set1_epi32(255)));
  }
  static Floats from_half(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
  static Floats from_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
  }
  static Floats from_u8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
  }

 private:
  static __m512i pairs(__m512i c, __m512i x) {
    return _mm512_madd_epi16(_mm512_maddubs_epi16(c, x), _mm512_set1_epi16(1));
  }
};
