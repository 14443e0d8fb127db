// One token of layers that keep a state of a fixed size: short convolutions, linear attention by the delta rule, and
// state spaces. What they keep of a head is read and written once; all sums are fp32.

// Channels [first, first + count) of a convolution.
static void convolve(const trilobite_convolution_args &a, int64_t first, int64_t count) {
  constexpr int64_t BLOCK = 64;
  const int dtype = (int)a.dtype;
  const int64_t taps = a.taps, size = step_bytes(dtype);
  float inputs[BLOCK * MOST_TAPS], w[BLOCK * MOST_TAPS], x[BLOCK], y[BLOCK];
  for (int64_t c = first; c < first + count; c += BLOCK) {
    const int64_t n = first + count - c < BLOCK ? first + count - c : BLOCK;
    load_floats(a.state, dtype, c * taps, n * taps, inputs);
    load_floats(a.w, dtype, c * taps, n * taps, w);
    load_floats(a.x, dtype, c, n, x);
    memmove(inputs, inputs + 1, (n * taps - 1) * sizeof(float));
    for (int64_t i = 0; i < n; i++) inputs[(i + 1) * taps - 1] = x[i], y[i] = 0;
    for (int64_t j = 0; j < taps; j++)
      for (int64_t i = 0; i < n; i++) y[i] += w[i * taps + j] * inputs[i * taps + j];
    if (a.bias) {
      load_floats(a.bias, dtype, c, n, x);
      for (int64_t i = 0; i < n; i++) y[i] += x[i];
    }
    uint8_t *out = (uint8_t *)a.y + c * size;
    store_floats(y, n, out, dtype);
    if (a.silu) {
      load_floats(out, dtype, 0, n, y);
      for (int64_t i = 0; i < n; i++) y[i] = y[i] / (1.0f + torch_exp(-y[i]));
      store_floats(y, n, out, dtype);
    }
    store_floats(inputs, n * taps, (uint8_t *)a.state + c * taps * size, dtype);
  }
}

// A key or a query: `scale` times x, or times x / |x|.
static void load_direction(const trilobite_delta_args &a, const void *x, int64_t head, float scale, float *out) {
  load_floats(x, (int)a.dtype, head * a.width, a.width, out);
  if (a.normed) {
    float sum = 0;
    for (int64_t i = 0; i < a.width; i++) sum += out[i] * out[i];
    scale /= sqrtf(sum + 1e-6f);
  }
  for (int64_t i = 0; i < a.width; i++) out[i] *= scale;
}

// C * 16 columns of a head's state, twice: what it says of the key, and with what is put in its place what it says of the
// query. y: the value, then the result.
template <int C>
static inline void delta_columns(const float *decay, const float *q, const float *k, float beta, int64_t width,
                                 int64_t ld, float *state, float *y) {
  Isa::Floats sum[C], change[C];
  UNROLL for (int c = 0; c < C; c++) sum[c] = Isa::set1(0);
  for (int64_t i = 0; i < width; i++) {
    const Isa::Floats key = Isa::set1(k[i] * decay[i]);
    UNROLL for (int c = 0; c < C; c++) sum[c] = Isa::fma(Isa::load(state + i * ld + c * ROWS), key, sum[c]);
  }
  const Isa::Floats minus = Isa::set1(-beta), plus = Isa::set1(beta);
  UNROLL for (int c = 0; c < C; c++) {
    change[c] = Isa::fma(Isa::load(y + c * ROWS), plus, Isa::mul(sum[c], minus));
    sum[c] = Isa::set1(0);
  }
  for (int64_t i = 0; i < width; i++) {
    const Isa::Floats key = Isa::set1(k[i]), query = Isa::set1(q[i]), keep = Isa::set1(decay[i]);
    UNROLL for (int c = 0; c < C; c++) {
      float *at = state + i * ld + c * ROWS;
      const Isa::Floats now = Isa::fma(key, change[c], Isa::mul(Isa::load(at), keep));
      Isa::store(at, now);
      sum[c] = Isa::fma(now, query, sum[c]);
    }
  }
  UNROLL for (int c = 0; c < C; c++) Isa::store(y + c * ROWS, sum[c]);
}

// One head of the delta rule. scratch: 3 * width + value_width floats.
static void delta(const trilobite_delta_args &a, int64_t head, float *scratch) {
  const int64_t width = a.width, columns = a.value_width, key = head / (a.heads / a.key_heads);
  float *q = scratch, *k = q + width, *decay = k + width, *y = decay + width;
  load_direction(a, a.q, key, 1.0f / sqrtf((float)width), q);
  load_direction(a, a.k, key, 1, k);
  for (int64_t i = 0; i < width; i++) decay[i] = torch_exp(a.decay[a.wide_decay ? head * width + i : head]);
  load_floats(a.v, (int)a.dtype, head * columns, columns, y);
  float *state = a.state + head * width * columns;
  constexpr int C = Isa::LANES == 16 ? 8 : 2;
  int64_t c = 0;
  for (; c + C * ROWS <= columns; c += C * ROWS)
    delta_columns<C>(decay, q, k, a.beta[head], width, columns, state + c, y + c);
  for (; c < columns; c += ROWS) delta_columns<1>(decay, q, k, a.beta[head], width, columns, state + c, y + c);
  store_floats(y, columns, (uint8_t *)a.y + head * columns * step_bytes(a.dtype), (int)a.dtype);
}

// One head of a state space. scratch: 2 * (size + width) floats.
static void scan(const trilobite_scan_args &a, int64_t head, float *scratch) {
  const int64_t size = a.size, width = a.width, group = head / (a.heads / a.groups);
  const float step = a.step[head], keep = torch_exp(step * a.decay[head]), skip = a.skip ? a.skip[head] : 0;
  float *b = scratch, *c = b + size, *x = c + size, *y = x + width;
  load_floats(a.b, (int)a.dtype, group * size, size, b);
  load_floats(a.c, (int)a.dtype, group * size, size, c);
  load_floats(a.x, (int)a.dtype, head * width, width, x);
  const Isa::Floats old = Isa::set1(keep);
  for (int64_t p = 0; p < width; p++) {
    float *state = a.state + (head * width + p) * size;
    const Isa::Floats put = Isa::set1(step * x[p]);
    Isa::Floats sum = Isa::set1(0);
    for (int64_t i = 0; i < size; i += ROWS) {
      const Isa::Floats now = Isa::fma(Isa::load(b + i), put, Isa::mul(Isa::load(state + i), old));
      Isa::store(state + i, now);
      sum = Isa::fma(now, Isa::load(c + i), sum);
    }
    y[p] = total(sum) + skip * x[p];
  }
  store_floats(y, width, (uint8_t *)a.y + head * width * step_bytes(a.dtype), (int)a.dtype);
}
