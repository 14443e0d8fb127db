// One tile of 16 rows x one group: scales and offsets by rtn, search or hqq, codes on the stored grid, packed planes.
// The twin of trilobite/quantize/{rtn,search,hqq}.py, which explain the methods. A vector holds as many rows of the tile
// as a register has lanes, one row a lane, so that every sum over a group is a plain accumulation; GCC's vector types let
// each tier compile the same lines for its registers.

constexpr int LANES = Isa::LANES;
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Bits __attribute__((vector_size(4 * LANES)));

static inline Lanes all(float x) { return Lanes{} + x; }
static inline Lanes choose(Bits take, Lanes a, Lanes b) { return take ? a : b; }
static inline Lanes at_least(Lanes x, Lanes low) { return x > low ? x : low; }
static inline Lanes at_most(Lanes x, Lanes high) { return x < high ? x : high; }
static inline Lanes magnitude(Lanes x) { return (Lanes)((Bits)x & 0x7fffffff); }

// Nearest integer, ties to even, of |x| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
constexpr float BIG = 12582912.0f;
static inline Lanes nearest(Lanes x) { return (x + BIG) - BIG; }

// That in [low, high], of any x. Bits of what is above zero are in the order of its values, and whole numbers are compared
// where nothing else waits to be done.
static inline Lanes nearest_in(Lanes x, float low, float high) {
  const Bits least = (Bits)all(BIG + low), most = (Bits)all(BIG + high);
  Bits y = (Bits)(x + BIG);
  y = y > least ? y : least;
  y = y < most ? y : most;
  return (Lanes)y - BIG;
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

static QuantizeLine fit_rtn(const QuantizeGroup &g) {
  Lanes low = g.w[0], high = g.w[0];
  for (int i = 1; i < g.columns; i++) {
    low = at_most(low, g.w[i]);
    high = at_least(high, g.w[i]);
  }
  if (g.symmetric) return {choose(-low >= high, -low, -high) * (1.0f / (float)(1 << (g.bits - 1))), all(0)};
  return {(high - low) / g.top(), low};
}

// The searches count codes from the middle one, as symmetric formats do, which keeps the sums small.
static inline Lanes middle_code(const QuantizeGroup &g, Lanes w, const QuantizeLine &line, Lanes inverse) {
  const float half = (float)(1 << (g.bits - 1));
  return nearest_in((w - line.offset) * inverse, -half, half - 1);
}

// The line that fits the codes best which `line` gives, columns weighted, and whose error therefore is no greater.
// mean: of the weights; the spread of codes that are not all the same is almost `least` or more.
template <bool WEIGHTED>
static inline QuantizeLine refit(const QuantizeGroup &g, const QuantizeLine &line, Lanes mean, float least) {
  const Lanes inverse = reciprocal(line.scale);
  Lanes q1[2] = {}, q2[2] = {}, qw[2] = {};  // sums of every other column, which need not wait for each other
  for (int i = 0; i < g.columns; i += 2)
    for (int j = 0; j < 2; j++) {
      const Lanes w = g.w[i + j], q = middle_code(g, w, line, inverse), weighted = WEIGHTED ? g.weight[i + j] * q : q;
      q1[j] += weighted;
      q2[j] += weighted * q;
      qw[j] += weighted * w;
    }
  const Lanes along = qw[0] + qw[1], square = q2[0] + q2[1];
  if (g.symmetric) return {choose(square > all(0), along / at_least(square, all(1e-30f)), line.scale), all(0)};
  const Lanes sum = q1[0] + q1[1], mean_q = sum * (1.0f / (float)g.columns);
  const Lanes spread = square - sum * mean_q, low = all(0.5f * least);
  const Lanes scale = choose(spread > low, (along - sum * mean) / at_least(spread, low), line.scale);
  return {scale, mean - scale * mean_q};
}

template <bool WEIGHTED> static inline Lanes squared_error(const QuantizeGroup &g, const QuantizeLine &line) {
  const Lanes inverse = reciprocal(line.scale);
  Lanes squares[2] = {};
  for (int i = 0; i < g.columns; i += 2)
    for (int j = 0; j < 2; j++) {
      const Lanes w = g.w[i + j], left = (w - line.offset) - middle_code(g, w, line, inverse) * line.scale;
      squares[j] += (WEIGHTED ? g.weight[i + j] * left : left) * left;
    }
  return squares[0] + squares[1];
}

constexpr int MOST_STARTS = 4;

// Where a search begins: with the range of the group, shrunk, or with the line that is given.
static inline int begin(const QuantizeGroup &g, const QuantizeLine *given, float half, QuantizeLine line[MOST_STARTS]) {
  static const float shrinks[9][MOST_STARTS] = {{}, {}, {1, .85f, .7f, .55f}, {1, .85f, .7f}, {1, .85f}, {}, {},
                                                {}, {1}};
  if (given) {
    line[0] = *given;
    if (!g.symmetric) line[0].offset += half * given->scale;
    return 1;
  }
  const int starts = g.bits == 2 ? 4 : g.bits == 3 ? 3 : g.bits == 4 ? 2 : 1;
  const QuantizeLine range = fit_rtn(g);
  const Lanes middle = g.symmetric ? all(0) : range.offset + range.scale * (0.5f * g.top());
  for (int s = 0; s < starts; s++) {
    line[s].scale = range.scale * shrinks[g.bits][s];
    line[s].offset = g.symmetric ? all(0) : middle + line[s].scale * 0.5f;
  }
  return starts;
}

template <bool WEIGHTED>
static QuantizeLine best_line(const QuantizeGroup &g, int steps, const QuantizeLine *given) {
  const float half = (float)(1 << (g.bits - 1)), least_weight = g.least_weight();
  QuantizeLine line[MOST_STARTS];
  const int starts = begin(g, given, half, line);
  Lanes sums[4] = {};
  for (int i = 0; i < g.columns; i += 4)
    for (int j = 0; j < 4; j++) sums[j] += WEIGHTED ? g.weight[i + j] * g.w[i + j] : g.w[i + j];
  const Lanes mean = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * (1.0f / (float)g.columns);
  for (int step = 0; step < steps; step++)  // one start does not wait for the last sums of another
    for (int s = 0; s < starts; s++) line[s] = refit<WEIGHTED>(g, line[s], mean, least_weight);
  QuantizeLine best = line[0];
  Lanes least = starts > 1 ? squared_error<WEIGHTED>(g, best) : all(0);
  for (int s = 1; s < starts; s++) {
    const Lanes error = squared_error<WEIGHTED>(g, line[s]);
    const Bits better = error < least;
    least = choose(better, error, least);
    best.scale = choose(better, line[s].scale, best.scale);
    best.offset = choose(better, line[s].offset, best.offset);
  }
  if (!g.symmetric) best.offset -= half * best.scale;
  return best;
}

static QuantizeLine fit_search(const QuantizeGroup &g, int steps, const QuantizeLine *given = nullptr) {
  return g.weight ? best_line<true>(g, steps, given) : best_line<false>(g, steps, given);
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
  for (int lane = 0; lane < LANES; lane++) sigma[lane] = __builtin_sqrtf(squares[lane] / n);
  sigma = at_least(sigma, all(1e-30f));
  const Lanes normal = 1.0f / sigma, s = at_least(range.scale / sigma, all(1e-30f)), inverse = 1.0f / s;
  // Measured from the lowest weight, where z is 0: far from zero, z would be large and rounding would eat the codes.
  Lanes z = all(0), best = z, least = all(__builtin_inff());
  float beta = HQQ_BETA;
  for (int step = 0; step <= HQQ_ITERATIONS; step++, beta *= HQQ_KAPPA) {
    Lanes loss = all(0), moved = all(0);
    for (int i = 0; i < g.columns; i++) {
      const Lanes w = (g.w[i] - range.offset) * normal;
      const Lanes code = nearest_in(w * inverse + z, 0, g.top());
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

// As stored: fp16, rounded to nearest even.
static inline Lanes through_half(Lanes x, uint16_t stored[LANES]) {
  float lanes[LANES];
  memcpy(lanes, &x, sizeof x);
  for (int r = 0; r < LANES; r++) {
    stored[r] = float_to_half(lanes[r]);
    lanes[r] = half_to_float(stored[r]);
  }
  memcpy(&x, lanes, sizeof x);
  return x;
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

// Lanes `at` of a and b, which follow each other.
static inline Lanes pick(Lanes a, Lanes b, Bits at) {
#ifdef __clang__
  Lanes picked;
  for (int l = 0; l < LANES; l++) picked[l] = at[l] < LANES ? a[at[l]] : b[at[l] - LANES];
  return picked;
#else
  return __builtin_shuffle(a, b, at);
#endif
}

// Swaps blocks of SIDE x SIDE, then those of half the size: lane l of m[i] <-> lane i of m[l].
template <int SIDE> static inline void swap_blocks(Lanes m[LANES]) {
  Bits first, second;
  for (int l = 0; l < LANES; l++)
    first[l] = l & SIDE ? LANES + l - SIDE : l, second[l] = l & SIDE ? LANES + l : l + SIDE;
  _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) {
    if (i & SIDE) continue;
    const Lanes a = m[i], b = m[i + SIDE];
    m[i] = pick(a, b, first);
    m[i + SIDE] = pick(a, b, second);
  }
  if constexpr (SIDE > 1) swap_blocks<SIDE / 2>(m);
}

static inline void transpose(Lanes m[LANES]) { swap_blocks<LANES / 2>(m); }

// The part of a tile that vectors hold: LANES of its rows, or those which there are.
static inline QuantizeTile rows_of(const QuantizeTile &t, int first) {
  QuantizeTile part = t;
  part.w += first * t.ld;
  part.scale += first * t.line_ld;
  if (t.offset) part.offset += first * t.line_ld;
  if (t.original) part.original += first * t.ld;
  if (t.values) part.values += first * t.ld;
  part.rows = t.rows - first < 0 ? 0 : t.rows - first < LANES ? t.rows - first : LANES;
  return part;
}

// Rows of the matrix to lanes of columns. Rows past the end are zeros, whose scales and codes are zeros.
static void load_columns(const QuantizeTile &t, int count, Lanes *columns) {
  for (int i = 0; i < count; i += LANES) {
    Lanes m[LANES];
    for (int r = 0; r < LANES; r++)
      if (r < t.rows) memcpy(&m[r], t.w + r * t.ld + i, sizeof *m);
      else m[r] = all(0);
    transpose(m);
    memcpy(columns + i, m, sizeof m);
  }
}

// Codes of all columns on the stored grid, and what they leave of the original.
static void round_rows(const QuantizeGroup &g, const QuantizeLine &grid, uint8_t *codes, const QuantizeTile &t) {
  const Lanes inverse = reciprocal(grid.scale);
  const Lanes zero = g.symmetric ? grid.scale * g.bottom() : grid.offset;
  const float top = (float)((1 << g.bits) - 1);
  for (int i = 0; i < g.columns; i += LANES) {
    Lanes values[LANES];
    Bits four = {};  // codes of a row
    for (int j = 0; j < LANES; j++) {
      const Lanes q = nearest_in((g.w[i + j] - zero) * inverse, 0, top);
      values[j] = q * grid.scale + zero;
      four |= __builtin_convertvector(q, Bits) << j % 4 * 8;
      if (j % 4 != 3) continue;
      if (codes) memcpy(codes + (i + j) / 4 * 64, &four, sizeof four);
      four = Bits{};
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

static inline QuantizeLine given_line(const QuantizeTile &t, int group) {
  QuantizeLine line{all(0), all(0)};
  for (int r = 0; r < t.rows; r++) {
    line.scale[r] = t.scale[r * t.line_ld + group];
    if (!t.symmetric) line.offset[r] = t.offset[r * t.line_ld + group];
  }
  return line;
}

// group: of those that the tile's lines are of
static inline QuantizeLine fit_line(const QuantizeGroup &g, const QuantizeTile &t, int group) {
  if (t.method == QUANTIZE_SEARCH && t.given) {
    const QuantizeLine given = given_line(t, group);
    return fit_search(g, t.steps, &given);
  }
  if (t.method == QUANTIZE_SEARCH) return fit_search(g, t.steps);
  return t.method == QUANTIZE_HQQ ? fit_hqq(g) : fit_rtn(g);
}

static inline void store_line(const QuantizeTile &t, int group, const QuantizeLine &line) {
  for (int r = 0; r < t.rows; r++) {
    t.scale[r * t.line_ld + group] = line.scale[r];
    if (!t.symmetric) t.offset[r * t.line_ld + group] = line.offset[r];
  }
}

static void quantize_tile(const QuantizeTile &t) {
  Lanes *columns = (Lanes *)t.scratch;
  uint8_t *codes = t.packed ? (uint8_t *)(columns + t.group) : nullptr;
  uint16_t scales[ROWS], offsets[ROWS];
  for (int first = 0; first < ROWS; first += LANES) {
    const QuantizeTile part = rows_of(t, first);
    load_columns(part, t.group, columns);
    const QuantizeGroup g{columns, t.weight, t.group, t.bits, t.symmetric};
    const QuantizeLine line = fit_line(g, part, 0);
    store_line(part, 0, line);
    const QuantizeLine grid{through_half(line.scale, scales + first), through_half(line.offset, offsets + first)};
    round_rows(g, grid, codes ? codes + 4 * first : nullptr, part);
  }
  if (!t.packed) return;
  const int width = t.group < BLOCK ? HALF : BLOCK;
  for (int at = 0; at < t.group; at += width)
    pack_block((const uint8_t (*)[64])(codes + at * ROWS), width / 4, t.bits, t.packed + (int64_t)at * t.bits * 2);
  uint8_t *meta = t.packed + (int64_t)t.group * t.bits * 2;
  memcpy(meta, scales, sizeof scales);
  if (!t.symmetric) memcpy(meta + sizeof scales, offsets, sizeof offsets);
}
