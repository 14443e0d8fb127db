// Many tokens: AMX tiles over decoded panels (few tokens: amx_few.h). A is 16 tokens x some columns, B the codes of 16
// rows x the same columns in just the order in which `decode` leaves them, C 16 tokens x 16 rows.
//
// Exact mode multiplies bfloat16: codes are whole numbers below 256 and exact, so are the parts of the activations (see
// `Digits`), and C accumulates in fp32 for as long as the scale stays the same. int8 mode multiplies bytes; there every
// segment has an activation scale of its own, so C leaves its tile more often.

constexpr int PANEL = 512;  // columns decoded at a time: 16 KiB of codes, which stay in the first-level cache
// Bytes ahead, into the second-level cache: the first-level one is full of the panel and its activations.
constexpr int PANEL_PREFETCH = 6144;
constexpr int MAX_STRETCHES = PANEL / BLOCK;
constexpr int TOKENS_A_PASS = 256;  // tokens per decoded panel: what belongs to them stays in the second-level cache
constexpr int PARTS_FROM = 6;       // tokens; in exact mode the digits of fewer fit one tile

struct alignas(64) Panel {
  uint8_t codes[PANEL * ROWS * 2];
  float scale[MAX_STRETCHES][ROWS], offset[MAX_STRETCHES][ROWS];
  uint8_t products[2][TOKENS][ROWS * 4];
  // Stretches of columns with one scale: [first, first + width), counted from the panel's first column.
  int first[MAX_STRETCHES], width[MAX_STRETCHES];
  int count;
};

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  // Tiles 0 to 3: products; 4 and 5: `lines` of activations; 6 and 7: codes, `depth` lines of 4 bytes a row.
  TileConfig(int lines, int depth) {
    for (int i = 0; i < 8; i++) {
      rows[i] = (uint8_t)(i < 6 ? lines : depth);
      bytes[i] = (uint16_t)(i == 4 || i == 5 ? 4 * depth : 64);
    }
  }
  // GCC's _tile_loadconfig says that it reads eight bytes, so the rest may never be written.
  void load() const { __asm__ volatile("ldtilecfg %0" : : "m"(*this)); }
};

#include "amx_few.h"

static int parts_amx(int count, int dtype, int digits, bool intermediate) {
  if (count < PARTS_FROM || digits == TRILOBITE_INT8) return 0;
  if (dtype == TRILOBITE_F32) return 3;
  return dtype == TRILOBITE_F16 || intermediate ? 2 : 1;
}

// bfloat16 of 0 .. 31.
alignas(64) static const uint16_t WHOLE_NUMBERS[32] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                       0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
                                                       0x4180, 0x4188, 0x4190, 0x4198, 0x41a0, 0x41a8, 0x41b0, 0x41b8,
                                                       0x41c0, 0x41c8, 0x41d0, 0x41d8, 0x41e0, 0x41e8, 0x41f0, 0x41f8};

// Codes of one step [16 rows][4 columns] -> two lines of bfloat16, columns 0 and 2, then 1 and 3: the bytes of a dword
// that one permutation, or one shift, spreads to 16 bits. Activations have their columns in this order, too.
template <int BITS> static inline void store_bf16(uint8_t *out, __m512i codes, __m512i table) {
  if (code_bits(BITS) < 8) {
    // The index is the low five bits of each word: column 0 or 2, then 1 or 3. Codes have at most four.
    Isa::store(out, _mm512_permutexvar_epi16(codes, table));
    Isa::store(out + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table));
    return;
  }
  const __m512i low = _mm512_set1_epi32(255);
  __m512i f[4];
  for (int i = 0; i < 4; i++)
    f[i] = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(codes, 8 * i), low)));
  Isa::store(out, _mm512_or_si512(_mm512_srli_epi32(f[0], 16), f[2]));
  Isa::store(out + 64, _mm512_or_si512(_mm512_srli_epi32(f[1], 16), f[3]));
}

// Columns [at, at + width) of a tile.
template <int BITS> static inline void decode_stretch(const Matrix &m, const uint8_t *tile, int at, int width, bool bf16,
                                                      uint8_t *out) {
  const uint8_t *codes = tile + at / BLOCK * planes<BITS>(m) * 64;
  [[maybe_unused]] Sub sub;
  if constexpr (has_sub(BITS)) sub = read_sub<BITS>(m, tile + m.code_bytes);
  const __m512i table = _mm512_loadu_si512(WHOLE_NUMBERS);
  for (int b = 0; b < width; b += BLOCK, codes += planes<BITS>(m) * 64) {
    for (int j = 0; j < planes<BITS>(m); j++) __builtin_prefetch(codes + PANEL_PREFETCH + 64 * j, 0, 2);
    Isa::Bytes c[8];
    decode<BITS>(codes, planes<BITS>(m), c);
    if constexpr (has_sub(BITS)) scale_codes<8>(sub, m.sub, at + b, c);
    UNROLL for (int j = 0; j < 8; j++) {
      if (bf16) store_bf16<BITS>(out + (b * ROWS + 64 * j) * 2, c[j], table);
      else Isa::store(out + b * ROWS + 64 * j, c[j]);
    }
  }
}

