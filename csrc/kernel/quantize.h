// One tile of 16 rows x one group: scales and offsets by rtn, search or hqq, codes on the stored grid, packed planes.
// The twin of trilobite/quantize/{rtn,search,hqq}.py, which explain the methods. Vectors hold the 16 rows of the tile,
// one row a lane, so that every sum over a group is a plain accumulation; GCC's vector types let each tier compile the
// same lines for its registers.

typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t Bits __attribute__((vector_size(64)));

static inline Lanes all(float x) { return Lanes{} + x; }
static inline Lanes choose(Bits take, Lanes a, Lanes b) { return take ? a : b; }
static inline Lanes at_least(Lanes x, Lanes low) { return x > low ? x : low; }
static inline Lanes at_most(Lanes x, Lanes high) { return x < high ? x : high; }
static inline Lanes magnitude(Lanes x) { return (Lanes)((Bits)x & 0x7fffffff); }

// Nearest integer, ties to even, of |x| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
static inline Lanes nearest(Lanes x) {
  const Lanes big = all(12582912.0f);
  return (x + big) - big;
}

static inline Lanes reciprocal(Lanes x) { return choose(x != all(0), 1.0f / x, all(0)); }

// x^(-0.3) for x > 0, relative error below 1e-5: log2 and exp2 by minimax polynomials.
static inline Lanes power_p_minus_1(Lanes x) {
  Bits exponent = ((Bits)x >> 23) - 127;
  Lanes m = (Lanes)(((Bits)x & 0x007fffff) | 0x3f800000);
  const Bits upper = m > all(1.41421356f);
  m = choose(upper, m * 0.5f, m);
  exponent -= upper;  // true is -1
  const Lanes f = m - 1.0f;
  Lanes p = 0.172095269f * f - 0.269501507f;
  p = p * f + 0.295639217f;
  p = p * f - 0.359351128f;
  p = p * f + 0.480628908f;
  p = p * f - 0.721364021f;
  p = p * f + 1.44269645f;
  const Lanes y = -0.3f * (__builtin_convertvector(exponent, Lanes) + f * p);
  const Lanes whole = nearest(y), r = y - whole;
  Lanes e = 0.00967603736f * r + 0.0559220351f;
  e = e * r + 0.240221068f;
  e = e * r + 0.693121016f;
  e = e * r + 1.0f;
  return (Lanes)((Bits)e + (__builtin_convertvector(whole, Bits) << 23));
}

struct QuantizeLine { Lanes scale, offset; };

struct QuantizeGroup {
  const Lanes *w;       // [columns], one row a lane
  const float *weight;  // [columns] of mean 1, or NULL
  int columns, bits;
  bool symmetric;

  float weight_of(int i) const { return weight ? weight[i] : 1.0f; }
  float least_weight() const {
    float least = 1.0f;
    for (int i = 0; weight && i < columns; i++) least = weight[i] < least ? weight[i] : least;
    return least;
  }

  float top() const { return symmetric ? (float)((1 << (bits - 1)) - 1) : (float)((1 << bits) - 1); }
  float bottom() const { return symmetric ? -(float)(1 << (bits - 1)) : 0.0f; }
};

static inline Lanes nearest_code(const QuantizeGroup &g, Lanes w, const QuantizeLine &line, Lanes inverse) {
  return nearest(at_most(at_least((w - line.offset) * inverse, all(g.bottom())), all(g.top())));
}

static QuantizeLine fit_rtn(const QuantizeGroup &g) {
  Lanes low = g.w[0], high = g.w[0];
  for (int i = 1; i < g.columns; i++) {
    low = at_most(low, g.w[i]);
    high = at_least(high, g.w[i]);
  }
  if (g.symmetric) return {choose(-low >= high, -low, -high) * (1.0f / (float)(1 << (g.bits - 1))), all(0)};
  return {(high - low) / g.top(), low};
}

