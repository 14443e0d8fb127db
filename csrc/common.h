// What the parts of the engine share: a packed matrix, prepared activations, and the function table of a tier.
// Included by every translation unit, so nothing here may generate code from the standard library.
#ifndef TRILOBITE_COMMON_H
#define TRILOBITE_COMMON_H
#include <stddef.h>
#include <stdint.h>

#include "trilobite.h"

namespace trilobite {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int ROWS = 16;   // rows of a tile: one per 32-bit lane
constexpr int BLOCK = 32;  // columns of a block of codes
constexpr int HALF = 16;   // columns of the smallest group: half a block, which is whole planes unless codes have 3 bits
constexpr int64_t SHORT_ROW = 8;      // values of a row of a softmax of 16 bits
constexpr int64_t MOST_TAPS = 8;      // inputs of a channel that a convolution along the text has
constexpr int64_t STATE_TOKENS = 32;  // that meet columns of a state in turns
constexpr int UNIT = 64;              // rows of a unit of work: four bands, one group of a compensator
constexpr int UNIT_BANDS = UNIT / ROWS;
constexpr int SPAN = 256;     // columns of a row under one super-scale
constexpr int TOKENS = 16;    // tokens that are laid out together
constexpr int LR_GROUP = 64;  // values of a compensator factor that share a scale
constexpr int WHOLE = -1;     // parts: none, fp32
constexpr int WORDS = -2;     // parts: none, digits of which the upper two are one number
constexpr int SLACK = 2048;   // bytes readable past prepared activations: whole tiles are loaded at the end
constexpr int SUMS = 8;       // int16 that a digit of a segment has for its sums

// How codes are read: 2, 3, 4 or 8 bits of an affine format, or a stage of a lattice format (formats/lattice.py).
constexpr int E8P = 16, E8 = 17;
// SUPER + 2, 3 or 4 bits: an affine format under super-scales (formats/superscale.py).
constexpr int SUPER = 32;

// How a product for many tokens wants codes: as bytes, or as numbers (kernel/panel.h).
enum class Form { BYTES, WORDS, PAIRS, SINGLES };

// The transform T x = H (s * x) / sqrt(n) of one side of a lattice matrix; cores and orders: trilobite_rotation.
struct Rotation {
  const uint8_t *signs;  // NULL: no transform
  bool tuned;            // signs are n fp16 instead of bits
  const trilobite_rotation *h;

  int64_t bytes() const { return tuned ? 2 * h->n : ceil_div(h->n, 8); }
};

// A packed matrix [n, k] (formats/affine.py, formats/weight.py). Pointers need no alignment. A lattice format is cut into
// groups, too, all with the scale and offset that stand here; `packed` then is where the first tile's stage begins. Under
// super-scales `group` is the width of a tile, which has scales for every `sub` columns.
struct Matrix {
  const uint8_t *packed, *super, *lra, *lrb;
  int64_t n, k, rank;
  int rank_bits, bits, group;
  int sub;  // columns of a group under super-scales, otherwise 0
  bool symmetric, double_quant;
  bool wide;  // metadata is fp32 (scale, offset): only the expanded V of a compensator
  int64_t bands, groups, tile_bytes, code_bytes, supers;
  int kind;             // `bits`, E8P, E8, SUPER + `bits`
  float scale, offset;  // of a stage: w = scale * code + offset
  float second;         // scale of the second stage of a lattice format, 0 where there is none
  bool add;             // results are added to what is there
  // From one of the bands that are multiplied together to the next: of one token they may lie apart (spread_bands).
  int64_t apart = 1;
  Rotation in, out;

  bool lattice() const { return kind == E8P || kind == E8; }
  // Whether what is multiplied has 8 bits: codes, what they count under super-scales, or those of the compensator.
  bool has_bytes() const { return sub || (kind == 8 && bits == 8) || (rank > 0 && rank_bits == 8); }
};

// Where the lowest of three digits is not zero, in steps of four columns of a segment: of 64 bfloat16 numbers one or two are
// so much less than the largest that they have one. step: the first MOST of them; four: their digits, or zeros; parts: a bit
// for each 16 columns, the lowest for the first, that has any.
struct LowSteps {
  static constexpr int MOST = 2;
  int8_t four[MOST][4];
  uint8_t step[MOST], parts;
  bool more;  // than MOST
};

// The same beside words, of a block's tokens: the pairs of columns, token by token; count: of all pairs, also those that have
// no room. The first fifteen, often all, lie in the line that is fetched ahead.
struct alignas(64) LowPairs {
  static constexpr int MOST = 8 * TOKENS - 1;
  struct Pair {
    int8_t two[2];
    uint8_t line, token;
  };
  int32_t count;
  Pair pairs[MOST];
};

// What enters a product, for the form in which a tier wants it. dtype: of the model's activations.
struct Activations {
  int64_t count, k;
  int seg, dtype, digits;
  bool computed;  // in fp32, from those of dtype: results of an activation function, rotated values
  bool bytes;     // of a matrix that reads them (`Matrix::has_bytes`)
  bool sums;      // of a matrix that reads sums of digits, as those under super-scales do

