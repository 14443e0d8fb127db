// The C interface of the CPU engine: pointers, sizes and integer codes. Loaded by
// trilobite/kernels/cpu/native.py with ctypes.
//
// Functions that can fail return 0 or a trilobite_code, after leaving a line for trilobite_error(); no exception leaves
// them, and the next call finds everything in order. They check what could make them
// read or write out of bounds (the table of experts, shapes that do not fit); that pointers are what they claim to be
// is the caller's promise.
#ifndef TRILOBITE_H
#define TRILOBITE_H
#include <stdint.h>

#define TRILOBITE_API extern "C" __attribute__((visibility("default")))

// Number of this interface: native.py refuses a library of another one.
#define TRILOBITE_ABI 19
TRILOBITE_API int trilobite_abi(void);

// Why a call failed: its arguments do not fit together; or the system gave it no memory or no thread.
enum trilobite_code { TRILOBITE_REFUSED = -1, TRILOBITE_EXHAUSTED = -2 };

// Element types of activations, routing weights, biases and results.
enum trilobite_dtype { TRILOBITE_F32 = 0, TRILOBITE_F16 = 1, TRILOBITE_BF16 = 2 };

// Beside these, of operands of a step that go element by element.
#define TRILOBITE_BOOL 3

// How activations enter the integer dot products: 3 digits of 8 bits (exact to 2^-22 of a segment's largest; to 2^-15 what
// is computed between two matrices from 16-bit activations), or 1.
enum trilobite_digits { TRILOBITE_EXACT = 3, TRILOBITE_INT8 = 1 };

// How the scales of an affine format are stored: fp16; 8 bits under pairs of fp32; 4 bits under super-scales (fp16).
enum trilobite_metadata { TRILOBITE_PLAIN = 0, TRILOBITE_DOUBLE = 1, TRILOBITE_SUPER = 2 };

enum trilobite_activation {
  TRILOBITE_SILU = 0,
  TRILOBITE_GELU = 1,
  TRILOBITE_GELU_TANH = 2,
  TRILOBITE_RELU = 3,
  TRILOBITE_SIGMOID = 4,
  TRILOBITE_QUICK_GELU = 5,
  TRILOBITE_RELU2 = 6,
  TRILOBITE_TANH = 7,
  TRILOBITE_IDENTITY = 8,
  TRILOBITE_GPT_OSS = 9,  // from here on: with numbers, and gates only (kernels/activation.py)
  TRILOBITE_CLAMPED_SILU = 10,
  TRILOBITE_SILU_CLAMPED = 11,
  TRILOBITE_SOFTCAPPED = 12
};

// A Hadamard matrix of order n: the Kronecker product of `count` cores, [order, order] of +-1 in fp32, and Sylvester's of
// what is left of n, a power of two (formats/incoherence.py).
#define TRILOBITE_CORES 4
typedef struct {
  int64_t n, count;
  int64_t order[TRILOBITE_CORES];
  const float *core[TRILOBITE_CORES];
} trilobite_rotation;

// One packed matrix. Parts that are absent are NULL. With `lattice`, the 12 bytes of a record, `group`, `symmetric` and
// `metadata` mean nothing; the transforms have n = K and N.
typedef struct {
  const void *packed, *scale, *lra, *lrb;
  int64_t n, k, rank, rank_bits, bits, group, symmetric, metadata;
  const void *lattice, *signs_in, *signs_out;
  int64_t tuned;
  const trilobite_rotation *rotate_in, *rotate_out;
} trilobite_matrix;

// y [tokens, n] = x [tokens, k] W^T + bias; x and y contiguous, of `dtype`; bias may be NULL.
TRILOBITE_API int trilobite_linear(const void *x, int64_t dtype, int64_t tokens, const trilobite_matrix *w,
                                   const void *bias, int64_t bias_dtype, void *y, int64_t digits, int64_t threads);

// One of the matrices that read the same x: y [tokens, n] = x W^T + bias, as above.
typedef struct {
  const trilobite_matrix *w;
  const void *bias;
  int64_t bias_dtype;
  void *y;
} trilobite_product;

