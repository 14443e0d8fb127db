// One span of 16 rows x up to 256 columns under super-scales: a line for each group, sub-scales and offset codes around
// it, super-scales, codes. The twin of trilobite/formats/superscale.py and quantize/methods/refine.py, which explain it.

constexpr float MOST_OFFSET = 15, MOST_SCALE = 16, MOST_COUNT = 254, PARTS = 128;
constexpr int MOST_GROUPS = SPAN / HALF, REFINE_ROUNDS = 3;

struct SubGroup { Lanes scale, offset; };  // s and o, whole numbers

static inline Lanes whole_part(Lanes x) { return __builtin_convertvector(__builtin_convertvector(x, Bits), Lanes); }

static inline Lanes round_up(Lanes x) { return whole_part(x) + choose(whole_part(x) < x, all(1), all(0)); }

static inline Lanes most_offset(const QuantizeGroup &g, Lanes s, float unit) {
  return at_most(whole_part(at_least(MOST_COUNT - s * g.top(), all(0)) / unit), all(MOST_OFFSET));
}

// The offset code that puts the middle of the codes closest to `middle`, in units of the super-scale.
static inline Lanes offset_at(const QuantizeGroup &g, Lanes s, Lanes middle, float unit) {
  const Lanes o = (middle - s * (0.5f * g.top())) / unit + MOST_OFFSET;
  return at_most(at_least(nearest(at_most(o, all(MOST_OFFSET + 1))), all(0)), most_offset(g, s, unit));
}

static inline Lanes base_of(Lanes o, float unit) { return (o - MOST_OFFSET) * unit; }

constexpr int SIDES = 3;

// Errors of the best codes under a sub-scale, in units of it, for each of three offsets, in units of the super-scale. Their
// sums are side by side: one alone would wait for its last addition.
template <bool WEIGHTED>
static inline void errors_of(const QuantizeGroup &g, Lanes inverse, Lanes s, const Lanes base[SIDES],
                             Lanes error[SIDES]) {
  const Lanes step = 1.0f / s, scale = inverse * step;
  const float top = g.top();
  Lanes shift[SIDES];
  for (int k = 0; k < SIDES; k++) shift[k] = base[k] * step, error[k] = all(0);
  for (int i = 0; i < g.columns; i++) {
    const Lanes w = g.w[i];
    for (int k = 0; k < SIDES; k++) {
      const Lanes x = w * scale - shift[k], left = x - nearest_in(x, 0, top);
      error[k] += (WEIGHTED ? g.weight[i] * left : left) * left;
    }
  }
}

// The best of the pairs of sub-scale and offset code around a line, or the nearest pair.
static SubGroup fit_sub(const QuantizeGroup &g, const QuantizeLine &line, Lanes inverse, float unit, bool search) {
  const Lanes middle = (line.offset + line.scale * (0.5f * g.top())) * inverse;
  const Lanes reaching = round_up(at_most((line.offset + line.scale * g.top()) * inverse / g.top(), all(MOST_SCALE)));
  const Lanes flat = nearest(at_most(line.scale * inverse, all(2 * MOST_SCALE)));
  // A line above zero begins at zero, and is as steep as it must be to reach its end.
  const Lanes rounded = choose(line.offset > all(0), at_least(flat, reaching), flat);
  SubGroup best;
  best.scale = at_most(at_least(rounded, all(1)), all(MOST_SCALE));
  best.offset = offset_at(g, best.scale, middle, unit);
  if (!search) return best;
  Lanes least = all(__builtin_inff());
  for (int more = -2; more <= 2; more++) {
    const Lanes s = at_most(at_least(rounded + (float)more, all(1)), all(MOST_SCALE));
    const Lanes around = offset_at(g, s, middle, unit), most = most_offset(g, s, unit);
    Lanes offset[SIDES], base[SIDES], error[SIDES];
    for (int k = 0; k < SIDES; k++) {
      offset[k] = at_most(at_least(around + (float)(k - 1), all(0)), most);
      base[k] = base_of(offset[k], unit);
    }
    if (g.weight) errors_of<true>(g, inverse, s, base, error);
    else errors_of<false>(g, inverse, s, base, error);
    for (int k = 0; k < SIDES; k++) {
      const Lanes of = error[k] * s * s;
      const Bits better = of < least;
      least = choose(better, of, least);
      best.scale = choose(better, s, best.scale);
      best.offset = choose(better, offset[k], best.offset);
    }
  }
  return best;
}

