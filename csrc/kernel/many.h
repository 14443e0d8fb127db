// More than a few tokens, on vectors: a segment of some bands is decoded once into the first-level cache, and every line
// of codes that is loaded from there multiplies as many tokens as registers have room for sums.
//
// Digits are multiplied as in rows.h. Parts (see `Digits`) are multiplied in floating point: products of a code with a
// bfloat16 number are exact in fp32, those with an fp32 number are rounded once with the sum; sums of a segment are kept
// apart until the scale of the codes is applied, as the integers of digits are.

constexpr int PANEL_NEAR = 1024;  // bytes
constexpr int TOKENS_A_PASS =
    64;  // tokens that share what was decoded: they and their results stay in the first-level cache

template <int NB> struct alignas(64) Segment {
  uint8_t codes[NB][64 * ROWS * lines(Isa::FORM)];
  Affine w[NB];
};

// out += w * dot + offset * sum
template <int NT, int NB>
static inline void add_products(const Segment<NB> &p, const Isa::Floats dot[NB][NT], const float *sum, float *out,
                                int64_t ld) {
  UNROLL for (int n = 0; n < NB; n++) {
    const Affine w = p.w[n];
    UNROLL for (int t = 0; t < NT; t++) {
      float *at = out + t * ld + n * ROWS;
      const Isa::Floats scaled = Isa::fma(w.scale, dot[n][t], Isa::load(at));
      Isa::store(at, Isa::fma(w.offset, Isa::set1(sum[t]), scaled));
    }
  }
}

// Tokens [first, first + NT) of a block. V: not every Isa has parts.
template <int NT, int NB, typename V = Isa>
static void multiply_parts(const Segment<NB> &p, const Digits &x, int block, int64_t s, int first, float *out,
                           int64_t ld) {
  constexpr int LINES = BLOCK / 4 * lines(Isa::FORM);  // of 32 columns; a line meets four bytes of a token's part
  const int rows = x.rows(block), chunks = x.seg / BLOCK;
  const float *q = (const float *)x.q_block(block) + (s * chunks * x.parts * rows + first) * LINES;
  Isa::Floats acc[NB][NT];
  for (int n = 0; n < NB; n++)
    for (int t = 0; t < NT; t++) acc[n][t] = Isa::set1(0);
  for (int c = 0; c < chunks; c++)
    for (int part = 0; part < x.parts; part++, q += rows * LINES)
      for (int i = 0; i < LINES; i++) {
        const int at = (c * LINES + i) * 64;
        Isa::Floats codes[NB];
        UNROLL for (int n = 0; n < NB; n++) codes[n] = Isa::load((const float *)(p.codes[n] + at));
        UNROLL for (int t = 0; t < NT; t++) {
          const Isa::Floats v = Isa::set1(q[t * LINES + i]);
          UNROLL for (int n = 0; n < NB; n++) acc[n][t] = V::dot_part(acc[n][t], codes[n], v);
        }
      }
  add_products<NT, NB>(p, acc, x.sum_block(block) + s * rows + first, out, ld);
}

// The sums of `multiply_digits` where an instruction multiplies two rows and two tokens; codes are interleaved. V: not every
// Isa has it.
template <int D, int NT, int NB, typename V = Isa>
static inline void sum_pairs(const Segment<NB> &p, const int8_t *q, int64_t digit, int seg, Isa::Ints acc[NB][NT][D]) {
  for (int n = 0; n < NB; n++)
    for (int t = 0; t < NT; t += 2) {
      const int8_t *x = q + t * seg, *y = q + (t + 1 < NT ? t + 1 : t) * seg;
      typename V::Pairs sums[D];
      for (int d = 0; d < D; d++) sums[d] = V::no_pairs();
      for (int c = 0; c < seg; c += 8) {
        decltype(V::eight_of_two(x, y)) digits[D];
        UNROLL for (int d = 0; d < D; d++) digits[d] = V::eight_of_two(x + d * digit + c, y + d * digit + c);
        V::template dot_pairs<D>(sums, p.codes[n] + c * ROWS, digits);
      }
      for (int d = 0; d < D; d++) {
        acc[n][t][d] = V::of_token(sums[d], false);
        if (t + 1 < NT) acc[n][t + 1][d] = V::of_token(sums[d], true);
      }
    }
}