static void decode_panel(const Matrix &m, int64_t band, int64_t first, int columns, int longest, bool bf16, Panel *p) {
  p->count = 0;
  for (int at = 0, width; at < columns; at += width) {
    const int64_t column = first + at, group = column / m.group;
    const int into = (int)(column - group * m.group);
    width = (int)(m.group - into < columns - at ? m.group - into : columns - at);
    if (width > longest) width = longest;
    const uint8_t *tile = m.packed + (band * m.groups + group) * m.tile_bytes;
    const Affine w = read_affine(m, tile + m.code_bytes, band, group);
    Isa::store(p->scale[p->count], w.scale);
    Isa::store(p->offset[p->count], w.offset);
    p->first[p->count] = at, p->width[p->count] = width, p->count++;
    uint8_t *out = p->codes + at * ROWS * (bf16 ? 2 : 1);
    switch (m.kind) {
      case E8P: decode_stretch<E8P>(m, tile, into, width, bf16, out); break;
      case E8: decode_stretch<E8>(m, tile, into, width, bf16, out); break;
      case 2: decode_stretch<2>(m, tile, into, width, bf16, out); break;
      case 3: decode_stretch<3>(m, tile, into, width, bf16, out); break;
      case 4: decode_stretch<4>(m, tile, into, width, bf16, out); break;
      case SUPER + 2: decode_stretch<SUPER + 2>(m, tile, into, width, bf16, out); break;
      case SUPER + 3: decode_stretch<SUPER + 3>(m, tile, into, width, bf16, out); break;
      case SUPER + 4: decode_stretch<SUPER + 4>(m, tile, into, width, bf16, out); break;
      default: decode_stretch<8>(m, tile, into, width, bf16, out);
    }
  }
}

// Products of one stretch -> p->products[to]. Even and odd stretches use different tiles, so that they overlap.
#define TRILOBITE_STRETCH(C, A, B)                        \
  _tile_zero(C);                                          \
  for (int c = 0; c < chunks; c++, codes += 1024)         \
    for (int part = 0; part < parts; part++, q += line) { \
      _tile_loadd(B, codes, 64);                          \
      _tile_loadd(A, q, 64);                              \
      _tile_dpbf16ps(C, A, B);                            \
    }                                                     \
  _tile_stored(C, p->products[C], 64)

static inline void multiply_bf16(Panel *p, int s, const Digits &x, int block, int64_t column) {
  const int chunks = p->width[s] / BLOCK, parts = x.parts;
  const int64_t line = (int64_t)x.rows(block) * BLOCK;
  const uint8_t *codes = p->codes + p->first[s] * ROWS * 2;
  const uint16_t *q = x.part(block, (column + p->first[s]) / BLOCK, 0, 0);
  if (s & 1) {
    TRILOBITE_STRETCH(1, 5, 7);
  } else {
    TRILOBITE_STRETCH(0, 4, 6);
  }
}

static inline void multiply_int8(Panel *p, int s, const Digits &x, int block, int64_t column) {
  const int8_t *q = x.q_block(block) + (column + p->first[s]) * x.rows(block);
  const uint8_t *codes = p->codes + p->first[s] * ROWS;
  if (s & 1) {
    _tile_loadd(5, q, x.seg);
    TRILOBITE_PRODUCT(1, 5, 7, codes, p->products[1]);
  } else {
    _tile_loadd(4, q, x.seg);
    TRILOBITE_PRODUCT(0, 4, 6, codes, p->products[0]);
  }
}

template <bool BF16> static inline void multiply(Panel *p, int s, const Digits &x, int block, int64_t column) {
  if (BF16) multiply_bf16(p, s, x, block, column);
  else multiply_int8(p, s, x, block, column);
}

