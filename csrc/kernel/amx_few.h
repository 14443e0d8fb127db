// One token to a few: AMX tiles over digits. A is the digits of all tokens x the columns of a segment, just as they lie in
// `Digits`; B the codes of 16 rows x the same columns, as `decode` leaves them; C int32, digits of tokens x 16 rows. So
// all digits of all tokens cost one instruction, and what remains for the vector unit is to decode and to scale.
//
// Every segment is decoded a step before it is multiplied, since a tile's load waits for stores under way, and
// multiplied a step before its products are scaled. NB bands at a time are as many streams and independent chains.

constexpr int TILE_ROWS = 16;  // digits x tokens of one tile
constexpr int STREAMS = 4;
constexpr int AHEAD = 2, SLOTS = 3;

struct alignas(64) Ring {
  uint8_t codes[STREAMS][SLOTS][64 * ROWS];
  uint8_t products[STREAMS][2][TILE_ROWS * ROWS * 4];
};

// Columns [at, at + seg) of a tile.
template <int BITS>
static inline void decode_segment(const Matrix &m, const uint8_t *tile, int at, int seg, int64_t ahead, uint8_t *out) {
  const uint8_t *codes = tile + at / BLOCK * planes<BITS>(m) * 64;
  [[maybe_unused]] Sub sub;
  if constexpr (has_sub(BITS)) sub = read_sub<BITS>(m, tile + m.code_bytes);
  for (int b = 0; b < seg; b += BLOCK, codes += planes<BITS>(m) * 64) {
    for (int i = 0; i < planes<BITS>(m); i++) __builtin_prefetch(codes + ahead + 64 * i, 0, 3);
    Isa::Bytes c[8];
    decode<BITS>(codes, planes<BITS>(m), c);
    if constexpr (has_sub(BITS)) scale_codes<8>(sub, m.sub, at + b, c);
    UNROLL for (int step = 0; step < 8; step++) Isa::store(out + b * ROWS + 64 * step, c[step]);
  }
}

#define TRILOBITE_PRODUCT(C, A, B, CODES, PRODUCTS) \
  _tile_zero(C);                                    \
  _tile_loadd(B, CODES, 64);                        \
  _tile_dpbsud(C, A, B);                            \
  _tile_stored(C, PRODUCTS, 64)

// Even and odd segments use different tiles of activations, so that they overlap.
#define TRILOBITE_SEGMENT(A, P)                                       \
  _tile_loadd(A, q, seg);                                             \
  TRILOBITE_PRODUCT(0, A, 6, r->codes[0][slot], r->products[0][P]);   \
  if (NB > 1) {                                                       \
    TRILOBITE_PRODUCT(1, A, 7, r->codes[1][slot], r->products[1][P]); \
  }                                                                   \
  if (NB > 2) {                                                       \
    TRILOBITE_PRODUCT(2, A, 6, r->codes[2][slot], r->products[2][P]); \
  }                                                                   \
  if (NB > 3) {                                                       \
    TRILOBITE_PRODUCT(3, A, 7, r->codes[3][slot], r->products[3][P]); \
  }

template <int NB> static inline void multiply_segment(Ring *r, int64_t s, const int8_t *q, int seg) {
  const int slot = (int)(s % SLOTS);
  if (s & 1) {
    TRILOBITE_SEGMENT(5, 1);
  } else {
    TRILOBITE_SEGMENT(4, 0);
  }
}

// The dot products of token t: rows t, rows + t, .. of C are its digits.
template <int D> static inline Isa::Floats combine_rows(const uint8_t *c, int rows, int t) {
  Isa::Ints a[D];
  for (int d = 0; d < D; d++) a[d] = Isa::load(c + (d * rows + t) * ROWS * 4);
  return combine<D>(a);
}

