// Two and more tokens where a product of bytes is two sums of two in 16 bits (short.h): a segment of a band is decoded once
// into the first-level cache, and as many tokens as there are registers for sums of them multiply it. Of three digits the
// lowest is mostly zero (`LowSteps`): the others are multiplied together, then its few steps, or all of them.

struct ShortSegment {
  alignas(64) uint8_t codes[2][64 * ROWS];  // of 8 bits: their lower and their upper four
  Affine w;
  // Under super-scales: columns of a group, the segment's column in its tile, scales of groups, offsets of pairs of them.
  int group, at;
  Isa::Bytes scale[64 / HALF], offset[2];
};

// Tokens of a block from one of them on, in a segment.
struct ShortTokens {
  const int8_t *q;
  int64_t digit;  // from one digit to the next
  const float *scale, *sum;
  const int16_t *sums;
  const LowSteps *low;

  ShortTokens from(int t, int digits, int seg) const {
    return {q + t * seg, digit, scale + t, sum + t, sums + t * digits * SUMS, low + t};
  }
};

// Sums of D digits of NT tokens in 16 bits: columns [from, to) of a segment. V: not every Isa has them.
template <int D, int NT, int SEG, typename V = Isa>
static inline void add_run(const uint8_t *codes, const int8_t *q, int64_t digit, int from, int to,
                           Isa::Bytes run[NT][D]) {
  for (int c = from; c < to; c += HALF) UNROLL for (int i = 0; i < HALF; i += 4) {
      const Isa::Bytes step = Isa::load(codes + (c + i) * ROWS);
      UNROLL for (int t = 0; t < NT; t++) UNROLL for (int d = 0; d < D; d++)
          V::add_to_run(run[t][d], step, Isa::quad(q + d * digit + t * SEG + c + i));
    }
}

// Sums of D of ALL digits, from the first one on: of two, 256 * the second's + the first's. KIND: 3 or 4, codes of up to so
// many bits, of which those of 64 or 32 columns fit; 8, twice those of 4; SUPER, codes under super-scales, as they are.
template <int KIND, int D, int ALL, int NT, int SEG, typename V = Isa>
static inline void sum_short(const ShortSegment &p, const ShortTokens &x, int first, Isa::Ints sum[NT]) {
  constexpr int APART = KIND == SUPER ? D : 1;  // an offset times 256 has no room
  const int columns = KIND == SUPER ? p.group : KIND == 3 ? SEG : BLOCK;
  const int8_t *q = x.q + first * x.digit;
  Isa::Ints a[NT][APART];
  UNROLL for (int t = 0; t < NT; t++) UNROLL for (int d = 0; d < APART; d++) a[t][d] = Isa::zero();
  // Of the next segment: other blocks are far from here.
  UNROLL for (int t = 0; t < NT; t++) UNROLL for (int d = 0; d < D; d++)
      __builtin_prefetch(q + (ALL + d) * x.digit + t * SEG, 0, 3);
  for (int part = 0; part < (KIND == 8 ? 2 : 1); part++)
    for (int from = 0, r = 0; from < SEG; from += columns, r++) {
      Isa::Bytes run[NT][D];
      UNROLL for (int t = 0; t < NT; t++) UNROLL for (int d = 0; d < D; d++) run[t][d] = Isa::bytes(0);
      add_run<D, NT, SEG>(p.codes[part], q, x.digit, from, from + columns, run);
      const int unit = part ? 16 : 1;
      UNROLL for (int d = 0; d < D; d++) {
        const Isa::Bytes factor = KIND == SUPER ? p.scale[r] : Isa::factor(d ? 256 * unit : unit);
        UNROLL for (int t = 0; t < NT; t++) a[t][d % APART] = V::dot_shorts(a[t][d % APART], run[t][d], factor);
      }
    }
  if constexpr (KIND == SUPER)
    for (int j = 0; j < pairs(SEG, p.group); j++)
      UNROLL for (int t = 0; t < NT; t++)
          add_pair<D, V>(a[t], p.offset[j], x.sums + (t * ALL + first) * SUMS, SEG, p.group, p.at, j);
  UNROLL for (int t = 0; t < NT; t++) sum[t] = APART == 2 ? Isa::shl8_add(a[t][1], a[t][0]) : a[t][0];
}

// Steps that the lowest digits of NT tokens need, of each: none, as many as `LowSteps` has room for, all.
enum class Low { NONE, FEW, ALL };

template <int NT> static inline Low least_steps(const LowSteps *low) {
  int any = 0, more = 0;
  UNROLL for (int t = 0; t < NT; t++) any |= low[t].parts, more |= low[t].more;
  return more ? Low::ALL : any ? Low::FEW : Low::NONE;
}

template <typename V = Isa> static inline Isa::Ints sum_low(const uint8_t *codes, const LowSteps &low) {
  Isa::Bytes run = Isa::bytes(0);
  UNROLL for (int i = 0; i < LowSteps::MOST; i++)
      V::add_to_run(run, Isa::load(codes + low.step[i] * 64), Isa::quad(low.four[i]));
  return V::dot_shorts(Isa::zero(), run, Isa::factor(1));
}

