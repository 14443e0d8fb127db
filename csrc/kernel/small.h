// The small operators of a decoding step, with the bits of torch's: every operator rounds its result to its element type.

constexpr int64_t STEP_BLOCK = 512;  // elements in fp32 at a time

static inline int64_t step_bytes(int64_t dtype) { return dtype == TRILOBITE_F32 ? 4 : dtype == TRILOBITE_BOOL ? 1 : 2; }

static inline void load_some(const trilobite_operand &o, const uint8_t *at, int64_t count, float *out) {
  const int64_t stride = o.stride[TRILOBITE_DIMENSIONS - 1];
  if (o.dtype == TRILOBITE_BOOL) {
    for (int64_t i = 0; i < count; i++) out[i] = at[i * stride] != 0;
    return;
  }
  if (stride == 1) return load_floats(at, (int)o.dtype, 0, count, out);
  const float first = element(at, (int)o.dtype, 0);
  for (int64_t i = 0; i < count; i++) out[i] = stride == 0 ? first : element(at, (int)o.dtype, i * stride);
}

static void store_some(const trilobite_operand &o, uint8_t *at, int64_t count, const float *x) {
  const int64_t stride = o.stride[TRILOBITE_DIMENSIONS - 1], size = step_bytes(o.dtype);
  if (o.dtype == TRILOBITE_BOOL) {
    for (int64_t i = 0; i < count; i++) at[i * stride] = x[i] != 0;
    return;
  }
  if (stride == 1) return store_floats(x, count, at, (int)o.dtype);
  for (int64_t i = 0; i < count; i++) store_floats(x + i, 1, at + i * stride * size, (int)o.dtype);
}

