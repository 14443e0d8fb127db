// GPTQ's rounding of a block of columns, and the descent behind it. The twins of trilobite/quantize/methods/gptq.py and
// descent.py, which explain them. A column of the matrix is a contiguous row, so a register holds as many rows of the
// matrix as it has lanes, and nothing is summed across lanes.

static inline Lanes load_lanes(const float *p, int count) {
  Lanes x = all(0);
  if (count == LANES) memcpy(&x, p, sizeof x);
  else memcpy(&x, p, (size_t)count * sizeof *p);
  return x;
}

static inline void store_lanes(Lanes x, float *p, int count) {
  if (count == LANES) memcpy(p, &x, sizeof x);
  else memcpy(p, &x, (size_t)count * sizeof *p);
}

static inline void store_codes(Lanes q, uint8_t *p, int count) {
  typedef uint8_t Bytes __attribute__((vector_size(LANES)));
  const Bytes bytes = __builtin_convertvector(__builtin_convertvector(q, Bits), Bytes);
  if (count == LANES) memcpy(p, &bytes, sizeof bytes);
  else memcpy(p, &bytes, (size_t)count);
}

// Scale and offset of a group as they are stored; those that are not known are found and written.
static QuantizeLine stored_line(const trilobite_feedback_args &b, const Lanes *w, int64_t at, int count) {
  float *scale = b.scale + at / b.group * b.rows, *offset = b.offset + at / b.group * b.rows;
  if (!b.cost) return {load_lanes(scale, count), load_lanes(offset, count)};
  float weight[SPAN], sum = 0;
  for (int i = 0; i < b.group; i++) sum += b.cost[at + i];
  for (int i = 0; i < b.group; i++) weight[i] = b.cost[at + i] * ((float)b.group / sum);
  const QuantizeGroup g{w + at, weight, (int)b.group, (int)b.bits, b.symmetric != 0};
  const QuantizeLine line = fit_search(g, (int)b.steps);
  if (b.units) {
    const Lanes units = load_lanes(b.units, count);
    const float step = (float)offset_unit(SUPER + (int)b.bits);
    const SubGroup sub = fit_sub(g, line, reciprocal(units), step, true);
    store_lanes(sub.scale, scale, count);
    store_lanes(sub.offset, offset, count);
    return {units * sub.scale, units * base_of(sub.offset, step)};
  }
  uint16_t half[LANES];
  const Lanes stored = through_half(line.scale, half);
  const Lanes zero = b.symmetric ? stored * g.bottom() : through_half(line.offset, half);
  store_lanes(stored, scale, count);
  store_lanes(zero, offset, count);
  return {stored, zero};
}

static void feed_back(const trilobite_feedback_args &b, int count, void *scratch) {
  const int columns = (int)b.columns;
  Lanes *w = (Lanes *)scratch;
  for (int i = 0; i < columns; i++) w[i] = load_lanes(b.w + i * b.rows, count);
  const float top = (float)((1 << b.bits) - 1);
  QuantizeLine line{};
  Lanes inverse = all(0);
  for (int i = 0; i < columns; i++) {
    if (i % b.group == 0) {
      line = stored_line(b, w, i, count);
      inverse = reciprocal(line.scale);
    }
    const float *upper = b.upper + i * b.upper_ld;
    const Lanes q = nearest_in((w[i] - line.offset) * inverse, 0, top);
    const Lanes error = (w[i] - (q * line.scale + line.offset)) / upper[i];
    store_codes(q, b.codes + i * b.rows, count);
    store_lanes(error, b.errors + i * b.rows, count);
    for (int j = i + 1; j < columns; j++) w[j] -= upper[j] * error;
  }
}

// y[i] -= sum over j < n of h[i, j] x[j], for eight rows of h at a time: their sums do not wait for each other.
static inline void subtract_product(const float *h, int64_t ld, int rows, int n, const Lanes *x, Lanes *y) {
  for (int i = 0; i < rows; i += 8) {
    Lanes sum[8] = {};
    for (int j = 0; j < n; j++) _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++) sum[k] += h[(i + k) * ld + j] * x[j];
    for (int k = 0; k < 8; k++) y[i + k] -= sum[k];
  }
}

struct Descent {
  const trilobite_descent_args &d;
  int columns, groups, group;
  Lanes *codes, *slope, *before, *work;  // of every column
  Lanes scale[MOST_GROUPS], offset[MOST_GROUPS], unit;

  Descent(const trilobite_descent_args &args, void *scratch)
      : d(args),
        columns((int)args.columns),
        groups((int)(args.columns / args.group)),
        group((int)args.group),
        codes((Lanes *)scratch),
        slope(codes + columns),
        before(slope + columns),
        work(before + columns) {}

  const float *hessian(int i, int j) const { return d.hessian + i * d.hessian_ld + j; }
  float offset_step() const { return (float)offset_unit(SUPER + (int)d.bits); }
  Lanes counts(int i) const { return codes[i] * scale[i / group] + base_of(offset[i / group], offset_step()); }

