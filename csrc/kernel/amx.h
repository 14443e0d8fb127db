// Many tokens: AMX tiles over decoded panels (few tokens: amx_few.h). A is 16 tokens x some columns, B the codes of 16
// rows x the same columns in just the order in which `decode` leaves them, C 16 tokens x 16 rows.
//
// Exact mode multiplies bfloat16: codes are whole numbers below 256 and exact, so are the parts of the activations (see
// `Digits`), and C accumulates in fp32 for as long as the scale stays the same. int8 mode multiplies bytes; there every
// segment has an activation scale of its own, so C leaves its tile more often.

constexpr int PANEL = 512;  // columns decoded at a time: 16 KiB of codes, which stay in the first-level cache
constexpr int MAX_STRETCHES = PANEL / BLOCK;
constexpr int TOKENS_A_PANEL = 256;  // what belongs to them stays in the second-level cache
constexpr int PARTS_FROM = 6;        // tokens; in exact mode the digits of fewer fit one tile

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

static int parts_amx(const Activations &a) {
  if (a.count < PARTS_FROM || a.digits == TRILOBITE_INT8) return 0;
  if (a.dtype == TRILOBITE_F32) return 3;
  return a.dtype == TRILOBITE_F16 || a.computed ? 2 : 1;
}

template <bool BF16>
static void decode_panel(const Matrix &m, int64_t band, int64_t first, int columns, int longest, Panel *p) {
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
    decode_columns<BF16 ? Form::PAIRS : Form::BYTES, 0>(m, tile, into, width, p->codes + at * ROWS * (BF16 ? 2 : 1));
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
  if (x.seg < BLOCK) return rows_few(m, band, bands, x, out, ld);  // a quarter of a tile's depth
  auto *p = (Panel *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
  if (fit_tile(x)) return rows_amx_few(m, band, bands, x, out, ld, (Ring *)p);
  if (rows_short(m, band, bands, x, out, ld)) return;
  if (x.parts == 0 && x.count <= 2) return rows_few(m, band, bands, x, out, ld);
  const bool bf16 = x.parts > 0;
  constexpr int BLOCKS = TOKENS_A_PANEL / TOKENS;
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
        if (bf16) {
          decode_panel<true>(m, band + b, column, columns, PANEL, p);
          blocks_panel<true>(p, x, from, to, n, column, add, out + b * ROWS, ld);
        } else {
          decode_panel<false>(m, band + b, column, columns, x.seg, p);
          blocks_panel<false>(p, x, from, to, n, column, add, out + b * ROWS, ld);
        }
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
