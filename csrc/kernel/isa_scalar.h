// Portable vectors: 64 code bytes, 16 int32, 16 fp32. Plain loops, which compilers turn into whatever the machine has.
#define UNROLL
#define UNROLL16
struct Isa {
  static constexpr int LANES = 4;  // floats in a register
  static constexpr int STEPS = 8;  // of 4 columns, decoded at a time
  static constexpr int TOKENS_AT_ONCE = 1;
  static constexpr bool MATRICES = false;
  static constexpr int SHORT_EXACT = 0, SHORT_INT8 = 0;  // tokens that short.h multiplies
  static constexpr int WORDS = 0, WORDS_OF_BYTES = 0;
  static constexpr int STREAMS = 1;   // bands that one token reads at a time
  static constexpr int LOCALITY = 3;  // of what is prefetched: the first-level cache
  // For many tokens (many.h): from how many on, bands that share a broadcast, sums that registers hold, form of codes.
  static constexpr int MANY = 3, BANDS_AT_ONCE = 1, SUMS = 3;
  static constexpr Form FORM = Form::BYTES;
  struct Bytes { uint8_t v[64]; };
  struct Ints { int32_t v[ROWS]; };
  struct Floats { float v[ROWS]; };

  static Bytes load(const uint8_t *p) {
    Bytes b;
    memcpy(b.v, p, 64);
    return b;
  }
  static void store(uint8_t *p, const Bytes &b) { memcpy(p, b.v, 64); }
  static Bytes mask(Bytes b, uint8_t m) {
    for (int i = 0; i < 64; i++) b.v[i] &= m;
    return b;
  }
  template <int SHIFT> static Bytes shr(Bytes b) {
    for (int i = 0; i < 64; i++) b.v[i] >>= SHIFT;
    return b;
  }
  static Bytes either(Bytes a, const Bytes &b) {
    for (int i = 0; i < 64; i++) a.v[i] |= b.v[i];
    return a;
  }
  // Bits [FROM, FROM + WIDTH) of every byte, moved to bit TO.
  template <int FROM, int WIDTH, int TO = 0> static Bytes field(Bytes v) {
    return mask(shr<FROM - TO>(v), (uint8_t)(((1 << WIDTH) - 1) << TO));
  }

  static Bytes bytes(uint8_t x) {
    Bytes b;
    memset(b.v, x, 64);
    return b;
  }
  // `count` bytes of each of 16 rows -> the lowest bytes of 16 lanes of four.
  static Bytes load_lanes(const uint8_t *p, int count) {
    Bytes b = bytes(0);
    for (int i = 0; i < ROWS * count; i++) b.v[i / count * 4 + i % count] = p[i];
    return b;
  }
  // Byte j of each lane, in all four.
  static Bytes spread(Bytes b, int j) {
    for (int i = 0; i < 64; i += 4) memset(b.v + i, b.v[i + j], 4);
    return b;
  }
  // The same, or a constant, as the second factor of `times`.
  static Bytes factor(Bytes b, int j) { return spread(b, j); }
  static Bytes factor(int x) { return bytes((uint8_t)x); }
  static Bytes plus(Bytes a, const Bytes &b) {
    for (int i = 0; i < 64; i++) a.v[i] = (uint8_t)(a.v[i] + b.v[i]);
    return a;
  }
  // Products below 256.
  static Bytes times(Bytes a, const Bytes &b) {
    for (int i = 0; i < 64; i++) a.v[i] = (uint8_t)(a.v[i] * b.v[i]);
    return a;
  }

  static Ints zero() { return Ints{}; }
  // Four digits.
  static const int8_t *quad(const int8_t *x) { return x; }
  static const int8_t *quad_once(const int8_t *x) { return quad(x); }
  static constexpr bool SHORT_SUMS = false;
  // acc[row] += sum of 4 codes of the row times 4 digits.
  template <int BITS> static Ints dot(Ints acc, const Bytes &c, const int8_t *x) {
    for (int i = 0; i < ROWS; i++)
      acc.v[i] += c.v[4 * i] * x[0] + c.v[4 * i + 1] * x[1] + c.v[4 * i + 2] * x[2] + c.v[4 * i + 3] * x[3];
    return acc;
  }
  // The same for what codes under super-scales count, which are less by COUNT_BIAS.
  static constexpr bool ANY_BYTE = true;
  static constexpr int COUNT_BIAS = 0;
  static Ints dot_counts(Ints acc, const Bytes &c, const int8_t *x) { return dot<8>(acc, c, x); }
  static Ints shl8_add(Ints high, const Ints &low) {
    for (int i = 0; i < ROWS; i++) high.v[i] = high.v[i] * 256 + low.v[i];
    return high;
  }
  static Floats to_float(const Ints &a) {
    Floats f;
    for (int i = 0; i < ROWS; i++) f.v[i] = (float)a.v[i];
    return f;
  }
  static Floats load(const float *p) {
    Floats f;
    memcpy(f.v, p, sizeof f.v);
    return f;
  }
  static void store(float *p, const Floats &f) { memcpy(p, f.v, sizeof f.v); }
  static Floats set1(float x) {
    Floats f;
    for (int i = 0; i < ROWS; i++) f.v[i] = x;
    return f;
  }
  static Floats mul(Floats a, const Floats &b) {
    for (int i = 0; i < ROWS; i++) a.v[i] *= b.v[i];
    return a;
  }
  static Floats fma(const Floats &a, const Floats &b, Floats c) {
    for (int i = 0; i < ROWS; i++) c.v[i] += a.v[i] * b.v[i];
    return c;
  }
  static Floats from_half(const uint8_t *p) {
    Floats f;
    for (int i = 0; i < ROWS; i++) {
      uint16_t h;
      memcpy(&h, p + 2 * i, 2);
      f.v[i] = half_to_float(h);
    }
    return f;
  }
  static Floats from_bf16(const uint16_t *p) {
    Floats f;
    for (int i = 0; i < ROWS; i++) f.v[i] = bf16_to_float(p[i]);
    return f;
  }
  static Floats from_u8(const uint8_t *p) {
    Floats f;
    for (int i = 0; i < ROWS; i++) f.v[i] = p[i];
    return f;
  }
};
