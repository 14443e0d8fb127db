// The transforms of lattice formats: T x = H (s * x) / sqrt(n), or T^T x = s * H^T x / sqrt(n), in place
// (formats/incoherence.py). H is the Kronecker product of a few dense cores and of Sylvester's matrix, whose factor of the
// dimension comes last.

#ifdef __clang__
#define TRILOBITE_SWAP(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define TRILOBITE_SWAP(v, ...) __builtin_shuffle(v, (Bits){__VA_ARGS__})
#endif

// Lanes i and i ^ STEP of a vector -> their sum and their difference.
template <int STEP> static inline Lanes butterfly(Lanes v) {
  Lanes other, sign;
  if (STEP == 1) other = TRILOBITE_SWAP(v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  else if (STEP == 2) other = TRILOBITE_SWAP(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  else if (STEP == 4) other = TRILOBITE_SWAP(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  else other = TRILOBITE_SWAP(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  for (int i = 0; i < ROWS; i++) sign[i] = i & STEP ? -1.0f : 1.0f;
  return v * sign + other;
}

static inline Lanes load_lanes(const float *p) {
  Lanes v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline void store_lanes(float *p, Lanes v) { memcpy(p, &v, sizeof v); }

// Sylvester's matrix of order n, a power of two, times x.
static void sylvester(float *x, int64_t n) {
  if (n < ROWS) {
    for (int64_t h = 1; h < n; h *= 2)
      for (int64_t i = 0; i < n; i++)
        if (!(i & h)) {
          const float a = x[i], b = x[i + h];
          x[i] = a + b, x[i + h] = a - b;
        }
    return;
  }
  for (int64_t i = 0; i < n; i += ROWS)
    store_lanes(x + i, butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load_lanes(x + i))))));
  for (int64_t h = ROWS; h < n; h *= 2)
    for (int64_t i = 0; i < n; i += 2 * h)
      for (int64_t j = i; j < i + h; j += ROWS) {
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
      for (int v = 0; v < V; v++) sum[v] += core[i * row + j * step] * load_lanes(x + j * after + v * ROWS);
    for (int v = 0; v < V; v++) store_lanes(out + i * after + v * ROWS, sum[v]);
  }
}

static void multiply_core(const float *core, int64_t order, bool transpose, const float *x, int64_t after, float *out) {
  int64_t c = 0;
  for (; c + 4 * ROWS <= after; c += 4 * ROWS) core_columns<4>(core, order, transpose, x + c, after, out + c);
  for (; c + ROWS <= after; c += ROWS) core_columns<1>(core, order, transpose, x + c, after, out + c);
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