// One pass: squared error of `line`, columns weighted, and the line that fits the codes it gives best. The spread of
// codes that are not all the same is almost `least` or more.
static inline QuantizeLine refit(const QuantizeGroup &g, const QuantizeLine &line, float least, Lanes *error) {
  const Lanes inverse = reciprocal(line.scale);
  // Codes are counted from the middle, which keeps the sums small.
  const float middle = g.symmetric ? 0.0f : 0.5f * g.top();
  Lanes squares = all(0), q1 = all(0), q2 = all(0), qw = all(0), w1 = all(0);
  for (int i = 0; i < g.columns; i++) {
    const Lanes code = nearest_code(g, g.w[i], line, inverse);
    const Lanes residual = (g.w[i] - line.offset) - code * line.scale;
    const float weight = g.weight_of(i);
    squares += weight * residual * residual;
    const Lanes q = code - middle, weighted = weight * q;
    q1 += weighted;
    q2 += weighted * q;
    qw += weighted * g.w[i];
    w1 += weight * g.w[i];
  }
  *error = squares;
  if (g.symmetric) return {choose(q2 > all(0), qw / at_least(q2, all(1e-30f)), line.scale), all(0)};
  const float n = (float)g.columns;
  const Lanes mean_q = q1 / n, mean_w = w1 / n;
  const Lanes spread = q2 - q1 * mean_q, covariance = qw - q1 * mean_w;
  const Lanes low = all(0.5f * least);
  const Lanes scale = choose(spread > low, covariance / at_least(spread, low), line.scale);
  return {scale, mean_w - scale * (mean_q + middle)};
}

static QuantizeLine fit_search(const QuantizeGroup &g, int steps) {
  static const float shrinks[9][4] = {{}, {}, {1, .85f, .7f, .55f}, {1, .85f, .7f}, {1, .85f}, {}, {}, {}, {1}};
  const int starts = g.bits == 2 ? 4 : g.bits == 3 ? 3 : g.bits == 4 ? 2 : 1;
  const QuantizeLine range = fit_rtn(g);
  QuantizeLine best = range;
  Lanes least = all(__builtin_inff());
  const float least_weight = g.least_weight();
  for (int s = 0; s < starts; s++) {
    QuantizeLine line = range;
    const float factor = shrinks[g.bits][s];
    line.scale = range.scale * factor;
    if (!g.symmetric) {
      const Lanes middle = range.offset + range.scale * (0.5f * g.top());
      line.offset = middle - (middle - range.offset) * factor;
    }
    for (int step = 0; step <= steps; step++) {
      Lanes error;
      const QuantizeLine next = refit(g, line, least_weight, &error);
      const Bits better = error < least;
      least = choose(better, error, least);
      best.scale = choose(better, line.scale, best.scale);
      best.offset = choose(better, line.offset, best.offset);
      line = next;
    }
  }
  return best;
}

constexpr int HQQ_ITERATIONS = 20;  // as in hqq.py, with p = 0.7
constexpr float HQQ_BETA = 10.0f, HQQ_KAPPA = 1.01f;

