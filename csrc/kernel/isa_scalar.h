// Portable vectors: 64 code bytes, 16 int32, 16 fp32. Plain loops, which compilers turn into whatever the machine has.
#define UNROLL
struct Isa {
  static constexpr int TOKENS_AT_ONCE = 1;
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

  static Ints zero() { return Ints{}; }
  // acc[row] += sum of 4 codes of the row times x[0..3]
  template <int BITS> static Ints dot(Ints acc, const Bytes &c, const int8_t *x) {
    for (int i = 0; i < ROWS; i++)
      acc.v[i] += c.v[4 * i] * x[0] + c.v[4 * i + 1] * x[1] + c.v[4 * i + 2] * x[2] + c.v[4 * i + 3] * x[3];
    return acc;
  }
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
  static Floats from_u8(const uint8_t *p) {
    Floats f;
    for (int i = 0; i < ROWS; i++) f.v[i] = p[i];
    return f;
  }
};