// Sums of NT tokens += codes of up to 4 bits, of one band, times their digits, in the short sums of short.h.
template <int D, int NT, typename V = Isa>
static inline void multiply_short(Isa::Ints acc[NT][D], const uint8_t *codes, const int8_t *q, int64_t digit, int seg) {
  for (int c = 0; c < seg; c += BLOCK) {
    Isa::Bytes run[NT][D];
    UNROLL for (int t = 0; t < NT; t++) UNROLL for (int d = 0; d < D; d++) run[t][d] = Isa::bytes(0);
    for (int i = c; i < c + BLOCK; i += 4) {
      const Isa::Bytes step = Isa::load(codes + i * ROWS);
      UNROLL for (int t = 0; t < NT; t++) UNROLL for (int d = 0; d < D; d++) {
        run[t][d] = V::add_shorts(run[t][d], V::short_dot(step, Isa::quad(q + d * digit + t * seg + i)));
        V::in_order(run[t][d]);
      }
    }
    UNROLL for (int t = 0; t < NT; t++) UNROLL for (int d = 0; d < D; d++) acc[t][d] =
        V::dot_shorts(acc[t][d], run[t][d], Isa::factor(1));
  }
}

template <int KIND, int D, int NT, int NB>
static void multiply_digits(const Segment<NB> &p, const Digits &x, int block, int64_t s, int first, float *out,
                            int64_t ld) {
  const int rows = x.rows(block), seg = x.seg;
  const int64_t digit = (int64_t)rows * seg;
  const int8_t *q = x.q_block(block) + s * D * digit + (int64_t)first * seg;
  Isa::Ints acc[NB][NT][D];
  for (int n = 0; n < NB; n++)
    for (int t = 0; t < NT; t++)
      for (int d = 0; d < D; d++) acc[n][t][d] = Isa::zero();
  if constexpr (Isa::MATRICES) {
    sum_pairs<D, NT, NB>(p, q, digit, seg, acc);
  } else if constexpr (Isa::SHORT_RUNS && KIND == 4) {
    for (int n = 0; n < NB; n++) multiply_short<D, NT>(acc[n], p.codes[n], q, digit, seg);
  } else {
    for (int c = 0; c < seg; c += 4) {
      Isa::Bytes codes[NB];
      UNROLL for (int n = 0; n < NB; n++) codes[n] = Isa::load(p.codes[n] + c * ROWS);
      UNROLL for (int t = 0; t < NT; t++) {
        UNROLL for (int d = 0; d < D; d++) {
          const auto four = Isa::quad(q + d * digit + t * seg + c);
          UNROLL for (int n = 0; n < NB; n++) {
            if constexpr (KIND >= SUPER) acc[n][t][d] = Isa::dot_counts(acc[n][t][d], codes[n], four);
            else acc[n][t][d] = Isa::dot<KIND>(acc[n][t][d], codes[n], four);
          }
        }
      }
    }
  }
  const float *scale = x.scale_block(block) + s * rows + first;
  Isa::Floats dot[NB][NT];
  UNROLL for (int t = 0; t < NT; t++) {
    UNROLL for (int n = 0; n < NB; n++) dot[n][t] = Isa::mul(combine<D>(acc[n][t]), Isa::set1(scale[t]));
  }
  add_products<NT, NB>(p, dot, x.sum_block(block) + s * rows + first, out, ld);
}

// What is multiplied: digits (D of them) with codes of up to 4 bits, of 8 bits, or counts; or parts (D = 0).
template <int KIND, int D, int NB> struct Product {
  static constexpr int MOST = Isa::SUMS / Isa::BANDS_AT_ONCE / (D ? D : 1);  // tokens at a time

  template <int NT>
  static void run(const Segment<NB> &p, const Digits &x, int block, int64_t s, int first, float *out, int64_t ld) {
    if constexpr (D == 0) multiply_parts<NT, NB>(p, x, block, s, first, out, ld);
    else multiply_digits<KIND, D, NT, NB>(p, x, block, s, first, out, ld);
  }

  template <int NT>
  static void pick(int n, const Segment<NB> &p, const Digits &x, int block, int64_t s, int first, float *out,
                   int64_t ld) {
    if (n == NT) return run<NT>(p, x, block, s, first, out, ld);
    if constexpr (NT > 1) pick<NT - 1>(n, p, x, block, s, first, out, ld);
  }

  // The tokens of a block in as few runs as there can be, which are as large as each other.
  static void tokens(const Segment<NB> &p, const Digits &x, int block, int64_t s, float *out, int64_t ld) {
    const int rows = x.rows(block), runs = (rows + MOST - 1) / MOST;
    for (int i = 0, first = 0, n; i < runs; i++, first += n) {
      n = (rows - first + runs - i - 1) / (runs - i);
      pick<MOST>(n, p, x, block, s, first, out + first * ld, ld);
    }
  }
};