// `count` products of one x, which is prepared once for neighbours whose groups suit each other. Bits as of single calls.
TRILOBITE_API int trilobite_linears(const void *x, int64_t dtype, int64_t tokens, const trilobite_product *products,
                                    int64_t count, int64_t digits, int64_t threads);

// x [count, n] of fp32, in place: each row x -> T x, or with `adjoint` T^T x, T as of a lattice matrix's side.
TRILOBITE_API int trilobite_rotate(const trilobite_rotation *r, const void *signs, int64_t tuned, int64_t adjoint,
                                   float *x, int64_t count);

// Columns of a row of the table of experts (kernels/expert_table.py).
#define TRILOBITE_COLUMNS 16

typedef struct {
  const void *x;         // [tokens, hidden] of dtype
  const void *index;     // [tokens, active] int64, or int32 when index_bytes is 4
  const void *weights;   // [tokens, active] of weights_dtype
  const uint8_t *slab;   // [slab_bytes]
  const int64_t *table;  // [experts, 3, TRILOBITE_COLUMNS]
  const void
      *gate_up_bias;      // [experts, 2 * intermediate], gate first, or without gates [experts, intermediate]; or NULL
  const void *down_bias;  // [experts, hidden] of bias_dtype, or NULL
  void *y;                // [tokens, hidden] of dtype
  int64_t dtype, weights_dtype, bias_dtype, index_bytes;
  int64_t tokens, active, experts, hidden, intermediate, slab_bytes, activation, digits, threads;
  int64_t gated;                                                  // 1: all experts have gates, 0: none has
  const trilobite_rotation *rotate_hidden, *rotate_intermediate;  // or NULL where no matrix is in a lattice format
  // [tokens, hidden], or NULL: what calls with earlier experts of the layer added up, to which this one adds; y is the
  // rounded total. Experts in ascending order give the bits of one call for all. Not for matrices in lattice formats.
  float *sums;
  float numbers[2];  // of the activation
} trilobite_experts_args;

TRILOBITE_API int trilobite_experts(const trilobite_experts_args *args);

// Attention of the newest token of each text: y = softmax(scale * q K^T) V, K and V being `kv_heads` heads of some rows of
// k and v, in which element i of head h of row r lies at r * row_stride + h * head_stride + i. Heads of q share those of k
// evenly. Texts may share rows: the tokens of a prompt are texts of which each has one row more than the one before. With
// `softcap` > 0 a score x becomes softcap * tanh(x / softcap); `sinks` are scores of nothing. `bias` is added to scores before
// that: the last row of a text gets the first number of a head, the one before it the second; beyond the last it counts on.
typedef struct {
  const void *q, *k, *v;         // q [texts, heads, width] of dtype, contiguous
  void *y;                       // as q
  const int64_t *rows;           // each below `limit`
  const int64_t *starts, *ends;  // [texts]: where the rows of each text begin and end in that list; none is without
  const float *sinks;            // [heads] or NULL
  const float *bias;             // [heads, distances] or NULL
  int64_t dtype, texts, heads, kv_heads, width, limit, row_stride, head_stride, distances, threads;
  float scale, softcap;
} trilobite_attention_args;

TRILOBITE_API int trilobite_attention(const trilobite_attention_args *args);

// `count` calls of one type, and of the same heads and width, with the threads of the first. Bits as of single calls.
TRILOBITE_API int trilobite_attentions(const trilobite_attention_args *calls, int64_t count);

// y [heads, tokens, n] = x [heads, tokens, k] W^T + bias for dense matrices of few rows, W [heads, n, k]: a router's, with
// one head, or those of latent attention; all contiguous, of `dtype`, sums in fp32; bias [heads, n] may be NULL. An element
// of y has the same bits whatever the tokens beside it and the threads.
typedef struct {
  const void *x, *w, *bias;
  void *y;
  int64_t dtype, heads, tokens, n, k, threads;
} trilobite_dense_args;

TRILOBITE_API int trilobite_dense(const trilobite_dense_args *args);