  bool two() const { return digits == TRILOBITE_EXACT && computed && dtype != TRILOBITE_F32; }
};

// Activations [count, k], prepared for a tier, in one of three forms. Blocks are of 16 tokens, the last one smaller.
//
// Digits (parts = 0): per token and segment of 16, 32 or 64 columns a scale, and 1 or 3 signed 8-bit digits of x / scale,
// the most significant last. Products with codes are then exact in int32, on every tier. `two`: the lowest of three is left
// out and zero.
//   q      [block][segment][digit][token of the block][column of the segment] int8
//   scale  [block][segment][token]
//   sums   [block][segment][token][digit][8]: of the digits in each 16 columns, then in each 32; the rest is unused. Only
//          tiers that read them (SHORT_FEW) write them, and only for matrices that do (`summed`).
//   low    [block][segment][token]: of three digits; only tiers with short sums write them
// Words: digits of which the upper two are one 16-bit number, 256 * d2 + d1, for instructions that multiply those.
//   q      [block][segment]: int16 [token][column; in every four, the middle two are swapped], then the lowest digits, int8,
//          likewise
//   scale  of words
//   pairs  [block][segment]
// Parts (parts > 0): x as a sum of 1 to 3 bfloat16 numbers, for instructions that multiply those; or, `whole`, as it is.
//   q      [block][32 columns][part][token of the block][column; in every four, the middle two are swapped] bfloat16
//   q      [block][32 columns][token of the block][column] fp32
// All:
//   sum    [block][segment][token]: the segment's sum of x
struct Digits {
  int8_t *q;
  float *scale, *sum;
  int16_t *sums;
  LowSteps *low;
  LowPairs *pairs;
  int64_t k, segments;
  int count, seg, digits, parts;
  bool whole, words, two, summed;

