// More than a few tokens, on vectors: a segment of some bands is decoded once into the first-level cache, and every line
// of codes that is loaded from there multiplies as many tokens as registers have room for sums.
//
// Digits are multiplied as in rows.h (where sums are short: short_many.h). Parts (see `Digits`) are multiplied in floating
// point: products of a code with a bfloat16 number are exact in fp32, those with an fp32 number are rounded once with the
// sum; sums of a segment are kept apart until the scale of the codes is applied, as the integers of digits are.

template <int NB> struct alignas(64) Segment {
  uint8_t codes[NB][64 * ROWS * lines(Isa::FORM)];
  Affine w[NB];
};

// out [NT][NB * ROWS] += w * dot + offset * sum
template <int NT, int NB>
static inline void add_products(const Segment<NB> &p, const Isa::Floats dot[NB][NT], const float *sum, float *out) {
  UNROLL for (int n = 0; n < NB; n++) {
    const Affine w = p.w[n];
    UNROLL for (int t = 0; t < NT; t++) add_product(w, dot[n][t], sum[t], out + (t * NB + n) * ROWS);
  }
}

// Tokens [first, first + NT) of a block. V: not every Isa has parts.
template <int NT, int NB, typename V = Isa>
__attribute__((noinline)) static void multiply_parts(const Segment<NB> &p, const Digits &x, int block, int64_t s,
                                                     int first, float *out) {
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
  add_products<NT, NB>(p, acc, x.sum_block(block) + s * rows + first, out);
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

template <int KIND, int D, int NT, int NB>
__attribute__((noinline)) static void multiply_digits(const Segment<NB> &p, const Digits &x, int block, int64_t s,
                                                      int first, float *out) {
  const int rows = x.rows(block), seg = x.seg;
  const int64_t digit = (int64_t)rows * seg;
  const int8_t *q = x.q_block(block) + s * D * digit + (int64_t)first * seg;
  Isa::Ints acc[NB][NT][D];
  for (int n = 0; n < NB; n++)
    for (int t = 0; t < NT; t++)
      for (int d = 0; d < D; d++) acc[n][t][d] = Isa::zero();
  if constexpr (Isa::MATRICES) {
    sum_pairs<D, NT, NB>(p, q, digit, seg, acc);
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
  add_products<NT, NB>(p, dot, x.sum_block(block) + s * rows + first, out);
}

// Tokens of a block. What is multiplied: digits (D of them) with codes of up to 4 bits, of 8 bits, or counts; or parts
// (D = 0).
template <int KIND, int D, int NB>
static inline void multiply_tokens(const Segment<NB> &p, const Digits &x, int block, int64_t s, float *out) {
  in_runs<Isa::SUMS / Isa::BANDS_AT_ONCE / (D ? D : 1)>(x.rows(block), [&](auto count, int first) {
    constexpr int NT = decltype(count)::VALUE;
    float *at = out + first * NB * ROWS;
    if constexpr (D == 0) multiply_parts<NT, NB>(p, x, block, s, first, at);
    else multiply_digits<KIND, D, NT, NB>(p, x, block, s, first, at);
  });
}

template <int NB, typename V = Isa> static inline void interleave(Segment<NB> &p, int n, int seg) {
  for (int c = 0; c < seg; c += 8) V::interleave(p.codes[n] + c * ROWS);
}

template <int KIND, int D, int NB>
static void bands_many(const Matrix &m, int64_t band, const Digits &x, float *out, int64_t ld) {
  constexpr Form FORM = D ? Form::BYTES : Isa::FORM;
  const int per_group = m.group / x.seg;
  const int64_t stride = m.groups * m.tile_bytes;
  const uint8_t *tile = m.packed + band * stride;
  Segment<NB> p;
  PassSums<NB> sums(m, x, out, ld);
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
    for (int block = 0; block < x.blocks(); block++) multiply_tokens<KIND, D, NB>(p, x, block, s, sums.of(block));
  }
  sums.store(x, out, ld);
}

template <int KIND, int D>
static void all_bands_many(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  constexpr int NB = Isa::BANDS_AT_ONCE;
  in_passes(x, out, ld, [&](const Digits &some, float *to) {
    int b = 0;
    for (; b + NB <= bands; b += NB) bands_many<KIND, D, NB>(m, band + b, some, to + b * ROWS, ld);
    for (; b < bands; b++) bands_many<KIND, D, 1>(m, band + b, some, to + b * ROWS, ld);
  });
}

template <int D>
[[maybe_unused]] static void digits_many(const Matrix &m, int64_t band, int bands, const Digits &x, float *out,
                                         int64_t ld) {
  // Where one instruction multiplies bytes of any kind, all codes are such.
  if (Isa::ANY_BYTE || (m.kind == 8 && m.bits == 8)) return all_bands_many<8, D>(m, band, bands, x, out, ld);
  if (m.kind >= SUPER) return all_bands_many<SUPER + 8, D>(m, band, bands, x, out, ld);
  all_bands_many<4, D>(m, band, bands, x, out, ld);
}

static void rows_vectors(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld, void *) {
  if constexpr (Isa::WORDS > 0)
    if (x.words) return rows_words<>(m, band, bands, x, out, ld);
  if constexpr (Isa::FORM != Form::BYTES)
    if (x.parts) return all_bands_many<0, 0>(m, band, bands, x, out, ld);
  if (rows_short(m, band, bands, x, out, ld) || rows_short_many(m, band, bands, x, out, ld)) return;
  if constexpr (!Isa::SHORT_SUMS) {
    if (x.seg >= BLOCK && (x.count >= Isa::MANY || (SHORT_FEW && has_short_codes(m.kind)))) {
      if (x.digits == TRILOBITE_INT8) return digits_many<1>(m, band, bands, x, out, ld);
      return digits_many<3>(m, band, bands, x, out, ld);
    }
  }
  rows_few(m, band, bands, x, out, ld);
}

[[maybe_unused]] static int parts_vectors(const Activations &a) {
  if (a.digits == TRILOBITE_INT8) return 0;
  const bool bf16 = a.dtype == TRILOBITE_BF16, many = a.count >= Isa::MANY;
  if (Isa::FORM == Form::PAIRS && many && bf16 && !a.computed) return 1;
  // Others have lowest digits in most columns.
  const int words = a.bytes ? Isa::WORDS_OF_BYTES : Isa::WORDS;
  if (words && a.count >= words && (bf16 || a.two())) return WORDS;
  return Isa::FORM == Form::SINGLES && many && (a.bytes || !Isa::SHORT_SUMS) ? WHOLE : 0;
}