// One token of a convolution along the text, each channel by itself: y = sum of the newest `taps` inputs, x the last of
// them, times w, + bias. Sums are fp32, and rounded before silu, where that is not 0. state: these inputs, the oldest first,
// before of the token before. All contiguous and of one type.
typedef struct {
  const void *x, *w, *bias;  // [channels], [channels, taps], [channels] or NULL
  void *state, *y;           // [channels, taps], [channels]
  int64_t dtype, channels, taps, silu, threads;
} trilobite_convolution_args;

TRILOBITE_API int trilobite_convolve(const trilobite_convolution_args *args);

// Linear attention by the gated delta rule (Yang, Kautz, Hatamizadeh 2024, equation 10), token by token, for each head with
// S its state: S = exp(decay) S; S += k beta (v - k S); y = q S / sqrt(width). Keys and queries, which heads share in order,
// become of length 1 where `normed` is not 0. All contiguous; value_width is a multiple of 16.
typedef struct {
  const void *q, *k, *v;      // [tokens, key_heads, width] twice, [tokens, heads, value_width] of dtype
  const float *decay, *beta;  // [tokens, heads], with `wide_decay` [tokens, heads, width]; [tokens, heads]
  float *state;               // [heads, width, value_width]
  void *y;                    // [tokens, heads, value_width] of dtype
  int64_t dtype, tokens, heads, key_heads, width, value_width, wide_decay, normed, threads;
} trilobite_delta_args;

TRILOBITE_API int trilobite_delta(const trilobite_delta_args *args);

// A state space with one decay a head (Mamba-2; Dao, Gu 2024), token by token, for each row of a head's state S:
// S = exp(step decay) S + step x b; y = S c + skip x. Heads share b and c in order. All contiguous; size is a multiple of 16.
typedef struct {
  const void *x, *b, *c;             // [tokens, heads, width], [tokens, groups, size] twice, of dtype
  const float *step, *decay, *skip;  // [tokens, heads], [heads], [heads] or NULL
  float *state;                      // [heads, width, size]
  void *y;                           // [tokens, heads, width] of dtype
  int64_t dtype, tokens, heads, groups, width, size, threads;
} trilobite_scan_args;

TRILOBITE_API int trilobite_scan(const trilobite_scan_args *args);

// What a node of a decoding step does. Up to FILL: out = a op b, element by element, results rounded to the type of out;
// SWISH is x / (1 + e^-x), LOGISTIC 1 / (1 + e^-x). Then rows of numbers, a row of a table, and the operators above on
// addresses that stay.
enum trilobite_step_kind {
  TRILOBITE_COPY = 0,
  TRILOBITE_ADD = 1,
  TRILOBITE_SUBTRACT = 2,
  TRILOBITE_MULTIPLY = 3,
  TRILOBITE_DIVIDE = 4,
  TRILOBITE_NEGATE = 5,
  TRILOBITE_SQUARE = 6,
  TRILOBITE_RSQRT = 7,
  TRILOBITE_SWISH = 8,
  TRILOBITE_LOGISTIC = 9,
  TRILOBITE_FILL = 10,
  TRILOBITE_SUM = 11,
  TRILOBITE_SOFTMAX = 12,
  TRILOBITE_TOP = 13,
  TRILOBITE_NUMBER = 14,
  TRILOBITE_GATHER = 15,
  TRILOBITE_PICK = 16,
  TRILOBITE_SCATTER = 17,
  TRILOBITE_LINEAR = 18,
  TRILOBITE_EXPERTS = 19,
  TRILOBITE_APPEND = 20,
  TRILOBITE_ATTEND = 21,
  TRILOBITE_DENSE = 22,
  TRILOBITE_CONVOLVE = 23,
  TRILOBITE_DELTA = 24,
  TRILOBITE_SCAN = 25
};

#define TRILOBITE_DIMENSIONS 4

// A tensor of up to four dimensions in `bytes` bytes of memory; strides count elements, 0 where it is repeated.
typedef struct {
  void *data;
  int64_t bytes, dtype, stride[TRILOBITE_DIMENSIONS];
} trilobite_operand;

