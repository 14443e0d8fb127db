// The parts of a matrix product that linear.cpp and experts.cpp share.
#ifndef TRILOBITE_ENGINE_H
#define TRILOBITE_ENGINE_H
#include "common.h"
#include "workspace.h"

namespace trilobite {

// Packed bytes, times tokens, below which waking other threads costs more than it saves.
constexpr int64_t SMALL = 1 << 17;

// Bytes of per-thread scratch that products with rows of `k` columns need.
int64_t scratch_bytes(const Tier &t, int64_t k);

// out [x.count, ld] = x (W + U V)^T for `bands` bands from `band`, a multiple of UNIT_BANDS; z = x V^T or NULL.
// Writes bands * 16 columns, rounded up to 64 when there is a compensator.
void product(const Tier &t, const Matrix &m, int64_t band, int bands, const Digits &x, const float *z, float *out,
             int64_t ld, void *scratch);

// The matrix as one token reads it. What a thread reads of adjacent bands are short streams, whose ends and beginnings share
// pages: rows of few columns came at three quarters of what memory gives. Bands of a unit that lie a quarter of the matrix
// apart are long ones, each of which goes on with the next unit. Not with a compensator, whose U has groups of a unit's rows.
inline Matrix spread_bands(const Matrix &m, int64_t tokens) {
  Matrix some = m;
  if (tokens == 1 && m.rank == 0 && !m.lattice() && m.n % UNIT == 0) some.apart = m.bands / UNIT_BANDS;
  return some;
}

// The first band of a task of `bands` bands.
inline int64_t first_band(const Matrix &m, int64_t task, int64_t bands) { return m.apart > 1 ? task : task * bands; }

// What `bands` bands from `band` make is in one piece, or a piece of each that lies apart: run(row, width, column of `out`).
template <typename F> void for_pieces(const Matrix &m, int64_t band, int bands, F run) {
  const int each = m.apart > 1 ? 1 : bands;
  for (int b = 0; b < bands; b += each) {
    const int64_t row = (band + b * m.apart) * ROWS, width = each * ROWS;
    run(row, width < m.n - row ? width : m.n - row, b * ROWS);
  }
}

// One of the matrices by which a call multiplies x: y [tokens, m.n] = x W^T + bias, which may be NULL.
struct Product {
  const Matrix *m;
  const void *bias;
  int bias_dtype;
  void *y;
};

constexpr int MOST_TOGETHER = 8;

// Whether matrices can be multiplied by the same digits, or parts, of x [tokens, k].
bool together(const Matrix &a, const Matrix &b, int64_t tokens);

// Up to MOST_TOGETHER products by matrices that go together, or one of any matrix. The bits of each are those it has alone.
void linear(const void *x, int dtype, int64_t tokens, const Product *products, int count, int digits, int threads);

// False after leaving a message: element types, modes or sizes that no layer of experts has.
bool check_experts(const trilobite_experts_args &a);

// False after leaving a message: the table of experts does not fit the slab.
bool experts(const trilobite_experts_args &a);

// `count` calls of one shape and type, of at least a text each where these are several; the bits of each are those it has
// alone. False after leaving a message: sizes that do not fit, or rows that the cache does not have.
bool attention(const trilobite_attention_args *calls, int64_t count, int threads);

// Texts from `at` on that are the tokens of a prompt, each with the rows of the one before it and one more, or fewer at the
// beginning; 0 where these are too few for `attend_prompt`, or scores have a bias.
int64_t prompt_tokens(const trilobite_attention_args &a, int64_t at);

// So many texts from `at` on. The bits of each are the same in all prompts of which the first text begins with the same row.
void attend_prompt(const trilobite_attention_args &a, int64_t at, int64_t tokens, int threads);

// Largest number of heads and tokens, and sides of a dense matrix: of products of three that are bytes fit 63 bits.
constexpr int64_t MOST_DENSE = 1 << 20;
inline bool dense_fits(int64_t heads, int64_t tokens, int64_t n, int64_t k) {
  for (int64_t size : {heads, tokens, n, k})
    if (size < 1 || size > MOST_DENSE) return false;
  return true;
}

// False after leaving a message: sizes out of range.
bool dense(const trilobite_dense_args &a);

// False after leaving a message: sizes out of range, or types that no layer with a state has.
bool check_convolution(const trilobite_convolution_args &a);
bool check_delta(const trilobite_delta_args &a);
bool check_scan(const trilobite_scan_args &a);

// After these checks.
void convolve(const trilobite_convolution_args &a);
void delta(const trilobite_delta_args &a);
void scan(const trilobite_scan_args &a);

// False after leaving a message: shapes or bits that no format has.
bool quantize(const trilobite_quantize_args &a);
bool feed_back(const trilobite_feedback_args &a);
bool descend(const trilobite_descent_args &a);
bool nearest_points(const float *x, int64_t count, int64_t bits, double ratio, int64_t *codes, float *points);

// Seconds to read `bytes` bytes once; multiply-accumulates per second.
double read_seconds(const void *data, int64_t bytes, int threads);
double peak_macs(int digits, int threads);

}  // namespace trilobite
#endif