static QuantizeLine fit_hqq(const QuantizeGroup &g) {
  const QuantizeLine range = fit_rtn(g);
  if (g.symmetric) return range;
  const float n = (float)g.columns;
  Lanes sum = all(0), squares = all(0);
  for (int i = 0; i < g.columns; i++) sum += g.w[i];
  const Lanes mean = sum / n;
  for (int i = 0; i < g.columns; i++) squares += (g.w[i] - mean) * (g.w[i] - mean);
  Lanes sigma;
  for (int lane = 0; lane < ROWS; lane++) sigma[lane] = __builtin_sqrtf(squares[lane] / n);
  sigma = at_least(sigma, all(1e-30f));
  const Lanes normal = 1.0f / sigma, s = at_least(range.scale / sigma, all(1e-30f)), inverse = 1.0f / s;
  // Measured from the lowest weight, where z is 0: far from zero, z would be large and rounding would eat the codes.
  Lanes z = all(0), best = z, least = all(__builtin_inff());
  float beta = HQQ_BETA;
  for (int step = 0; step <= HQQ_ITERATIONS; step++, beta *= HQQ_KAPPA) {
    Lanes loss = all(0), moved = all(0);
    for (int i = 0; i < g.columns; i++) {
      const Lanes w = (g.w[i] - range.offset) * normal;
      const Lanes code = nearest(at_most(at_least(w * inverse + z, all(0)), all(g.top())));
      const Lanes error = w - (code - z) * s;
      const Lanes size = at_least(magnitude(error), all(1e-12f));
      const Lanes power = power_p_minus_1(size);
      loss += size * power;
      const Lanes shrunk = at_least(size - power * (1.0f / beta), all(0));
      const Lanes m = (Lanes)((Bits)shrunk | ((Bits)error & (int32_t)0x80000000));
      moved += code - (w - m) * inverse;
    }
    const Bits better = loss < least;
    least = choose(better, loss, least);
    best = choose(better, z, best);
    z = moved / n;
  }
  return {range.scale, range.offset - best * range.scale};
}

// The grid as stored: fp16, rounded to nearest even.
static inline float through_half(float x, uint16_t *stored) {
  *stored = float_to_half(x);
  return half_to_float(*stored);
}

// 16 x 32 codes, lanes of rows, to `bits` planes of 64 bytes (formats/bitpack.py).
// Eight steps, or four: half a block (3 bits: never).
static void pack_block(const uint8_t (*step)[64], int steps, int bits, uint8_t *planes) {
  for (int i = 0; i < 64; i++) {
    if (bits == 8) {
      for (int s = 0; s < steps; s++) planes[64 * s + i] = step[s][i];
    } else if (bits == 4) {
      for (int p = 0; p < steps / 2; p++) planes[64 * p + i] = (uint8_t)(step[2 * p][i] | step[2 * p + 1][i] << 4);
    } else if (bits == 2) {
      for (int p = 0; p < steps / 4; p++)
        planes[64 * p + i] =
            (uint8_t)(step[4 * p][i] | step[4 * p + 1][i] << 2 | step[4 * p + 2][i] << 4 | step[4 * p + 3][i] << 6);
    } else {
      const uint8_t six = step[6][i], seven = step[7][i];
      planes[i] = (uint8_t)(step[0][i] | step[1][i] << 3 | six << 6);
      planes[64 + i] = (uint8_t)(step[2][i] | step[3][i] << 3 | seven << 6);
      planes[128 + i] = (uint8_t)(step[4][i] | step[5][i] << 3 | (six >> 2) << 6 | (seven >> 2) << 7);
    }
  }
}

// Lanes l of m[i] <-> lane i of m[l]. Four rounds, each swapping blocks of half the size.
static inline void transpose(Lanes m[ROWS]) {
#if defined(__AVX512F__) && !defined(__clang__)  // which has no __builtin_shuffle
#define SWAP_BLOCKS(SIDE)                                                                    \
  {                                                                                          \
    Bits first, second;                                                                      \
    for (int l = 0; l < ROWS; l++)                                                           \
      first[l] = l & SIDE ? ROWS + l - SIDE : l, second[l] = l & SIDE ? ROWS + l : l + SIDE; \
    _Pragma("GCC unroll 16") for (int i = 0; i < ROWS; i++) {                                \
      if (i & SIDE) continue;                                                                \
      const Lanes a = m[i], b = m[i + SIDE];                                                 \
      m[i] = __builtin_shuffle(a, b, first);                                                 \
      m[i + SIDE] = __builtin_shuffle(a, b, second);                                         \
    }                                                                                        \
  }
  SWAP_BLOCKS(1) SWAP_BLOCKS(2) SWAP_BLOCKS(4) SWAP_BLOCKS(8)
#undef SWAP_BLOCKS
#else
  for (int i = 0; i < ROWS; i++)
    for (int l = 0; l < i; l++) {
      const float x = m[i][l];
      m[i][l] = m[l][i];
      m[l][i] = x;
    }
#endif
}

