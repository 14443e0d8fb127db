// Activations of the gate, in fp32. Loops over plain arithmetic, which vectorize; but only where all that they call is
// inlined, and GCC 12 does not do that by itself in the largest tier.

// e^x within 2 ulp: x = n ln 2 + r, a degree-6 polynomial on |r| <= ln(2)/2, then n goes into the exponent.
ALWAYS_INLINE float fast_exp(float x) {
  const float bounded = x < -87.3f ? -87.3f : (x > 88.7f ? 88.7f : x);
  const float n = __builtin_rintf(bounded * 1.44269504f);
  const float r = (bounded - n * 0.693145752f) - n * 1.42860677e-6f;
  float p = 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // Two factors, since n may be 128 while 2^128 is no fp32.
  const int32_t whole = (int32_t)n, half = whole >> 1;
  p = p * bits_to_float((uint32_t)(half + 127) << 23) * bits_to_float((uint32_t)(whole - half + 127) << 23);
  return x != x ? x : p;
}

ALWAYS_INLINE float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }
ALWAYS_INLINE float tanh_exp(float x) { return 1.0f - 2.0f / (1.0f + fast_exp(2.0f * x)); }
// These keep NaN, as torch does.
static inline float at_most(float x, float top) { return x > top ? top : x; }
static inline float at_least(float x, float low) { return x < low ? low : x; }

ALWAYS_INLINE float act(int kind, float x) {
  switch (kind) {
    case TRILOBITE_SILU: return x * sigmoid(x);
    case TRILOBITE_GELU_TANH: return 0.5f * x * (1.0f + tanh_exp(0.797884561f * (x + 0.044715f * x * x * x)));
    case TRILOBITE_QUICK_GELU: return x * sigmoid(1.702f * x);
    case TRILOBITE_SIGMOID: return sigmoid(x);
    case TRILOBITE_TANH: return tanh_exp(x);
    case TRILOBITE_RELU: return at_least(x, 0);
    case TRILOBITE_RELU2: return at_least(x, 0) * at_least(x, 0);
    case TRILOBITE_GELU: return 0.5f * x * (1.0f + erff(x * 0.707106781f));
    default: return x;
  }
}

template <int KIND> static void apply(float *gate, const float *up, int64_t count) {
  if (up)
    for (int64_t i = 0; i < count; i++) gate[i] = act(KIND, gate[i]) * up[i];
  else
    for (int64_t i = 0; i < count; i++) gate[i] = act(KIND, gate[i]);
}

static inline float between(float x, float limit) { return at_least(at_most(x, limit), -limit); }

// The forms of kernels/activation.py that are not act(gate) * up.
ALWAYS_INLINE float gated(int kind, float gate, float up, float a, float b) {
  switch (kind) {
    case TRILOBITE_GPT_OSS: gate = at_most(gate, b); return (between(up, b) + 1.0f) * (gate * sigmoid(a * gate));
    case TRILOBITE_CLAMPED_SILU: gate = at_most(gate, a); return gate * sigmoid(gate) * between(up, a);
    case TRILOBITE_SILU_CLAMPED: return at_most(gate * sigmoid(gate), a) * between(up, a);
    default: return a * tanhf(gate / a) * sigmoid(gate) * (b * tanhf(up / b));  // tanh_exp is coarse near 0
  }
}

template <int KIND> static void apply_gated(const float *numbers, float *gate, const float *up, int64_t count) {
  const float a = numbers[0], b = numbers[1];
  for (int64_t i = 0; i < count; i++) gate[i] = gated(KIND, gate[i], up[i], a, b);
}

static void activate(int kind, const float *numbers, float *gate, const float *up, int64_t count) {
  switch (kind) {
    case TRILOBITE_SILU: return apply<TRILOBITE_SILU>(gate, up, count);
    case TRILOBITE_GELU: return apply<TRILOBITE_GELU>(gate, up, count);
    case TRILOBITE_GELU_TANH: return apply<TRILOBITE_GELU_TANH>(gate, up, count);
    case TRILOBITE_RELU: return apply<TRILOBITE_RELU>(gate, up, count);
    case TRILOBITE_SIGMOID: return apply<TRILOBITE_SIGMOID>(gate, up, count);
    case TRILOBITE_QUICK_GELU: return apply<TRILOBITE_QUICK_GELU>(gate, up, count);
    case TRILOBITE_RELU2: return apply<TRILOBITE_RELU2>(gate, up, count);
    case TRILOBITE_TANH: return apply<TRILOBITE_TANH>(gate, up, count);
    case TRILOBITE_GPT_OSS: return apply_gated<TRILOBITE_GPT_OSS>(numbers, gate, up, count);
    case TRILOBITE_CLAMPED_SILU: return apply_gated<TRILOBITE_CLAMPED_SILU>(numbers, gate, up, count);
    case TRILOBITE_SILU_CLAMPED: return apply_gated<TRILOBITE_SILU_CLAMPED>(numbers, gate, up, count);
    case TRILOBITE_SOFTCAPPED: return apply_gated<TRILOBITE_SOFTCAPPED>(numbers, gate, up, count);
    default: return apply<TRILOBITE_IDENTITY>(gate, up, count);
  }
}