// Keys and values of one layer of one text: `limit` rows of k and v, of which those at [first, end) of `rows` are the
// text's; `rows` has places for `capacity`, k and v are of `bytes` bytes each. Strides in elements.
typedef struct {
  void *k, *v;
  const int64_t *rows;
  int64_t first, end, capacity, limit, row_stride, head_stride, bytes;
} trilobite_step_cache;

// Element by element: over `shape`; b without data is `number`; the type of any of them may be TRILOBITE_BOOL, bytes of 0
//   or 1, to which all numbers but 0 become 1. FILL: out = `number` where b is not 0, otherwise a.
// SUM: out [.., shape[2]] = sums of the dense rows of a, fp32, `shape[3]` wide, divided by `number`; torch adds up `lanes`
//   values at a time.
// SOFTMAX: out, dense rows as a has: shape[2] of shape[3] values, of fp32, where torch adds up `lanes` values at a time, or
//   up to 8 values of fewer bits.
// TOP: out [shape[2], lanes] = the largest of the dense rows of a [shape[2], shape[3]], of one type, and b, int64, where in
//   their rows they are; in descending order unless `number` is 0. Rows of up to 1024 values.
// NUMBER: out, one fp32, = *(int64_t *)b.
// GATHER: out, `shape[3]` bytes, = row number *(int64_t *)b of a, which has `shape[2]` rows.
// PICK: out [shape[2], lanes] = those of the dense rows of a [shape[2], shape[3]], of one type, that b, int64, says.
// SCATTER: there, in the dense rows of out [shape[2], shape[3]], fp32, `number` takes their place; b: [shape[2], lanes].
// LINEAR: `call` is a trilobite_matrix; out = a W^T + b; neighbours that read the same a are one call. EXPERTS: a trilobite_experts_args, whose threads are those of the
//   step unless positive.
// APPEND: a and b, [heads = shape[2], width = shape[3]] at strides of `stride[2]` elements, `lanes` values of b to a head,
//   become the row at `end` of the trilobite_step_cache `call`, which grows; what b is narrower becomes zeros.
// ATTEND: `call` is that cache; a: the queries [shape[1], shape[3]], dense; shape[2] heads of the cache; out dense, as wide
//   as the keys; `number` is the scale; b: a score of nothing for each head, fp32, or without data; neighbours of one shape
//   are one call.
// DENSE: out [shape[0], shape[1], shape[2]] = a W^T + c, W being b, [shape[0], shape[2], shape[3]], and c, which may be
//   without data, [shape[0], shape[2]]; all dense, of one type.
// CONVOLVE, DELTA, SCAN: `call` is a trilobite_convolution_args, trilobite_delta_args or trilobite_scan_args, with threads
//   as EXPERTS have them.
typedef struct {
  int64_t kind, shape[TRILOBITE_DIMENSIONS];
  trilobite_operand out, a, b, c;
  int64_t lanes, digits, threads;
  float number;
  void *call;
} trilobite_step_node;

// Whether nodes may run: known kinds and types, every operand inside of its memory, results that share none of it with
// operands, or all in the same places. What `call` points to is checked as the functions above check it. Once for a list.
TRILOBITE_API int trilobite_step_check(const trilobite_step_node *nodes, int64_t count);

// Runs nodes that were checked one after the other; with `threads` where a node has none of its own. Rows of tables and
// caches, and where caches lie, may change from run to run, and are checked here.
TRILOBITE_API int trilobite_step(const trilobite_step_node *nodes, int64_t count, int64_t threads);

// The last error of the calling thread, one line.
TRILOBITE_API const char *trilobite_error(void);

// Name of the tier in use ("scalar", "neon", "neon_i8mm", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_gfni", "avx512_bf16",
// "amx"); TRILOBITE_ISA caps it.
TRILOBITE_API const char *trilobite_tier(void);

// Why it is not the next better one, a line that is valid until the calling thread asks again; or "".
TRILOBITE_API const char *trilobite_better_tier(void);

