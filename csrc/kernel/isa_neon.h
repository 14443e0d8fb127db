// ARM: NEON with the dot product instructions (ARMv8.2), and where the translation unit is compiled for them with those
// that multiply matrices of bytes (i8mm). A register of the layout is four of 128 bits.
#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL16 _Pragma("GCC unroll 16")
struct Isa {
  static constexpr int LANES = 4;  // floats in a register
  static constexpr int STEPS = 8;  // of 4 columns, decoded at a time
  static constexpr int TOKENS_AT_ONCE = 2;
  static constexpr int SHORT_EXACT = 0, SHORT_INT8 = 0;  // tokens that short.h multiplies
  static constexpr int WORDS = 0, WORDS_OF_BYTES = 0;
  static constexpr int STREAMS = 1;   // bands that one token reads at a time
  static constexpr int LOCALITY = 3;  // of what is prefetched: the first-level cache
  // For many tokens (many.h): from how many on, bands that share a broadcast, sums that registers hold, form of codes.
  static constexpr int MANY = 3, BANDS_AT_ONCE = 1, SUMS = 6;
  static constexpr Form FORM = Form::BYTES;
  static constexpr int PARTS = 4;
  struct Bytes { uint8x16_t v[PARTS]; };
  struct Ints { int32x4_t v[PARTS]; };
  struct Floats { float32x4_t v[PARTS]; };

  static Bytes load(const uint8_t *p) {
    return each<Bytes>([&](int i) { return vld1q_u8(p + 16 * i); });
  }
  static void store(uint8_t *p, const Bytes &b) {
    for (int i = 0; i < PARTS; i++) vst1q_u8(p + 16 * i, b.v[i]);
  }
  static Bytes mask(const Bytes &b, uint8_t m) {
    return each<Bytes>([&](int i) { return vandq_u8(b.v[i], vdupq_n_u8(m)); });
  }
  static Bytes either(const Bytes &a, const Bytes &b) {
    return each<Bytes>([&](int i) { return vorrq_u8(a.v[i], b.v[i]); });
  }
  // Bits [FROM, FROM + WIDTH) of every byte, moved to bit TO.
  template <int FROM, int WIDTH, int TO = 0> static Bytes field(const Bytes &b) {
    constexpr uint8_t kept = (uint8_t)(((1 << WIDTH) - 1) << TO);
    if constexpr (FROM == TO) return mask(b, kept);
    else return mask(each<Bytes>([&](int i) { return vshrq_n_u8(b.v[i], FROM - TO); }), kept);
  }

  static Bytes bytes(uint8_t x) {
    return each<Bytes>([&](int) { return vdupq_n_u8(x); });
  }
  // `count` bytes of each of 16 rows -> the lowest bytes of 16 lanes of four.
  static Bytes load_lanes(const uint8_t *p, int count) {
    if (count == 4) return load(p);
    if (count == 2)
      return each<Bytes>(
          [&](int i) { return vreinterpretq_u8_u32(vmovl_u16(vreinterpret_u16_u8(vld1_u8(p + 8 * i)))); });
    const uint8x16_t v = vld1q_u8(p);
    const uint16x8_t halves[2] = {vmovl_u8(vget_low_u8(v)), vmovl_u8(vget_high_u8(v))};
    return each<Bytes>([&](int i) {
      const uint16x8_t h = halves[i / 2];
      return vreinterpretq_u8_u32(vmovl_u16(i % 2 ? vget_high_u16(h) : vget_low_u16(h)));
    });
  }
  // Byte j of each lane, in all four.
  static Bytes spread(const Bytes &b, int j) {
    static const uint8_t first[16] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
    const uint8x16_t at = vaddq_u8(vld1q_u8(first), vdupq_n_u8((uint8_t)j));
    return each<Bytes>([&](int i) { return vqtbl1q_u8(b.v[i], at); });
  }
  // The same, or a constant, as the second factor of `times`.
  static Bytes factor(const Bytes &b, int j) { return spread(b, j); }
  static Bytes factor(int x) { return bytes((uint8_t)x); }
  static Bytes plus(const Bytes &a, const Bytes &b) {
    return each<Bytes>([&](int i) { return vaddq_u8(a.v[i], b.v[i]); });
  }
  // Products below 256.
  static Bytes times(const Bytes &a, const Bytes &b) {
    return each<Bytes>([&](int i) { return vmulq_u8(a.v[i], b.v[i]); });
  }

