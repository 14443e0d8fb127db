// The transforms of lattice formats: T x = H (s * x) / sqrt(n), or T^T x = s * H^T x / sqrt(n), in place
// (formats/incoherence.py). H is the Kronecker product of a few dense cores and of Sylvester's matrix, whose factor of the
// dimension comes last.

// Lanes i and i ^ STEP of a vector -> their sum and their difference, for all steps from this one down.
template <int STEP> static inline Lanes butterflies(Lanes v) {
  if constexpr (STEP > 1) v = butterflies<STEP / 2>(v);
  Bits other;
  Lanes sign;
  for (int i = 0; i < LANES; i++) other[i] = i ^ STEP, sign[i] = i & STEP ? -1.0f : 1.0f;
  return v * sign + pick(v, v, other);
}

static inline Lanes load_lanes(const float *p) {
  Lanes v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline void store_lanes(float *p, Lanes v) { memcpy(p, &v, sizeof v); }

// Sylvester's matrix of order n, a power of two, times x.
static void sylvester(float *x, int64_t n) {
  if (n < LANES) {
    for (int64_t h = 1; h < n; h *= 2)
      for (int64_t i = 0; i < n; i++)
        if (!(i & h)) {
          const float a = x[i], b = x[i + h];
          x[i] = a + b, x[i + h] = a - b;
        }
    return;
  }
  for (int64_t i = 0; i < n; i += LANES) store_lanes(x + i, butterflies<LANES / 2>(load_lanes(x + i)));
  for (int64_t h = LANES; h < n; h *= 2)
    for (int64_t i = 0; i < n; i += 2 * h)
      for (int64_t j = i; j < i + h; j += LANES) {
        const Lanes a = load_lanes(x + j), b = load_lanes(x + j + h);
        store_lanes(x + j, a + b);
        store_lanes(x + j + h, a - b);
      }
}

// out [order, after] = core x, or core^T x; V vectors of columns at a time.
template <int V>
static inline void core_columns(const float *core, int64_t order, bool transpose, const float *x, int64_t after,
                                float *out) {
  const int64_t row = transpose ? 1 : order, step = transpose ? order : 1;
  for (int64_t i = 0; i < order; i++) {
    Lanes sum[V] = {};
    for (int64_t j = 0; j < order; j++)
      for (int v = 0; v < V; v++) sum[v] += core[i * row + j * step] * load_lanes(x + j * after + v * LANES);
    for (int v = 0; v < V; v++) store_lanes(out + i * after + v * LANES, sum[v]);
  }
}

static void multiply_core(const float *core, int64_t order, bool transpose, const float *x, int64_t after, float *out) {
  int64_t c = 0;
  for (; c + 4 * LANES <= after; c += 4 * LANES) core_columns<4>(core, order, transpose, x + c, after, out + c);
  for (; c + LANES <= after; c += LANES) core_columns<1>(core, order, transpose, x + c, after, out + c);
  for (; c < after; c++)
    for (int64_t i = 0; i < order; i++) {
      float sum = 0;
      for (int64_t j = 0; j < order; j++) sum += core[transpose ? j * order + i : i * order + j] * x[j * after + c];
      out[i * after + c] = sum;
    }
}

// x *= s * factor.
static void apply_signs(const Rotation &r, float factor, float *x) {
  const int64_t n = r.h->n;
  if (r.tuned) {
    for (int64_t i = 0; i < n; i++) {
      uint16_t h;
      memcpy(&h, r.signs + 2 * i, 2);
      x[i] *= half_to_float(h) * factor;
    }
    return;
  }
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const uint32_t bits = r.signs[i / 8];
    for (int j = 0; j < 8; j++) x[i + j] = bits_to_float(float_to_bits(x[i + j] * factor) ^ ((bits >> j & 1) << 31));
  }
  for (; i < n; i++) x[i] *= r.signs[i / 8] >> (i % 8) & 1 ? -factor : factor;
}

static void rotate(const Rotation &r, bool adjoint, float *x, float *buffer) {
  const trilobite_rotation &h = *r.h;
  const float factor = 1.0f / sqrtf((float)h.n);
  if (!adjoint) apply_signs(r, factor, x);
  int64_t after = h.n;
  for (int64_t i = 0; i < h.count; i++) {
    const int64_t whole = after, order = h.order[i];
    after /= order;
    for (int64_t at = 0; at < h.n; at += whole) multiply_core(h.core[i], order, adjoint, x + at, after, buffer + at);
    memcpy(x, buffer, h.n * sizeof(float));
  }
  for (int64_t at = 0; after > 1 && at < h.n; at += after) sylvester(x + at, after);
  if (adjoint) apply_signs(r, factor, x);
}