// What the codes of a group count, times the weights and times itself, added up; `mean` of the columns' weights.
static void add_counts(const QuantizeGroup &g, const SubGroup &sub, Lanes inverse, float unit, float mean, Lanes *along,
                       Lanes *square) {
  const Lanes base = base_of(sub.offset, unit), step = 1.0f / sub.scale;
  for (int i = 0; i < g.columns; i++) {
    const Lanes x = g.w[i] * inverse - base;
    const Lanes count = nearest_in(x * step, 0, g.top()) * sub.scale + base;
    const float weight = mean * g.weight_of(i);
    *along += weight * count * g.w[i];
    *square += weight * count * count;
  }
}

static inline Lanes super_through_half(Lanes x, uint16_t stored[LANES]) {
  return through_half(x * PARTS, stored) * (1 / PARTS);
}

static void quantize_span_rows(const QuantizeTile &t, int span, int first, uint8_t *codes) {
  Lanes *columns = (Lanes *)t.scratch;
  load_columns(t, span, columns);
  const int groups = span / t.group;
  const float unit = (float)offset_unit(SUPER + t.bits);
  QuantizeLine line[MOST_GROUPS];
  SubGroup sub[MOST_GROUPS];
  Lanes super = all(0);
  float weight[SPAN], mean[MOST_GROUPS];  // of mean 1 in every group, and what that was
  for (int i = 0; i < groups; i++) {
    float sum = 0;
    for (int j = 0; t.weight && j < t.group; j++) sum += t.weight[i * t.group + j];
    mean[i] = t.weight ? sum / (float)t.group : 1;
    for (int j = 0; t.weight && j < t.group; j++) weight[i * t.group + j] = t.weight[i * t.group + j] / mean[i];
  }
  auto group = [&](int i) {
    const int at = i * t.group;
    return QuantizeGroup{columns + at, t.weight ? weight + at : nullptr, t.group, t.bits, false};
  };
  for (int i = 0; i < groups; i++) {
    const QuantizeGroup g = group(i);
    line[i] = fit_line(g, t, i);
    store_line(t, i, line[i]);
    const Lanes high = line[i].offset + line[i].scale * g.top(), low = line[i].offset * (-1 / (MOST_OFFSET * unit));
    super = at_least(at_least(super, line[i].scale * (1 / MOST_SCALE)), low);
    super = at_least(super, high * (1 / __builtin_fminf(MOST_COUNT / 2, MOST_SCALE * g.top())));
  }
  uint16_t stored[LANES];
  super = super_through_half(super, stored);
  const bool search = t.method == QUANTIZE_SEARCH;
  const int rounds = search && t.steps < REFINE_ROUNDS ? t.steps : REFINE_ROUNDS;
  for (int round = 0; round < (search ? rounds : 1); round++) {
    const Lanes inverse = reciprocal(super);
    Lanes along = all(0), square = all(0);
    for (int i = 0; i < groups; i++) {
      sub[i] = fit_sub(group(i), line[i], inverse, unit, search);
      if (search) add_counts(group(i), sub[i], inverse, unit, mean[i], &along, &square);
    }
    if (search)
      super = super_through_half(choose(square > all(0), along / at_least(square, all(1e-30f)), super), stored);
    for (int i = 0; i < groups; i++) line[i] = {super * sub[i].scale, super * base_of(sub[i].offset, unit)};
  }
  const int per_tile = t.tile_columns / t.group;
  const int64_t code_bytes = (int64_t)t.tile_columns * t.bits * 2, tile_bytes = code_bytes + ROWS * per_tile;
  for (int i = 0; i < groups; i++) {
    QuantizeTile one = t;
    if (t.original) one.original = t.original + i * t.group;
    if (t.values) one.values = t.values + i * t.group;
    round_rows(group(i), line[i], codes ? codes + i * t.group * ROWS : nullptr, one);
    for (int r = 0; t.packed && r < LANES; r++)
      t.packed[i / per_tile * tile_bytes + code_bytes + (first + r) * per_tile + i % per_tile] =
          r < t.rows ? (uint8_t)(sub[i].scale[r] - 1 + 16 * sub[i].offset[r]) : 0;
  }
  if (t.packed) memcpy(t.super + 2 * first, stored, sizeof stored);
}

static void quantize_span(const QuantizeTile &t, int span) {
  uint8_t *codes = t.packed ? (uint8_t *)t.scratch + SPAN * sizeof(Lanes) : nullptr;
  for (int first = 0; first < ROWS; first += LANES)
    quantize_span_rows(rows_of(t, first), span, first, codes ? codes + 4 * first : nullptr);
  if (!t.packed) return;
  const int width = t.tile_columns;
  const int64_t tile_bytes = (int64_t)width * t.bits * 2 + ROWS * (width / t.group);
  for (int at = 0; at < span; at += BLOCK)
    pack_block((const uint8_t (*)[64])(codes + at * ROWS), BLOCK / 4, t.bits,
               t.packed + at / width * tile_bytes + (int64_t)(at % width) * t.bits * 2);
}