  static Ints zero() {
    return each<Ints>([](int) { return vdupq_n_s32(0); });
  }
  // Four digits, for every lane.
  static int8x16_t quad(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
  }
  static int8x16_t quad_once(const int8_t *x) { return quad(x); }
  static constexpr bool SHORT_SUMS = false;
#ifdef __ARM_FEATURE_MATMUL_INT8
  // acc[row] += sum of 4 codes of the row times 4 digits.
  template <int BITS> static Ints dot(const Ints &acc, const Bytes &c, int8x16_t v) {
    return each<Ints>([&](int i) { return vusdotq_s32(acc.v[i], c.v[i], v); });
  }
  static constexpr bool ANY_BYTE = true;
  static constexpr int COUNT_BIAS = 0;
  static Ints dot_counts(const Ints &acc, const Bytes &c, int8x16_t v) { return dot<8>(acc, c, v); }
  // For many.h: products of two rows and two tokens, eight columns at a time.
  static constexpr bool MATRICES = true;
  struct Pairs { int32x4_t v[2 * PARTS]; };  // of rows 2 i and 2 i + 1: row by row, two tokens each
  static Pairs no_pairs() {
    Pairs p;
    for (auto &v : p.v) v = vdupq_n_s32(0);
    return p;
  }
  // Two lines, of four columns each -> 16 rows of eight columns.
  static void interleave(uint8_t *lines) {
    const Bytes a = load(lines), b = load(lines + 64);
    for (int i = 0; i < PARTS; i++) {
      const uint32x4_t x = vreinterpretq_u32_u8(a.v[i]), y = vreinterpretq_u32_u8(b.v[i]);
      vst1q_u8(lines + 32 * i, vreinterpretq_u8_u32(vzip1q_u32(x, y)));
      vst1q_u8(lines + 32 * i + 16, vreinterpretq_u8_u32(vzip2q_u32(x, y)));
    }
  }
  // Eight digits of each of two tokens.
  static int8x16_t eight_of_two(const int8_t *x, const int8_t *y) { return vcombine_s8(vld1_s8(x), vld1_s8(y)); }
  template <int D> static void dot_pairs(Pairs acc[D], const uint8_t *lines, const int8x16_t v[D]) {
    UNROLL for (int i = 0; i < 2 * PARTS; i++) {
      const uint8x16_t c = vld1q_u8(lines + 16 * i);
      UNROLL for (int d = 0; d < D; d++) acc[d].v[i] = vusmmlaq_s32(acc[d].v[i], c, v[d]);
    }
  }
  // The sums of one of two tokens.
  static Ints of_token(const Pairs &p, bool second) {
    return each<Ints>(
        [&](int i) { return second ? vuzp2q_s32(p.v[2 * i], p.v[2 * i + 1]) : vuzp1q_s32(p.v[2 * i], p.v[2 * i + 1]); });
  }
#else
  static constexpr bool MATRICES = false;
  // acc[row] += sum of 4 codes of the row times 4 digits.
  template <int BITS> static Ints dot(const Ints &acc, const Bytes &c, int8x16_t v) {
    return each<Ints>([&](int i) {
      if (BITS < 8) return vdotq_s32(acc.v[i], vreinterpretq_s8_u8(c.v[i]), v);
      // The instruction takes signed bytes: the highest bit of a code goes on its own.
      const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(c.v[i], vdupq_n_u8(127)));
      const int8x16_t top = vreinterpretq_s8_u8(vshrq_n_u8(c.v[i], 7));
      return vaddq_s32(vdotq_s32(acc.v[i], low, v), vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), top, v), 7));
    });
  }
  // The same for what codes under super-scales count, which are less by COUNT_BIAS: the instruction takes signed bytes.
  static constexpr bool ANY_BYTE = false;
  static constexpr int COUNT_BIAS = 127;
  static Ints dot_counts(const Ints &acc, const Bytes &c, int8x16_t v) {
    return each<Ints>([&](int i) { return vdotq_s32(acc.v[i], vreinterpretq_s8_u8(c.v[i]), v); });
  }
#endif
  static Ints shl8_add(const Ints &high, const Ints &low) {
    return each<Ints>([&](int i) { return vaddq_s32(vshlq_n_s32(high.v[i], 8), low.v[i]); });
  }
  static Floats to_float(const Ints &a) {
    return each<Floats>([&](int i) { return vcvtq_f32_s32(a.v[i]); });
  }
  static Floats load(const float *p) {
    return each<Floats>([&](int i) { return vld1q_f32(p + 4 * i); });
  }
  static void store(float *p, const Floats &f) {
    for (int i = 0; i < PARTS; i++) vst1q_f32(p + 4 * i, f.v[i]);
  }
  static Floats set1(float x) {
    return each<Floats>([&](int) { return vdupq_n_f32(x); });
  }
  static Floats mul(const Floats &a, const Floats &b) {
    return each<Floats>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
  }
  static Floats fma(const Floats &a, const Floats &b, const Floats &c) {
    return each<Floats>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
  }
  static Floats from_half(const uint8_t *p) {
    return each<Floats>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); });
  }
  static Floats from_bf16(const uint16_t *p) {
    return each<Floats>([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
  }
  static Floats from_u8(const uint8_t *p) {
    const uint8x16_t v = vld1q_u8(p);
    const uint16x8_t halves[2] = {vmovl_u8(vget_low_u8(v)), vmovl_u8(vget_high_u8(v))};
    return each<Floats>([&](int i) {
      const uint16x8_t h = halves[i / 2];
      return vcvtq_f32_u32(vmovl_u16(i % 2 ? vget_high_u16(h) : vget_low_u16(h)));
    });
  }

 private:
  template <typename T, typename F> static T each(F part) { return {{part(0), part(1), part(2), part(3)}}; }
};