static inline float two_to(int32_t n) {
  const int32_t bits = (n + 127) << 23;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// e^x as torch's vectors have it (Sleef's expf within 1 ulp): x = q ln 2 + s, ln 2 in two parts, a polynomial of degree 7
// with fused operations, then 2^q in two factors.
static inline float torch_exp(float x) {
  const float q = __builtin_rintf(x * 1.44269504088896340736f);
  const float s = __builtin_fmaf(q, -1.428606765330187045e-06f, __builtin_fmaf(q, -0.693145751953125f, x));
  float u = __builtin_fmaf(0.000198527617612853646f, s, 0.00139304355252534151f);
  u = __builtin_fmaf(u, s, 0.00833336077630519867f);
  u = __builtin_fmaf(u, s, 0.0416664853692054749f);
  u = __builtin_fmaf(u, s, 0.166666671633720398f);
  u = __builtin_fmaf(u, s, 0.5f);
  u = 1.0f + __builtin_fmaf(s * s, u, s);
  const int32_t whole = (int32_t)(q > -200.0f ? q < 200.0f ? q : 200.0f : -200.0f), half = whole >> 1;
  u = u * two_to(half) * two_to(whole - half);
  return x < -104.0f ? 0.0f : x > 100.0f ? INFINITY : u;
}

// a = a op b. One operation each, so nothing is contracted to a fused one.
static inline void operate(int64_t kind, int64_t count, float *a, const float *b, float number) {
  switch (kind) {
    case TRILOBITE_ADD:
      for (int64_t i = 0; i < count; i++) a[i] = a[i] + b[i];
      break;
    case TRILOBITE_SUBTRACT:
      for (int64_t i = 0; i < count; i++) a[i] = a[i] - b[i];
      break;
    case TRILOBITE_MULTIPLY:
      for (int64_t i = 0; i < count; i++) a[i] = a[i] * b[i];
      break;
    case TRILOBITE_DIVIDE:
      for (int64_t i = 0; i < count; i++) a[i] = a[i] / b[i];
      break;
    case TRILOBITE_NEGATE:
      for (int64_t i = 0; i < count; i++) a[i] = -a[i];
      break;
    case TRILOBITE_SQUARE:
      for (int64_t i = 0; i < count; i++) a[i] = a[i] * a[i];
      break;
    case TRILOBITE_RSQRT:
      for (int64_t i = 0; i < count; i++) a[i] = 1.0f / sqrtf(a[i]);
      break;
    case TRILOBITE_SWISH:
      for (int64_t i = 0; i < count; i++) a[i] = a[i] / (1.0f + torch_exp(-a[i]));
      break;
    case TRILOBITE_LOGISTIC:
      for (int64_t i = 0; i < count; i++) a[i] = 1.0f / (1.0f + torch_exp(-a[i]));
      break;
    case TRILOBITE_FILL:
      for (int64_t i = 0; i < count; i++) a[i] = b[i] != 0 ? number : a[i];
      break;
    default: break;  // a copy
  }
}

// The row of an operand at indices `at` of the outer dimensions.
static inline uint8_t *row_of(const trilobite_operand &o, const int64_t *at) {
  int64_t offset = 0;
  for (int d = 0; d + 1 < TRILOBITE_DIMENSIONS; d++) offset += at[d] * o.stride[d];
  return (uint8_t *)o.data + offset * step_bytes(o.dtype);
}

// Row by row; where every row is dense, and all rows are in all operands, those are one.
static void map_elements(const trilobite_step_node &n) {
  const int64_t *shape = n.shape, width = shape[TRILOBITE_DIMENSIONS - 1];
  float a[STEP_BLOCK], b[STEP_BLOCK];
  for (int64_t i = 0; n.b.data == nullptr && i < STEP_BLOCK; i++) b[i] = n.number;
  int64_t at[TRILOBITE_DIMENSIONS - 1];
  for (at[0] = 0; at[0] < shape[0]; at[0]++)
    for (at[1] = 0; at[1] < shape[1]; at[1]++)
      for (at[2] = 0; at[2] < shape[2]; at[2]++) {
        const uint8_t *x = row_of(n.a, at), *y = n.b.data ? row_of(n.b, at) : nullptr;
        uint8_t *out = row_of(n.out, at);
        for (int64_t i = 0; i < width; i += STEP_BLOCK) {
          const int64_t count = width - i < STEP_BLOCK ? width - i : STEP_BLOCK;
          const auto place = [&](const trilobite_operand &o) {
            return i * o.stride[TRILOBITE_DIMENSIONS - 1] * step_bytes(o.dtype);
          };
          load_some(n.a, x + place(n.a), count, a);
          if (y) load_some(n.b, y + place(n.b), count, b);
          operate(n.kind, count, a, b, n.number);
          store_some(n.out, out + place(n.out), count, a);
        }
      }
}

// Sums of a row as torch adds them up: vectors of LANES values, four of them side by side, each in a cascade of four levels
// (aten/src/ATen/native/cpu/SumKernel.cpp), then what is left of the row, then the lanes.
template <int LANES> static float cascade_sum(const float *x, int64_t count) {
  constexpr int SIDE = 4, LEVELS = 4;
  const int64_t vectors = count / LANES, size = vectors / SIDE;
  int64_t log = 0;
  while ((int64_t)1 << log < size) log++;
  const int64_t power = log / LEVELS > 4 ? log / LEVELS : 4, step = (int64_t)1 << power, mask = step - 1;
  float acc[LEVELS][SIDE][LANES] = {};
  const auto add = [&](int64_t i) {
    for (int k = 0; k < SIDE; k++)
      for (int l = 0; l < LANES; l++) acc[0][k][l] += x[(i * SIDE + k) * LANES + l];
  };
  int64_t i = 0;
  while (i + step <= size) {
    for (int64_t j = 0; j < step; j++, i++) add(i);
    for (int level = 1; level < LEVELS; level++) {
      for (int k = 0; k < SIDE; k++)
        for (int l = 0; l < LANES; l++) acc[level][k][l] += acc[level - 1][k][l], acc[level - 1][k][l] = 0;
      if (i & (mask << (level * power))) break;
    }
  }
  for (; i < size; i++) add(i);
  for (int level = 1; level < LEVELS; level++)
    for (int k = 0; k < SIDE; k++)
      for (int l = 0; l < LANES; l++) acc[0][k][l] += acc[level][k][l];
  for (int64_t v = size * SIDE; v < vectors; v++)
    for (int l = 0; l < LANES; l++) acc[0][0][l] += x[v * LANES + l];
  for (int k = 1; k < SIDE; k++)
    for (int l = 0; l < LANES; l++) acc[0][0][l] += acc[0][k][l];
  if (LANES == 1) return acc[0][0][0];
  float sum = 0;
  for (int64_t j = vectors * LANES; j < count; j++) sum += x[j];
  for (int l = 0; l < LANES; l++) sum += acc[0][0][l];
  return sum;
}

// Values as torch's vectors of LANES reduce them: lane by lane, then the lanes in halves; a row shorter than a vector one
// value after the other.
template <int LANES> static float lanes_sum(const float *x, int64_t count) {
  float acc[LANES] = {};
  if (count < LANES) {
    for (int64_t i = 0; i < count; i++) acc[0] = i ? acc[0] + x[i] : x[0];
    return acc[0];
  }
  for (int l = 0; l < LANES; l++) acc[l] = x[l];
  int64_t i = LANES;
  for (; i + LANES <= count; i += LANES)
    for (int l = 0; l < LANES; l++) acc[l] += x[i + l];
  for (int l = 0; i + l < count; l++) acc[l] += x[i + l];
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int l = 0; l < half; l++) acc[l] += acc[l + half];
  return acc[0];
}

