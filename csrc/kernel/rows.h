// Few tokens: stream the tiles once, decode each step into a register, and use
// it for NT tokens.
//
// Per segment of 16, 32 or 64 columns the dot products are integers, exact;
// then
//     y += scale * (x_scale * sum(code * digit)) + offset * sum(x)
// once per 16 rows. Lanes are rows, so there are no horizontal sums.

// Bytes ahead, of all streams together, into the cache that Isa::LOCALITY says.
constexpr int PREFETCH = 8192;

// Sums of digits. 2^8 * d2 + d1 fits int32 (64 columns, 8-bit codes); the lowest of three is added in fp32.
static inline Isa::Floats combine_high(const Isa::Ints high[2]) {
  return Isa::to_float(Isa::shl8_add(high[1], high[0]));
}

static inline Isa::Floats combine_low(Isa::Floats high, Isa::Ints low) {
  return Isa::fma(high, Isa::set1(256.0f), Isa::to_float(low));
}

template <int D> static inline Isa::Floats combine(const Isa::Ints a[D]) {
  if constexpr (D == 1) return Isa::to_float(a[0]);
  else return combine_low(combine_high(a + 1), a[0]);
}

// Sums of WIDE bands += codes of STEPS steps times the digits of NT tokens. V:
// not every Isa has short sums.
template <int BITS, int D, int NT, int WIDE, int STEPS, typename V = Isa>
static inline void multiply_steps(Isa::Ints a[WIDE][NT][D], const Isa::Bytes c[WIDE][STEPS], const int8_t *q,
                                  int64_t digit, int seg) {
  if constexpr (Isa::SHORT_SUMS && code_bits(BITS) < 8) {
    UNROLL for (int w = 0; w < WIDE; w++) UNROLL for (int t = 0; t < NT; t++) UNROLL for (int d = 0; d < D; d++)
        a[w][t][d] = V::template dots<STEPS>(a[w][t][d], c[w], q + d * digit + t * seg);
    return;
  }
  UNROLL for (int step = 0; step < STEPS; step++) UNROLL for (int t = 0; t < NT; t++)
      UNROLL for (int d = 0; d < D; d++) {
    const int8_t *x = q + d * digit + t * seg + 4 * step;
    const auto four = [x] {
      if constexpr (WIDE > 1) return Isa::quad(x);
      else return Isa::quad_once(x);
    }();
    UNROLL for (int w = 0; w < WIDE; w++) {
      if constexpr (BITS >= SUPER) a[w][t][d] = Isa::dot_counts(a[w][t][d], c[w][step], four);
      else a[w][t][d] = Isa::dot<code_bits(BITS)>(a[w][t][d], c[w][step], four);
    }
  }
}

// How a block is worked off: STEPS of four columns of WIDE bands are decoded,
// then multiplied. Where registers allow, all bands share what is loaded of the
// activations; two at a time are more independent sums.
template <int BITS, int D, int NB> struct Portion {
  static constexpr bool SHARED = NB > 1 && BITS < E8P && !Isa::SHORT_SUMS;
  static constexpr int WIDE = SHARED ? NB : D > 1 || NB % 2 ? 1 : 2, STEPS = SHARED ? 2 : 8;
};

// Sums of NB bands += steps [FROM, TO) of a block; `at` is its column in the
// tile.
template <int BITS, int D, int NT, int NB, int FROM, int TO>
static inline void multiply_block(const Matrix &m, Isa::Ints a[NB][NT][D], const uint8_t *codes, int64_t stride,
                                  const Sub *sub, int at, const int8_t *q, int64_t digit, int seg) {
  using P = Portion<BITS, D, NB>;
  constexpr int STEPS = P::STEPS < TO - FROM ? P::STEPS : TO - FROM, WIDE = P::WIDE;
  UNROLL for (int n = 0; n < NB; n += WIDE) {
    Isa::Bytes c[WIDE][STEPS];
    UNROLL for (int w = 0; w < WIDE; w++) {
      decode_steps<BITS, FROM, STEPS>(codes + (n + w) * stride, planes<BITS>(m), c[w]);
      if constexpr (has_sub(BITS)) scale_codes<STEPS>(sub[n + w], m.sub, at + 4 * FROM, c[w]);
    }
    multiply_steps<BITS, D, NT, WIDE, STEPS>(a + n, c, q, digit, seg);
  }
  if constexpr (FROM + STEPS < TO)
    multiply_block<BITS, D, NT, NB, FROM + STEPS, TO>(m, a, codes, stride, sub, at, q + 4 * STEPS, digit, seg);
}