// Choose the best tier not above `name` that this machine has; NULL = no cap. Returns -1 for an unknown name.
TRILOBITE_API int trilobite_set_tier(const char *name);

// Threads that one call may use: affinity and cgroup quota, or TRILOBITE_THREADS.
TRILOBITE_API int64_t trilobite_max_threads(void);

// Seconds to read `bytes` bytes once with `threads` threads, or a trilobite_code.
TRILOBITE_API double trilobite_read_seconds(const void *data, int64_t bytes, int64_t threads);

// Multiply-accumulates of codes and activations per second, `threads` threads together, in the products that the tier uses
// for many tokens in a mode: of bytes or of bfloat16 numbers. Or a trilobite_code.
TRILOBITE_API double trilobite_peak_macs(int64_t digits, int64_t threads);

// Quantize w [rows, k] fp32 in groups. method: 0 rtn, 1 search, 2 hqq; steps: alternations of search from each start;
// given: it starts from the lines that are given alone.
// With `super` the lines go under super-scales: tiles of 64 or 32 columns, `super` [ceil(rows / 16), ceil(k / 256), 32].
// All contiguous.
typedef struct {
  const float *w;
  float *scale, *offset;  // [rows, k / group]: the lines found, and those given; offset NULL when symmetric
  const float
      *weight;  // [k]: of the columns' errors in a search, of mean 1 in every group unless under super-scales; or NULL
  const float *original;  // [rows, k]: with it, `values` gets original - what is stored; or NULL
  float *values;          // [rows, k] what is stored, or NULL
  uint8_t *packed;        // tiles [ceil(rows / 16), k / group, ..] or NULL
  uint8_t *super;         // or NULL: scales in fp16
  int64_t rows, k, group, bits, symmetric, method, steps, given, threads;
} trilobite_quantize_args;

TRILOBITE_API int trilobite_quantize(const trilobite_quantize_args *args);

// Round a block of columns, each error fed back to the block's columns behind it. A column is a row of `rows` elements,
// one for each row of the matrix; all contiguous but for `upper`.
typedef struct {
  const float *w;         // [columns, rows], compensated for the errors of all blocks before
  const float *upper;     // [columns, upper_ld]: of U, H^-1 = U^T U, the block's rows and columns
  const float *cost;      // [columns] > 0: weights of a search for lines; NULL: lines are known
  const float *units;     // [rows]: lines are found under these super-scales; or NULL
  float *scale, *offset;  // [columns / group, rows]: lines as stored, or sub-scales and offset codes where `units` are
  uint8_t *codes;         // [columns, rows]
  float *errors;          // [columns, rows]: what of a column is lost, over U_jj
  int64_t rows, columns, upper_ld, group, bits, symmetric, steps, threads;
} trilobite_feedback_args;

TRILOBITE_API int trilobite_feed_back(const trilobite_feedback_args *args);

// Find a span's unit, every group's line and every code once more, each of least loss given all others. Layout as above.
typedef struct {
  float *codes;           // [columns, rows], whole numbers
  float *scale, *offset;  // [columns / group, rows]: sub-scales and offset codes
  float *units;           // [rows]
  float *error;           // [columns, rows]: W - W_q, kept up to date
  const float *slope;     // [columns, rows]: (error H)^T
  const float *hessian;   // [columns, hessian_ld]: the span's rows and columns of H
  int64_t rows, columns, hessian_ld, group, bits, threads;
} trilobite_descent_args;

TRILOBITE_API int trilobite_descend(const trilobite_descent_args *args);

// Lattice codebooks (formats/lattice.py): the codes of the points nearest to x, and these points. All [count, 8] but
// codes, [count]. bits: 1 is the codebook E8, 2 is E8P, 3 and 4 are E8P and then E8 or E8P for what it leaves times
// `ratio`. On the calling thread.
TRILOBITE_API int trilobite_nearest_points(const float *x, int64_t count, int64_t bits, double ratio, int64_t *codes,
                                           float *points);

#endif