template <int KIND, int D, int NT, int SEG>
static void multiply_short(const ShortSegment &p, const ShortTokens &x, float *out) {
  Isa::Ints a[NT], low[NT];
  Isa::Floats dot[NT];
  sum_short<KIND, D == 1 ? 1 : 2, D, NT, SEG>(p, x, D == 1 ? 0 : 1, a);
  UNROLL for (int t = 0; t < NT; t++) dot[t] = Isa::to_float(a[t]);
  if constexpr (D > 1) {
    const Low steps = least_steps<NT>(x.low);
    if (steps == Low::NONE) {
      UNROLL for (int t = 0; t < NT; t++) dot[t] = Isa::mul(dot[t], Isa::set1(256));
    } else if ((KIND == 3 || KIND == 4) && steps == Low::FEW) {
      UNROLL for (int t = 0; t < NT; t++) dot[t] = combine_low(dot[t], sum_low(p.codes[0], x.low[t]));
    } else {
      sum_short<KIND, 1, D, NT, SEG>(p, x, 0, low);
      UNROLL for (int t = 0; t < NT; t++) dot[t] = combine_low(dot[t], low[t]);
    }
  }
  UNROLL for (int t = 0; t < NT; t++)
      add_product(p.w, Isa::mul(dot[t], Isa::set1(x.scale[t])), x.sum[t], out + t * ROWS);
}

// Under super-scales: what groups have, for the segment of SEG columns from column `at` of a tile.
template <int SEG, typename V = Isa>
static inline void read_groups(const Matrix &m, const uint8_t *meta, int at, ShortSegment &p) {
  const Isa::Bytes lines = Isa::load_lanes(meta, m.group / m.sub);
  const Isa::Bytes scales = Isa::plus(Isa::mask(lines, 15), Isa::bytes(1));
  const Isa::Bytes offsets = Isa::times(Isa::field<4, 4>(lines), Isa::factor(offset_unit(m.kind)));
  p.group = m.sub, p.at = at;
  for (int j = 0; j < SEG / m.sub; j++) p.scale[j] = Isa::factor(scales, at / m.sub + j);
  for (int j = 0; j < pairs(SEG, m.sub); j++) p.offset[j] = offset_pair<V>(offsets, m.sub, at, j);
}

template <int SEG> static inline void halve_codes(ShortSegment &p) {
  for (int i = 0; i < SEG * ROWS; i += 64) {
    const Isa::Bytes c = Isa::load(p.codes[0] + i);
    Isa::store(p.codes[0] + i, Isa::field<0, 4>(c));
    Isa::store(p.codes[1] + i, Isa::field<4, 4>(c));
  }
}

template <int KIND, int D, int SEG>
static void short_band(const Matrix &m, int64_t band, const Digits &x, float *out, int64_t ld) {
  const uint8_t *tile = m.packed + band * m.groups * m.tile_bytes;
  ShortSegment p;
  PassSums<1> sums(m, x, out, ld);
  for (int64_t g = 0, s = 0; g < m.groups; g++, tile += m.tile_bytes) {
    const uint8_t *meta = tile + m.code_bytes;
    __builtin_prefetch(meta + PANEL_NEAR, 0, 3);
    p.w = read_affine(m, meta, band, g);
    for (int at = 0; at < m.group; at += SEG, s++) {
      decode_columns<Form::BYTES, PANEL_NEAR, true>(m, tile, at, SEG, p.codes[0]);
      if constexpr (KIND == SUPER) read_groups<SEG>(m, meta, at, p);
      if constexpr (KIND == 8) halve_codes<SEG>(p);
      for (int block = 0; block < x.blocks(); block++) {
        const int rows = x.rows(block);
        const int64_t first = s * rows;
        const ShortTokens all{x.q_block(block) + first * D * SEG,     rows * SEG,
                              x.scale_block(block) + first,           x.sum_block(block) + first,
                              x.sums_block(block) + first * D * SUMS, D == 1 ? nullptr : x.low_block(block) + first};
        in_runs<MOST_SUMS / (D == 1 ? 1 : D - 1)>(rows, [&](auto count, int t) {
          multiply_short<KIND, D, decltype(count)::VALUE, SEG>(p, all.from(t, D, SEG), sums.of(block) + t * ROWS);
        });
      }
    }
  }
  sums.store(x, out, ld);
}

template <int KIND, int D>
static void short_many(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  in_passes(x, out, ld, [&](const Digits &some, float *to) {
    for (int b = 0; b < bands; b++) {
      if (x.seg == 64) short_band<KIND, D, 64>(m, band + b, some, to + b * ROWS, ld);
      else short_band<KIND, D, BLOCK>(m, band + b, some, to + b * ROWS, ld);
    }
  });
}

template <int KIND>
static void short_many(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  if (x.digits == TRILOBITE_INT8) short_many<KIND, 1>(m, band, bands, x, out, ld);
  else short_many<KIND, 3>(m, band, bands, x, out, ld);
}

// Whether it was done here: digits in segments of 32 or 64 columns. Codes of an expanded V are bytes, but may have 3 bits.
static bool rows_short_many(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  if constexpr (Isa::SHORT_SUMS) {
    const int bits = m.kind == 8 ? m.bits : code_bits(m.kind);
    // Two tokens of one digit multiply bytes as fast as memory gives them without being halved (rows.h).
    if (x.count == 1 || x.seg < BLOCK || (bits == 8 && x.count * x.digits == 2)) return false;
    if (m.sub) short_many<SUPER>(m, band, bands, x, out, ld);
    else if (bits == 8) short_many<8>(m, band, bands, x, out, ld);
    else if (bits < 4) short_many<3>(m, band, bands, x, out, ld);
    else short_many<4>(m, band, bands, x, out, ld);
  }
  return Isa::SHORT_SUMS;
}
