// Layers that keep a state of a fixed size: a token of short convolutions, tokens one after the other of linear attention
// by the delta rule and of state spaces. For one token what they keep of a head is read and written once; sums are fp32.

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
static void load_direction(const trilobite_delta_args &a, const void *x, int64_t row, float scale, float *out) {
  load_floats(x, (int)a.dtype, row * a.width, a.width, out);
  if (a.normed) {
    float sum = 0;
    for (int64_t i = 0; i < a.width; i++) sum += out[i] * out[i];
    scale /= sqrtf(sum + 1e-6f);
  }
  for (int64_t i = 0; i < a.width; i++) out[i] *= scale;
}

// What some tokens do to one head: q, k and decay [count, width], beta [count], y [count, columns], values, then results.
struct HeadTokens {
  float *q, *k, *decay, *y, *beta;
  int64_t width, columns;
};

// Token t of C * 16 columns of a head's state, twice: what it says of the key, and with what is put in its place what it
// says of the query.
template <int C> static inline void delta_columns(const HeadTokens &h, int64_t t, float *state, float *y) {
  const float *q = h.q + t * h.width, *k = h.k + t * h.width, *decay = h.decay + t * h.width;
  const Isa::Floats minus = Isa::set1(-h.beta[t]), plus = Isa::set1(h.beta[t]);
  Isa::Floats sum[C], change[C];
  UNROLL for (int c = 0; c < C; c++) sum[c] = Isa::set1(0);
  for (int64_t i = 0; i < h.width; i++) {
    const Isa::Floats key = Isa::set1(k[i] * decay[i]);
    UNROLL for (int c = 0; c < C; c++) sum[c] = Isa::fma(Isa::load(state + i * h.columns + c * ROWS), key, sum[c]);
  }
  UNROLL for (int c = 0; c < C; c++) {
    change[c] = Isa::fma(Isa::load(y + c * ROWS), plus, Isa::mul(sum[c], minus));
    sum[c] = Isa::set1(0);
  }
  for (int64_t i = 0; i < h.width; i++) {
    const Isa::Floats key = Isa::set1(k[i]), query = Isa::set1(q[i]), keep = Isa::set1(decay[i]);
    UNROLL for (int c = 0; c < C; c++) {
      float *at = state + i * h.columns + c * ROWS;
      const Isa::Floats now = Isa::fma(key, change[c], Isa::mul(Isa::load(at), keep));
      Isa::store(at, now);
      sum[c] = Isa::fma(now, query, sum[c]);
    }
  }
  UNROLL for (int c = 0; c < C; c++) Isa::store(y + c * ROWS, sum[c]);
}

// All of some tokens for columns from `from` on, C * 16 of them at a time -> the first column that is left.
template <int C> static int64_t delta_tokens(const HeadTokens &h, int64_t count, int64_t from, float *state) {
  for (; from + C * ROWS <= h.columns; from += C * ROWS)
    for (int64_t t = 0; t < count; t++) delta_columns<C>(h, t, state + from, h.y + t * h.columns + from);
  return from;
}

// One head of the delta rule. scratch: STATE_TOKENS * (3 * width + value_width + 1) floats. One token reads whole rows of
// the state from memory; of more, each meets columns that stay in the first-level cache. The sums are the same.
static void delta(const trilobite_delta_args &a, int64_t head, float *scratch) {
  const int64_t width = a.width, columns = a.value_width, key = head / (a.heads / a.key_heads);
  const int64_t size = STATE_TOKENS * width;
  const HeadTokens h{
      scratch, scratch + size, scratch + 2 * size, scratch + 3 * size, scratch + 3 * size + STATE_TOKENS * columns,
      width,   columns};
  float *state = a.state + head * width * columns;
  for (int64_t first = 0; first < a.tokens; first += STATE_TOKENS) {
    const int64_t count = a.tokens - first < STATE_TOKENS ? a.tokens - first : STATE_TOKENS;
    for (int64_t t = 0; t < count; t++) {
      const int64_t of_key = (first + t) * a.key_heads + key, of_head = (first + t) * a.heads + head;
      load_direction(a, a.q, of_key, 1.0f / sqrtf((float)width), h.q + t * width);
      load_direction(a, a.k, of_key, 1, h.k + t * width);
      for (int64_t i = 0; i < width; i++)
        h.decay[t * width + i] = torch_exp(a.decay[a.wide_decay ? of_head * width + i : of_head]);
      load_floats(a.v, (int)a.dtype, of_head * columns, columns, h.y + t * columns);
      h.beta[t] = a.beta[of_head];
    }
    constexpr int WIDE = Isa::LANES == 16 ? 8 : 2;
    const int64_t done = count == 1 ? delta_tokens<WIDE>(h, 1, 0, state) : delta_tokens<2>(h, count, 0, state);
    delta_tokens<1>(h, count, done, state);
    for (int64_t t = 0; t < count; t++)
      store_floats(h.y + t * columns, columns,
                   (uint8_t *)a.y + ((first + t) * a.heads + head) * columns * step_bytes(a.dtype), (int)a.dtype);
  }
}

// One head of a state space. scratch: 2 * (size + width) floats.
static void scan(const trilobite_scan_args &a, int64_t head, float *scratch) {
  const int64_t size = a.size, width = a.width, group = head / (a.heads / a.groups);
  const float skip = a.skip ? a.skip[head] : 0;
  float *b = scratch, *c = b + size, *x = c + size, *y = x + width;
  for (int64_t t = 0; t < a.tokens; t++) {
    const int64_t of_group = t * a.groups + group, of_head = t * a.heads + head;
    const float step = a.step[of_head];
    load_floats(a.b, (int)a.dtype, of_group * size, size, b);
    load_floats(a.c, (int)a.dtype, of_group * size, size, c);
    load_floats(a.x, (int)a.dtype, of_head * width, width, x);
    const Isa::Floats keep = Isa::set1(torch_exp(step * a.decay[head]));
    for (int64_t p = 0; p < width; p++) {
      float *state = a.state + (head * width + p) * size;
      const Isa::Floats put = Isa::set1(step * x[p]);
      Isa::Floats sum = Isa::set1(0);
      for (int64_t i = 0; i < size; i += ROWS) {
        const Isa::Floats now = Isa::fma(Isa::load(b + i), put, Isa::mul(Isa::load(state + i), keep));
        Isa::store(state + i, now);
        sum = Isa::fma(now, Isa::load(c + i), sum);
      }
      y[p] = total(sum) + skip * x[p];
    }
    store_floats(y, width, (uint8_t *)a.y + of_head * width * step_bytes(a.dtype), (int)a.dtype);
  }
}