  int element_bytes() const { return whole ? 4 : parts ? 2 * parts : digits; }
  int blocks() const { return (count + TOKENS - 1) / TOKENS; }
  int rows(int block) const { return count - block * TOKENS < TOKENS ? count - block * TOKENS : TOKENS; }
  int8_t *q_block(int block) const { return q + (int64_t)block * TOKENS * k * element_bytes(); }
  float *scale_block(int block) const { return scale + (int64_t)block * TOKENS * segments; }
  float *sum_block(int block) const { return sum + (int64_t)block * TOKENS * segments; }
  int16_t *sums_block(int block) const {
    return sums == nullptr ? nullptr : sums + (int64_t)block * TOKENS * segments * digits * SUMS;
  }
  LowSteps *low_block(int block) const { return low ? low + (int64_t)block * TOKENS * segments : nullptr; }
  LowPairs *pairs_block(int block) const { return pairs ? pairs + block * segments : nullptr; }
  // Of a segment of one token: its words, and its lowest digits.
  int16_t *word(int block, int64_t s, int row) const {
    return (int16_t *)(q_block(block) + s * 3 * rows(block) * seg) + row * seg;
  }
  int8_t *lowest(int block, int64_t s, int row) const {
    return q_block(block) + (s * 3 + 2) * rows(block) * seg + row * seg;
  }
  // bfloat16 of 32 columns of one token.
  uint16_t *part(int block, int64_t chunk, int i, int row) const {
    return (uint16_t *)q_block(block) + ((chunk * parts + i) * rows(block) + row) * BLOCK;
  }
  // fp32 of 32 columns of one token.
  float *floats(int block, int64_t chunk, int row) const {
    return (float *)q_block(block) + (chunk * rows(block) + row) * BLOCK;
  }
  // The tokens of up to `most` blocks from `block`.
  Digits blocks_from(int block, int most) const {
    const int rest = count - block * TOKENS, n = rest < most * TOKENS ? rest : most * TOKENS;
    Digits some = *this;
    some.q = q_block(block), some.scale = scale_block(block), some.sum = sum_block(block);
    some.sums = sums_block(block), some.low = low_block(block), some.pairs = pairs_block(block), some.count = n;
    return some;
  }
};

// Rows [row, row + length) of the list of rows, for `heads` heads of k from `head`, and what comes out for each head of q
// that they serve: the largest score, the sum of the weights relative to it, the weighted values.
struct AttentionPart {
  int64_t text, row, length, head, heads;
  float *top, *total, *sums;
};

// A block of a prompt: `tokens` texts from `text` on, each of which has one row more than the one before it, for the heads
// [head, head + heads) of q, which share a head of k. Not more than QUERIES of both. base: where in the list of rows those
// that are worked on at a time, PROMPT_ROWS, are counted from.
struct PromptPart { int64_t text, tokens, base, head, heads; };

constexpr int QUERIES = 64, PROMPT_ROWS = 72;

// One implementation of everything that touches many elements. All accumulate in fp32.
struct Tier {
  const char *name;
  // Bytes of thread-local scratch that `rows` may use.
  size_t scratch_bytes;
  // bfloat16 parts in which `rows` wants them, WHOLE for fp32, WORDS, or 0 for digits. What is computed in fp32 from 16-bit
  // activations keeps 16 bits.
  int (*parts)(const Activations &a);
  // Rows `index[i]` (or i when index is NULL) of x [.., k] -> tokens of one block of d.
  void (*quantize_block)(const void *x, int dtype, const int32_t *index, const Digits &d, int block);
  // Columns [column, column + width) of all tokens, from fp32 x [count, ld]; width is a multiple of d.seg.
  void (*quantize_columns)(const float *x, int64_t ld, int64_t column, int width, const Digits &d);
  // out [count, ld] = x W^T for the rows of `bands` bands from `band`.
  void (*rows)(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld, void *scratch);
  // z [count, ld] = x V^T for ranks [rank, rank + 16).
  void (*low_rank_v)(const Matrix &m, int64_t rank, const Digits &x, float *z, int64_t ld, void *scratch);
  // out [count, ld] += z U^T for the 64 rows from `row`; z is [count, ldz].
  void (*low_rank_u)(const Matrix &m, int64_t row, const float *z, int64_t ldz, int count, float *out, int64_t ld);
  // gate = act(gate) * up, or act(gate) when up is NULL; numbers: of forms that have some.
  void (*activate)(int activation, const float *numbers, float *gate, const float *up, int64_t count);
  // Some rows of a text; the scratch is what attention.cpp gives. Then head by head: all parts of one, `out` is [width].
  void (*attend)(const trilobite_attention_args &a, const AttentionPart &p, float *scratch);
  void (*attend_join)(const trilobite_attention_args &a, int64_t text, int64_t head, const AttentionPart &p,
                      int64_t count, float *out);
  // The results of a block of a prompt; the scratch is what attention_prompt.cpp gives.
  void (*attend_prompt)(const trilobite_attention_args &a, const PromptPart &p, float *scratch);
  // out [tokens, ld] = rows [row, row + rows) of a dense matrix [.., k] of dtype times x [tokens, k] of fp32.
  void (*dense)(const void *w, int dtype, int64_t row, int64_t rows, int64_t k, const float *x, int64_t tokens,
                float *out, int64_t ld);
  // Of layers with a state: channels [first, first + count); one head, the scratch is what states.cpp gives.
  void (*convolve)(const trilobite_convolution_args &a, int64_t first, int64_t count);
  void (*delta)(const trilobite_delta_args &a, int64_t head, float *scratch);
  void (*scan)(const trilobite_scan_args &a, int64_t head, float *scratch);
  // fp32 -> dtype.
  void (*store)(const float *x, int64_t count, void *y, int dtype);
  // Small operators of a step: element by element, and of rows.
  void (*map)(const trilobite_step_node &n);
  void (*sum)(const trilobite_step_node &n);
  void (*softmax)(const trilobite_step_node &n);
  // For probes: read bytes, prefetched so many `ahead`; do `rounds` independent products of the kind that a mode uses
  // for many tokens, and say how many multiply-accumulates of codes and activations that were.
  uint64_t (*read)(const uint8_t *p, int64_t bytes, int64_t ahead);
  int64_t (*spin)(int64_t rounds, int digits);
  // x [n] -> T x, or with `adjoint` T^T x, in place; buffer is [n] too.
  void (*rotate)(const Rotation &r, bool adjoint, float *x, float *buffer);
  // One tile: find the lines, round, pack (quantize.h); under super-scales a span of so many columns.
  void (*quantize_tile)(const struct QuantizeTile &t);
  void (*quantize_span)(const struct QuantizeTile &t, int span);
  // GPTQ on `count` rows, at most `lanes`, which all pointers begin at; scratch: 64 and 256 bytes a column, aligned to 64.
  int lanes;
  void (*feed_back)(const trilobite_feedback_args &block, int count, void *scratch);
  void (*descend)(const trilobite_descent_args &span, int count, void *scratch);
};

// Codewords -> eight 4-bit codes, lane j in the low half of byte j, lane 4 + j in the high half (lattice_tables.cpp).
struct LatticeTables {
  uint32_t pattern[256], sign[256], e8[256];
  uint32_t high[16];           // sign[low + 16 * i] = sign[low] ^ high[i] for low < 16
  uint32_t middle[8], top[8];  // likewise of bits 3 to 5, and of bits 6 and 7, whatever bit 8 is
  // Byte by byte: those of pattern ^ sign[0] and of e8; sign ^ sign[0], which is linear over GF(2), as bits of a matrix.
  alignas(64) uint8_t pattern_bytes[4][256], e8_bytes[4][256];
  uint64_t flips[4];
  LatticeTables();
};
extern const LatticeTables LATTICE;

}  // namespace trilobite
#endif