template <int NB, typename V = Isa> static inline void interleave(Segment<NB> &p, int n, int seg) {
  for (int c = 0; c < seg; c += 8) V::interleave(p.codes[n] + c * ROWS);
}

template <int KIND, int D, int NB>
static void bands_many(const Matrix &m, int64_t band, const Digits &x, int from, int to, float *out, int64_t ld) {
  constexpr Form FORM = D ? Form::BYTES : Isa::FORM;
  const int per_group = m.group / x.seg;
  const int64_t stride = m.groups * m.tile_bytes;
  const uint8_t *tile = m.packed + band * stride;
  Segment<NB> p;
  for (int64_t s = 0; s < x.segments; s++) {
    const int64_t group = s / per_group;
    const int into = (int)(s - group * per_group);
    for (int n = 0; n < NB; n++) {
      const uint8_t *at = tile + n * stride + group * m.tile_bytes;
      decode_columns<FORM, PANEL_NEAR>(m, at, into * x.seg, x.seg, p.codes[n]);
      if constexpr (Isa::MATRICES) interleave<NB>(p, n, x.seg);
      __builtin_prefetch(at + m.code_bytes + PANEL_NEAR, 0, 3);
      if (into == 0) p.w[n] = read_affine(m, at + m.code_bytes, band + n, group);
    }
    for (int block = from; block < to; block++)
      Product<KIND, D, NB>::tokens(p, x, block, s, out + (int64_t)block * TOKENS * ld, ld);
  }
}

template <int KIND, int D>
static void all_bands_many(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  constexpr int NB = Isa::BANDS_AT_ONCE, BLOCKS = TOKENS_A_PASS / TOKENS;
  for (int64_t t = 0; !m.add && t < x.count; t++) memset(out + t * ld, 0, (size_t)bands * ROWS * sizeof(float));
  for (int from = 0; from < x.blocks(); from += BLOCKS) {
    const int to = from + BLOCKS < x.blocks() ? from + BLOCKS : x.blocks();
    int b = 0;
    for (; b + NB <= bands; b += NB) bands_many<KIND, D, NB>(m, band + b, x, from, to, out + b * ROWS, ld);
    for (; b < bands; b++) bands_many<KIND, D, 1>(m, band + b, x, from, to, out + b * ROWS, ld);
  }
}

template <int D>
static void digits_many(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  // Where one instruction multiplies bytes of any kind, all codes are such.
  if (Isa::ANY_BYTE || m.kind == 8) return all_bands_many<8, D>(m, band, bands, x, out, ld);
  if (m.kind >= SUPER) return all_bands_many<SUPER + 8, D>(m, band, bands, x, out, ld);
  all_bands_many<4, D>(m, band, bands, x, out, ld);
}

static void rows_vectors(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld, void *) {
  if constexpr (Isa::FORM != Form::BYTES)
    if (x.parts) return all_bands_many<0, 0>(m, band, bands, x, out, ld);
  if (rows_short(m, band, bands, x, out, ld)) return;
  if (x.seg < BLOCK || x.count < Isa::MANY) return rows_few(m, band, bands, x, out, ld);
  if (x.digits == TRILOBITE_INT8) digits_many<1>(m, band, bands, x, out, ld);
  else digits_many<3>(m, band, bands, x, out, ld);
}

[[maybe_unused]] static int parts_vectors(int count, int dtype, int digits, bool intermediate) {
  if (count < Isa::MANY || digits == TRILOBITE_INT8) return 0;
  if (Isa::FORM == Form::SINGLES) return WHOLE;
  // Two products of bfloat16 numbers cost more than three of bytes.
  return Isa::FORM == Form::PAIRS && dtype == TRILOBITE_BF16 && !intermediate;
}