// Rows of the matrix to lanes of columns; rows past the end count as zero. Groups are multiples of 16 columns.
static void load_columns(const QuantizeTile &t, Lanes *columns) {
  for (int i = 0; i < t.group; i += ROWS) {
    Lanes *m = columns + i;
    for (int r = 0; r < ROWS; r++)
      if (r < t.rows) memcpy(&m[r], t.w + r * t.ld + i, sizeof *m);
      else m[r] = all(0);
    transpose(m);
  }
}

// Codes of all columns on the stored grid, and what they leave of the original.
static void round_tile(const QuantizeGroup &g, const QuantizeLine &grid, uint8_t *codes, const QuantizeTile &t) {
  const Lanes inverse = reciprocal(grid.scale);
  const Lanes zero = g.symmetric ? grid.scale * g.bottom() : grid.offset;
  const Lanes top = all((float)((1 << g.bits) - 1));
  for (int i = 0; i < g.columns; i += ROWS) {
    Lanes values[ROWS];
    for (int j = 0; j < ROWS; j++) {
      const Lanes q = nearest(at_most(at_least((g.w[i + j] - zero) * inverse, all(0)), top));
      values[j] = q * grid.scale + zero;
      if (!codes) continue;
      const Bits whole = __builtin_convertvector(q, Bits);
      uint8_t *at = codes + ((i + j) / 4) * 64 + j % 4;
      for (int r = 0; r < ROWS; r++) at[4 * r] = (uint8_t)whole[r];
    }
    if (!t.values) continue;
    transpose(values);
    for (int r = 0; r < t.rows; r++) {
      Lanes original = all(0);
      if (t.original) memcpy(&original, t.original + r * t.ld + i, sizeof original);
      const Lanes left = t.original ? original - values[r] : values[r];
      memcpy(t.values + r * t.ld + i, &left, sizeof left);
    }
  }
}

static void quantize_tile(const QuantizeTile &t) {
  Lanes *columns = (Lanes *)t.scratch;
  load_columns(t, columns);
  const QuantizeGroup g{columns, t.weight, t.group, t.bits, t.symmetric};
  QuantizeLine line;
  if (t.method == QUANTIZE_SEARCH) line = fit_search(g, t.steps);
  else if (t.method == QUANTIZE_HQQ) line = fit_hqq(g);
  else line = fit_rtn(g);
  QuantizeLine grid = line;
  uint16_t scales[ROWS] = {}, offsets[ROWS] = {};
  for (int r = 0; r < ROWS; r++) {
    if (r >= t.rows) break;
    grid.scale[r] = through_half(line.scale[r], &scales[r]);
    grid.offset[r] = through_half(line.offset[r], &offsets[r]);
    t.scale[r * t.line_ld] = line.scale[r];
    if (!t.symmetric) t.offset[r * t.line_ld] = line.offset[r];
  }
  uint8_t *codes = t.packed ? (uint8_t *)(columns + t.group) : nullptr;
  round_tile(g, grid, codes, t);
  if (!t.packed) return;
  for (int r = t.rows; r < ROWS; r++)  // padding rows are zero codes
    for (int i = 0; i < t.group; i++) codes[(i / 4) * 64 + 4 * r + i % 4] = 0;
  const int width = t.group < BLOCK ? HALF : BLOCK;
  for (int at = 0; at < t.group; at += width)
    pack_block((const uint8_t (*)[64])(codes + at * ROWS), width / 4, t.bits, t.packed + (int64_t)at * t.bits * 2);
  uint8_t *meta = t.packed + (int64_t)t.group * t.bits * 2;
  memcpy(meta, scales, sizeof scales);
  if (!t.symmetric) memcpy(meta + sizeof scales, offsets, sizeof offsets);
}