// NB bands at a time share what is loaded of the activations; each is a stream
// of its own. STEPS of four columns are a block, or half of one, where segments
// are as short or registers few.
template <int BITS, int D, int NT, int NB, int STEPS>
static void band_tokens(const Matrix &m, int64_t band, const Digits &x, int block, int first, float *out, int64_t ld) {
  constexpr int FAR = PREFETCH / NB;
  const int rows = x.rows(block), seg = x.seg, per_group = m.group / seg;
  const int64_t digit = (int64_t)rows * seg, stride = m.groups * m.tile_bytes, hop = m.apart * stride;
  const int8_t *q = x.q_block(block) + (int64_t)first * seg;
  const float *scale = x.scale_block(block) + first, *sum = x.sum_block(block) + first;
  const uint8_t *tile = m.packed + band * stride;
  const bool plain = has_plain_scales(m);
  Isa::Floats acc[NB][NT];
  for (int n = 0; n < NB; n++)
    for (int t = 0; t < NT; t++) acc[n][t] = m.add ? Isa::load(out + t * ld + n * ROWS) : Isa::set1(0);
  for (int64_t g = 0; g < m.groups; g++, tile += m.tile_bytes) {
    [[maybe_unused]] Sub sub[NB];
    const uint8_t *codes = tile;
    // At the end of its band a stream goes on with the next band that nobody
    // reads yet: where bands lie apart, the next one.
    const int64_t ahead = g * m.tile_bytes + FAR < stride ? FAR : FAR + (hop == stride ? NB - 1 : 0) * stride;
    UNROLL for (int n = 0; n < NB; n++) {
      const uint8_t *meta = tile + n * hop + m.code_bytes;
      __builtin_prefetch(meta + ahead, 0, Isa::LOCALITY);
      if constexpr (has_sub(BITS)) sub[n] = read_sub<BITS>(m, meta);
    }
    for (int s = 0; s < per_group; s++, q += D * digit, scale += rows, sum += rows) {
      Isa::Ints a[NB][NT][D];
      UNROLL for (int n = 0; n < NB; n++) UNROLL for (int t = 0; t < NT; t++) UNROLL for (int d = 0; d < D; d++)
          a[n][t][d] = Isa::zero();
      for (int b = 0; b < seg; b += 4 * STEPS) {
        const int at = s * seg + b, half = STEPS == 8 ? 0 : at / HALF & 1;
        if (half == 0)
          UNROLL for (int n = 0; n < NB; n++) for (int i = 0; i < planes<BITS>(m); i++)
              __builtin_prefetch(codes + n * hop + ahead + 64 * i, 0, Isa::LOCALITY);
        if (half == 0) multiply_block<BITS, D, NT, NB, 0, STEPS>(m, a, codes, hop, sub, at, q + b, digit, seg);
        else multiply_block<BITS, D, NT, NB, 4, 8>(m, a, codes, hop, sub, at - HALF, q + b, digit, seg);
        if (STEPS == 8 || half) codes += planes<BITS>(m) * 64;
      }
      // Read here, so that registers hold none of it while codes are
      // multiplied.
      UNROLL for (int n = 0; n < NB; n++) {
        const uint8_t *meta = tile + n * hop + m.code_bytes;
        const Affine w = plain ? read_plain(meta) : read_affine(m, meta, band + n * m.apart, g);
        UNROLL for (int t = 0; t < NT; t++) {
          const Isa::Floats dot = Isa::mul(combine<D>(a[n][t]), Isa::set1(scale[t]));
          acc[n][t] = Isa::fma(w.offset, Isa::set1(sum[t]), Isa::fma(w.scale, dot, acc[n][t]));
        }
      }
    }
  }
  for (int n = 0; n < NB; n++)
    for (int t = 0; t < NT; t++) Isa::store(out + t * ld + n * ROWS, acc[n][t]);
}