// One block of up to N tokens x 16 rows x the panel. The next stretch's products are under way while the last one's are
// scaled; the sums of the tokens stay in registers.
template <bool BF16, int N>
static void block_panel(Panel *p, const Digits &x, int block, int64_t column, bool add, float *out, int64_t ld) {
  const int rows = x.rows(block);
  Isa::Floats acc[N];
  UNROLL16 for (int t = 0; t < N; t++) acc[t] = !add || t >= rows ? Isa::set1(0) : Isa::load(out + t * ld);
  multiply<BF16>(p, 0, x, block, column);
  for (int s = 0; s < p->count; s++) {
    if (s + 1 < p->count) multiply<BF16>(p, s + 1, x, block, column);
    const auto &c = p->products[s & 1];
    const int64_t segment = (column + p->first[s]) / x.seg;
    const float *scale = x.scale_block(block) + segment * rows, *sum = x.sum_block(block) + segment * rows;
    const Isa::Floats w = Isa::load(p->scale[s]), offset = Isa::load(p->offset[s]);
    UNROLL16 for (int t = 0; t < N; t++) {
      const Isa::Floats dot =
          BF16 ? Isa::load((const float *)c[t]) : Isa::mul(Isa::to_float(Isa::load(c[t])), Isa::set1(scale[t]));
      acc[t] = Isa::fma(offset, Isa::set1(sum[t]), Isa::fma(w, dot, acc[t]));
    }
    // A stretch of bfloat16 spans segments: activations have no scales there, but a sum in each segment.
    for (int more = x.seg; BF16 && more < p->width[s]; more += x.seg) {
      sum += rows;
      UNROLL16 for (int t = 0; t < N; t++) acc[t] = Isa::fma(offset, Isa::set1(sum[t]), acc[t]);
    }
  }
  UNROLL16 for (int t = 0; t < N; t++) {
    if (t < rows) Isa::store(out + t * ld, acc[t]);
  }
}

template <bool BF16>
static void blocks_panel(Panel *p, const Digits &x, int from, int to, int n, int64_t column, bool add, float *out,
                         int64_t ld) {
  for (int block = from; block < to; block++) {
    float *o = out + (int64_t)block * TOKENS * ld;
    if (n == 4) block_panel<BF16, 4>(p, x, block, column, add, o, ld);
    else if (n == 8) block_panel<BF16, 8>(p, x, block, column, add, o, ld);
    else block_panel<BF16, 16>(p, x, block, column, add, o, ld);
  }
}

static void rows_amx(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld, void *scratch) {
  if (x.seg < BLOCK) return rows_few(m, band, bands, x, out, ld, scratch);  // a quarter of a tile's depth
  auto *p = (Panel *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
  if (fit_tile(x)) return rows_amx_few(m, band, bands, x, out, ld, (Ring *)p);
  if (x.parts == 0 && x.count <= 2) return rows_few(m, band, bands, x, out, ld, scratch);
  const bool bf16 = x.parts > 0;
  constexpr int BLOCKS = TOKENS_A_PASS / TOKENS;
  for (int from = 0; from < x.blocks(); from += BLOCKS) {
    const int to = from + BLOCKS < x.blocks() ? from + BLOCKS : x.blocks();
    // As many accumulators as there are tokens: a block's loops are unrolled, and lines of zeros cost as much as others.
    const int n = to - from > 1 || x.rows(from) > 8 ? 16 : x.rows(from) > 4 ? 8 : 4;
    alignas(64) const TileConfig config(n, bf16 ? 16 : x.seg / 4);
    config.load();
    for (int64_t column = 0; column < m.k; column += PANEL) {
      const int columns = m.k - column < PANEL ? (int)(m.k - column) : PANEL;
      for (int b = 0; b < bands; b++) {
        const bool add = m.add || column > 0;
        decode_panel(m, band + b, column, columns, bf16 ? PANEL : x.seg, bf16, p);
        if (bf16) blocks_panel<true>(p, x, from, to, n, column, add, out + b * ROWS, ld);
        else blocks_panel<false>(p, x, from, to, n, column, add, out + b * ROWS, ld);
      }
    }
  }
  _tile_release();  // the system saves 8 KiB of tiles at every switch to another thread while they are in use
}

// The rate of the tiles, for probes: bfloat16 in exact mode, bytes in int8 mode.
static int64_t spin_tiles(int64_t rounds, int digits) {
  alignas(64) const TileConfig config(TILE_ROWS, 16);
  config.load();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(6);
  const int64_t turns = rounds / 64;  // a tile's product is worth many vector products
  for (int64_t r = 0; r < turns; r++) {
    if (digits == TRILOBITE_EXACT) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 6);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(3, 4, 6);
    } else {
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 6);
      _tile_dpbsud(2, 4, 6);
      _tile_dpbsud(3, 4, 6);
    }
  }
  _tile_release();
  return turns * 4 * TILE_ROWS * ROWS * (digits == TRILOBITE_EXACT ? 32 : 64);
}
