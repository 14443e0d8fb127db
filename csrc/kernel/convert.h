// Scalar conversions between the element types, shared by all tiers; the loops over them vectorize.

// For what GCC 12 does not inline by itself, and has to be.
#define ALWAYS_INLINE __attribute__((always_inline)) static inline

static inline float bits_to_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline uint32_t float_to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

// Multiplying by 2^112 moves the fp16 exponent into place and makes subnormals right; infinity and NaN are patched.
static inline float half_to_float(uint16_t h) {
  const uint32_t rest = (uint32_t)(h & 0x7fff) << 13;
  uint32_t u = float_to_bits(bits_to_float(rest) * 0x1p112f);
  u = rest >= 0x0f800000u ? rest | 0x7f800000u : u;
  return bits_to_float(u | (uint32_t)(h & 0x8000) << 16);
}

static inline float bf16_to_float(uint16_t h) { return bits_to_float((uint32_t)h << 16); }

static inline uint16_t float_to_bf16(float f) {
  const uint32_t u = float_to_bits(f);
  const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded);
}

// Round to nearest even: normal numbers by integer arithmetic, subnormals by an addition that aligns the last bit.
static inline uint16_t float_to_half(float f) {
  const uint32_t u = float_to_bits(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  const uint32_t normal = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;
  const uint32_t small = float_to_bits(bits_to_float(a) + 0.5f) - 0x3f000000;
  uint32_t h = a < 0x38800000 ? small : normal;
  h = a >= 0x477ff000 ? 0x7c00 : h;
  h = a > 0x7f800000 ? 0x7e00 : h;
  return (uint16_t)(h | sign);
}

static inline float element(const void *p, int dtype, int64_t i) {
  if (dtype == TRILOBITE_F32) return ((const float *)p)[i];
  const uint16_t h = ((const uint16_t *)p)[i];
  return dtype == TRILOBITE_F16 ? half_to_float(h) : bf16_to_float(h);
}

static inline void load_floats(const void *p, int dtype, int64_t start, int64_t count, float *out) {
  if (dtype == TRILOBITE_F32) {
    memcpy(out, (const float *)p + start, count * sizeof(float));
    return;
  }
  const uint16_t *h = (const uint16_t *)p + start;
  if (dtype == TRILOBITE_BF16)
    for (int64_t i = 0; i < count; i++) out[i] = bf16_to_float(h[i]);
  else
    for (int64_t i = 0; i < count; i++) out[i] = half_to_float(h[i]);
}

static void store_floats(const float *x, int64_t count, void *y, int dtype) {
  uint16_t *h = (uint16_t *)y;
  if (dtype == TRILOBITE_F32) memcpy(y, x, count * sizeof(float));
  else if (dtype == TRILOBITE_BF16)
    for (int64_t i = 0; i < count; i++) h[i] = float_to_bf16(x[i]);
  else
    for (int64_t i = 0; i < count; i++) h[i] = float_to_half(x[i]);
}