  // The unit of least loss, codes and lines as they are.
  void fit_unit() {
    Lanes *along = work;  // minus H times the counts
    for (int i = 0; i < columns; i++) before[i] = counts(i), along[i] = all(0);
    subtract_product(d.hessian, d.hessian_ld, columns, columns, before, along);
    Lanes square = all(0), down = all(0);
    for (int i = 0; i < columns; i++) square -= along[i] * before[i], down += before[i] * slope[i];
    uint16_t half[LANES];
    const Lanes best = super_through_half(unit + down / at_least(square, all(1e-30f)), half);
    const Bits moves = (square > all(0)) & (unit > all(0)) & (best > all(0)) & (best < all(__builtin_inff()));
    const Lanes old = unit;
    unit = choose(moves, best, unit);
    for (int i = 0; i < columns; i++) slope[i] += along[i] * (unit - old), before[i] *= old;
  }

  // The best pair of a sub-scale near the group's own and any offset code, its codes as they are.
  void fit_line(int g) {
    const int at = g * group;
    const Lanes *q = codes + at;
    Lanes *along = work;
    for (int i = 0; i < group; i++) along[i] = all(0);
    subtract_product(hessian(at, at), d.hessian_ld, group, group, q, along);
    float ones_ones = 0;
    for (int i = 0; i < group; i++)
      for (int j = 0; j < group; j++) ones_ones += *hessian(at + i, at + j);
    Lanes codes_codes = all(0), codes_ones = all(0), by_codes = all(0), by_ones = all(0);
    for (int i = 0; i < group; i++) {
      codes_codes -= along[i] * q[i], codes_ones -= along[i];
      by_codes += q[i] * slope[at + i], by_ones += slope[at + i];
    }
    QuantizeGroup range{};
    range.bits = (int)d.bits;
    const Lanes old_s = scale[g], old_o = offset[g], step = unit * offset_step(), inverse = reciprocal(step);
    Lanes least = all(0), new_s = old_s, new_o = old_o;
    for (int more = -2; more <= 2; more++) {
      const Lanes s = at_most(at_least(old_s + (float)more, all(1)), all(MOST_SCALE)), a = unit * (s - old_s);
      const Lanes against = by_ones - a * codes_ones, vertex = old_o + against * (inverse / ones_ones);
      const Lanes o =
          at_most(nearest(at_most(at_least(vertex, all(0)), all(MOST_OFFSET))), most_offset(range, s, offset_step()));
      const Lanes b = step * (o - old_o);
      const Lanes loss = a * (a * codes_codes - 2 * by_codes) + b * (b * ones_ones - 2 * against);
      const Bits better = loss < least;
      least = choose(better, loss, least), new_s = choose(better, s, new_s), new_o = choose(better, o, new_o);
    }
    Lanes *by = work;
    for (int i = 0; i < group; i++) by[i] = step * (new_o - old_o) + q[i] * (unit * (new_s - old_s));
    subtract_product(hessian(0, at), d.hessian_ld, columns, group, by, slope);
    scale[g] = new_s, offset[g] = new_o;
  }

  // The code of each column in turn; slopes of those behind a stretch follow all of it at once.
  void fit_codes() {
    constexpr int STRETCH = 32;
    const float top = (float)((1 << d.bits) - 1);
    for (int start = 0; start < columns; start += STRETCH) {
      const int stop = start + STRETCH < columns ? start + STRETCH : columns;
      Lanes *moved = work;
      for (int j = start; j < stop; j++) {
        const Lanes size = unit * scale[j / group], inverse = reciprocal(size);
        const float *h = hessian(j, 0);
        const Lanes x = codes[j] + slope[j] * inverse * (1 / h[j]);
        const Lanes q = nearest_in(x, 0, top), by = (q - codes[j]) * size;
        codes[j] = q, moved[j - start] = by;
        for (int k = j + 1; k < stop; k++) slope[k] -= h[k] * by;
      }
      subtract_product(hessian(stop, start), d.hessian_ld, columns - stop, stop - start, moved, slope + stop);
    }
  }
};

static void descend(const trilobite_descent_args &d, int count, void *scratch) {
  Descent now(d, scratch);
  for (int i = 0; i < now.columns; i++) {
    now.codes[i] = load_lanes(d.codes + i * d.rows, count);
    now.slope[i] = load_lanes(d.slope + i * d.rows, count);
  }
  for (int g = 0; g < now.groups; g++) {
    now.scale[g] = load_lanes(d.scale + g * d.rows, count);
    now.offset[g] = load_lanes(d.offset + g * d.rows, count);
  }
  now.unit = load_lanes(d.units, count);
  now.fit_unit();
  for (int g = 0; g < now.groups; g++) now.fit_line(g);
  now.fit_codes();
  for (int i = 0; i < now.columns; i++) {
    const Lanes error = load_lanes(d.error + i * d.rows, count);
    store_lanes(error + (now.before[i] - now.counts(i) * now.unit), d.error + i * d.rows, count);
    store_lanes(now.codes[i], d.codes + i * d.rows, count);
  }
  for (int g = 0; g < now.groups; g++) {
    store_lanes(now.scale[g], d.scale + g * d.rows, count);
    store_lanes(now.offset[g], d.offset + g * d.rows, count);
  }
  store_lanes(now.unit, d.units, count);
}