template <int BITS, int D, int STEPS>
static void band_few(const Matrix &m, int64_t band, const Digits &x, float *out, int64_t ld) {
  for (int block = 0; block < x.blocks(); block++) {
    float *o = out + (int64_t)block * TOKENS * ld;
    const int n = x.rows(block);
    int t = 0;
    if constexpr (Isa::TOKENS_AT_ONCE >= 4)
      for (; t + 4 <= n; t += 4) band_tokens<BITS, D, 4, 1, STEPS>(m, band, x, block, t, o + t * ld, ld);
    if constexpr (Isa::TOKENS_AT_ONCE >= 4)
      if (t + 3 <= n) band_tokens<BITS, D, 3, 1, STEPS>(m, band, x, block, t, o + t * ld, ld), t += 3;
    if constexpr (Isa::TOKENS_AT_ONCE >= 2)
      for (; t + 2 <= n; t += 2) band_tokens<BITS, D, 2, 1, STEPS>(m, band, x, block, t, o + t * ld, ld);
    for (; t < n; t++) band_tokens<BITS, D, 1, 1, STEPS>(m, band, x, block, t, o + t * ld, ld);
  }
}

template <int BITS, int D, int STEPS>
static void bands_few(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  constexpr int NB = Isa::STREAMS;
  int b = 0;
  if constexpr (NB > 1)
    if (x.count == 1)
      for (; b + NB <= bands; b += NB)
        band_tokens<BITS, D, 1, NB, STEPS>(m, band + b * m.apart, x, 0, 0, out + b * ROWS, ld);
  for (; b < bands; b++) band_few<BITS, D, STEPS>(m, band + b * m.apart, x, out + b * ROWS, ld);
}

template <int KIND, int D, int STEPS>
static void bands_kind(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  // Others are done by short.h, and here in segments of 16 columns alone.
  if constexpr (STEPS < 8 || !SHORT_FEW || !has_short_codes(KIND)) bands_few<KIND, D, STEPS>(m, band, bands, x, out, ld);
}

template <int D, int STEPS>
static void bands_bits(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  switch (m.kind) {
    case E8P: return bands_kind<E8P, D, STEPS>(m, band, bands, x, out, ld);
    case E8: return bands_kind<E8, D, STEPS>(m, band, bands, x, out, ld);
    case 2: return bands_kind<2, D, STEPS>(m, band, bands, x, out, ld);
    case 3: return bands_kind<3, D, STEPS>(m, band, bands, x, out, ld);
    case 4: return bands_kind<4, D, STEPS>(m, band, bands, x, out, ld);
    case SUPER + 2: return bands_kind<SUPER + 2, D, STEPS>(m, band, bands, x, out, ld);
    case SUPER + 3: return bands_kind<SUPER + 3, D, STEPS>(m, band, bands, x, out, ld);
    case SUPER + 4: return bands_kind<SUPER + 4, D, STEPS>(m, band, bands, x, out, ld);
    default: return bands_kind<8, D, STEPS>(m, band, bands, x, out, ld);
  }
}

static void rows_few(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  if (x.seg < BLOCK) {
    if (x.digits == 1) bands_bits<1, 4>(m, band, bands, x, out, ld);
    else bands_bits<3, 4>(m, band, bands, x, out, ld);
  } else if (x.digits == 1) {
    bands_bits<1, Isa::STEPS>(m, band, bands, x, out, ld);
  } else {
    bands_bits<3, Isa::STEPS>(m, band, bands, x, out, ld);
  }
}

[[maybe_unused]] static int no_parts(const Activations &) { return 0; }