template <int BITS, int D, int N, int NB>
static void bands_digits(const Matrix &m, int64_t band, const Digits &x, Ring *r, float *out, int64_t ld) {
  constexpr int FAR = PREFETCH / STREAMS;
  const int rows = x.count, seg = x.seg, per_group = m.group / seg;
  const int64_t stride = m.groups * m.tile_bytes, line = (int64_t)D * rows * seg;
  const uint8_t *first = m.packed + band * stride;
  Affine w[NB] = {};
  Isa::Floats acc[NB][N];
  for (int n = 0; n < NB; n++)
    for (int t = 0; t < N; t++) acc[n][t] = m.add && t < rows ? Isa::load(out + t * ld + n * ROWS) : Isa::set1(0);
  const uint8_t *next = first;  // tile of the segment that is decoded next, and its first column there
  int into = 0;
  auto decode_next = [&](int64_t s) {
    // At the end of its band a stream goes on with the next band that nobody reads yet.
    const int64_t at = next - first, ahead = at + FAR < stride ? FAR : FAR + (NB - 1) * stride;
    for (int n = 0; n < NB; n++) decode_segment<BITS>(m, next + n * stride, into, seg, ahead, r->codes[n][s % SLOTS]);
    if ((into += seg) == m.group) into = 0, next += m.tile_bytes;
  };
  for (int64_t s = 0; s < AHEAD && s < x.segments; s++) decode_next(s);
  multiply_segment<NB>(r, 0, x.q, seg);
  const float *scale = x.scale, *sum = x.sum;
  int64_t group = 0;
  int used = 0;
  for (int64_t s = 0; s < x.segments; s++, scale += rows, sum += rows) {
    if (s + AHEAD < x.segments) decode_next(s + AHEAD);
    if (s + 1 < x.segments) multiply_segment<NB>(r, s + 1, x.q + (s + 1) * line, seg);
    if (used == 0)
      for (int n = 0; n < NB; n++)
        w[n] = read_affine(m, first + n * stride + group * m.tile_bytes + m.code_bytes, band + n, group);
    if (++used == per_group) used = 0, group++;
    for (int n = 0; n < NB; n++) {
      const uint8_t *c = r->products[n][s & 1];
      UNROLL16 for (int t = 0; t < N; t++) {
        const Isa::Floats dot = Isa::mul(combine_rows<D>(c, rows, t), Isa::set1(scale[t]));
        acc[n][t] = Isa::fma(w[n].offset, Isa::set1(sum[t]), Isa::fma(w[n].scale, dot, acc[n][t]));
      }
    }
  }
  for (int n = 0; n < NB; n++) {
    UNROLL16 for (int t = 0; t < N; t++) {
      if (t < rows) Isa::store(out + t * ld + n * ROWS, acc[n][t]);
    }
  }
}

template <int BITS, int D, int N>
static void all_bands(const Matrix &m, int64_t band, int bands, const Digits &x, Ring *r, float *out, int64_t ld) {
  constexpr int NB = N <= 5 ? STREAMS : 1;
  int b = 0;
  for (; b + NB <= bands; b += NB) bands_digits<BITS, D, N, NB>(m, band + b, x, r, out + b * ROWS, ld);
  for (; b < bands; b++) bands_digits<BITS, D, N, 1>(m, band + b, x, r, out + b * ROWS, ld);
}

template <int BITS>
static void rows_digits(const Matrix &m, int64_t band, int bands, const Digits &x, Ring *r, float *out, int64_t ld) {
  if (x.digits == TRILOBITE_EXACT) switch (x.count) {
      case 2: return all_bands<BITS, 3, 2>(m, band, bands, x, r, out, ld);
      case 3: return all_bands<BITS, 3, 3>(m, band, bands, x, r, out, ld);
      case 4: return all_bands<BITS, 3, 4>(m, band, bands, x, r, out, ld);
      default: return all_bands<BITS, 3, 5>(m, band, bands, x, r, out, ld);
    }
  if (x.count <= 4) return all_bands<BITS, 1, 4>(m, band, bands, x, r, out, ld);
  if (x.count <= 8) return all_bands<BITS, 1, 8>(m, band, bands, x, r, out, ld);
  return all_bands<BITS, 1, 16>(m, band, bands, x, r, out, ld);
}

// Whether the tokens' digits fit one tile, and are enough for it to be faster than `rows_few`: measured.
static inline bool fit_tile(const Digits &x) {
  const int lines = x.digits * x.count;
  return x.parts == 0 && x.count > (x.digits == TRILOBITE_EXACT ? 1 : 2) && lines <= TILE_ROWS;
}

static void rows_amx_few(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld, Ring *r) {
  alignas(64) const TileConfig config(x.digits * x.count, x.seg / 4);
  config.load();
  switch (m.kind) {
    case E8P: rows_digits<E8P>(m, band, bands, x, r, out, ld); break;
    case E8: rows_digits<E8>(m, band, bands, x, r, out, ld); break;
    case 2: rows_digits<2>(m, band, bands, x, r, out, ld); break;
    case 3: rows_digits<3>(m, band, bands, x, r, out, ld); break;
    case 4: rows_digits<4>(m, band, bands, x, r, out, ld); break;
    case SUPER + 2: rows_digits<SUPER + 2>(m, band, bands, x, r, out, ld); break;
    case SUPER + 3: rows_digits<SUPER + 3>(m, band, bands, x, r, out, ld); break;
    case SUPER + 4: rows_digits<SUPER + 4>(m, band, bands, x, r, out, ld); break;
    default: rows_digits<8>(m, band, bands, x, r, out, ld);
  }
  _tile_release();
}