// Rows of fewer bits that are shorter than torch's vectors: value by value, e^x of the system's library.
static void softmax_short(const trilobite_step_node &n, int64_t rows, int64_t width) {
  float x[SHORT_ROW];
  for (int64_t r = 0; r < rows; r++) {
    load_floats((const uint8_t *)n.a.data + 2 * r * width, (int)n.a.dtype, 0, width, x);
    float top = x[0], sum = 0;
    for (int64_t i = 1; i < width; i++) top = x[i] > top ? x[i] : top;
    for (int64_t i = 0; i < width; i++) x[i] = expf(x[i] - top), sum += x[i];
    const float share = 1.0f / sum;
    for (int64_t i = 0; i < width; i++) x[i] *= share;
    store_floats(x, width, (uint8_t *)n.out.data + 2 * r * width, (int)n.out.dtype);
  }
}

// out [rows, width] = softmax of the dense rows of a.
static void softmax_rows(const trilobite_step_node &n) {
  const int64_t rows = n.shape[2], width = n.shape[3];
  if (n.a.dtype != TRILOBITE_F32) return softmax_short(n, rows, width);
  for (int64_t r = 0; r < rows; r++) {
    const float *x = (const float *)n.a.data + r * width;
    float *out = (float *)n.out.data + r * width, top = x[0];
    for (int64_t i = 1; i < width; i++) top = x[i] > top ? x[i] : top;
    for (int64_t i = 0; i < width; i++) out[i] = torch_exp(x[i] - top);
    const float sum = n.lanes == 16  ? lanes_sum<16>(out, width)
                      : n.lanes == 8 ? lanes_sum<8>(out, width)
                                     : lanes_sum<4>(out, width);
    const float share = 1.0f / sum;
    for (int64_t i = 0; i < width; i++) out[i] *= share;
  }
}

// out [rows] = sums of the dense rows of a [rows, width], fp32, divided by `number`. Rows shorter than a vector of `lanes`
// values are added up value by value.
static void sum_rows(const trilobite_step_node &n) {
  const int64_t rows = n.shape[2], width = n.shape[3];
  for (int64_t r = 0; r < rows; r++) {
    const float *x = (const float *)n.a.data + r * n.a.stride[2];
    const int64_t lanes = width < n.lanes ? 1 : n.lanes;
    const float sum = lanes == 16  ? cascade_sum<16>(x, width)
                      : lanes == 8 ? cascade_sum<8>(x, width)
                      : lanes == 4 ? cascade_sum<4>(x, width)
                                   : cascade_sum<1>(x, width);
    ((float *)n.out.data)[r * n.out.stride[2]] = sum / n.number;
  }
}
