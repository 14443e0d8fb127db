// Whether a list of nodes may run. Once, when it is made: the run itself looks only at what changes between runs.
#include "step.h"

#include <string>

#include "engine.h"
#include "matrix.h"

namespace trilobite {
namespace {

using Node = trilobite_step_node;
using Operand = trilobite_operand;

// Bytes from the first element to the end of the last one; -1 for what is no shape, has no elements, or is beyond all
// memory.
int64_t extent(const Operand &o, const int64_t *shape, int64_t size) {
  int64_t last = 0;
  bool wrong = false;
  for (int d = 0; d < TRILOBITE_DIMENSIONS; d++) {
    int64_t steps = 0;
    wrong |= shape[d] < 1 || o.stride[d] < 0 || __builtin_mul_overflow(shape[d] - 1, o.stride[d], &steps);
    wrong |= __builtin_add_overflow(last, steps, &last);
  }
  wrong |= __builtin_add_overflow(last, (int64_t)1, &last) || __builtin_mul_overflow(last, size, &last);
  return wrong ? -1 : last;
}

// Whether so many bytes are there, from an address that suits elements of so many.
bool inside(const char *name, const void *data, int64_t bytes, int64_t needed, int64_t size) {
  if (data == nullptr || needed < 0 || needed > bytes || (uintptr_t)data % size)
    return fail("%s: %lld bytes of %lld", name, (long long)needed, (long long)bytes);
  return true;
}

bool inside(const char *name, const Operand &o, const int64_t *shape) {
  if (!known_dtype(o.dtype) && o.dtype != TRILOBITE_BOOL) return fail("%s: element type %lld", name, (long long)o.dtype);
  const int64_t size = size_of(o.dtype);
  return inside(name, o.data, o.bytes, extent(o, shape, size), size);
}

// Results, of which each element is one: work is bounded by memory.
bool result(const Operand &o, const int64_t *shape) {
  int64_t bytes = size_of(o.dtype);
  for (int d = 0; d < TRILOBITE_DIMENSIONS; d++)
    if (__builtin_mul_overflow(bytes, shape[d], &bytes)) return fail("result: too many elements");
  return inside("result", o, shape) && inside("result", o.data, o.bytes, bytes, size_of(o.dtype));
}

// Whether stretches of memory have nothing in common.
bool apart(const Operand &a, int64_t bytes, const Operand &b, int64_t others) {
  const auto x = (uintptr_t)a.data, y = (uintptr_t)b.data;
  if (x + (uintptr_t)bytes <= y || y + (uintptr_t)others <= x) return true;
  return fail("result: shares memory with an operand");
}

// Whether an operand has nothing in common with the result, or each of its elements lies where that of the result does.
bool apart_or_same(const Node &n, const Operand &o) {
  bool same = o.data == n.out.data && o.dtype == n.out.dtype;
  for (int d = 0; d < TRILOBITE_DIMENSIONS; d++) same &= n.shape[d] == 1 || o.stride[d] == n.out.stride[d];
  return same || apart(n.out, extent(n.out, n.shape, size_of(n.out.dtype)), o, extent(o, n.shape, size_of(o.dtype)));
}

bool check_map(const Node &n) {
  if (!inside("operand", n.a, n.shape) || !result(n.out, n.shape) || !apart_or_same(n, n.a)) return false;
  if (n.kind == TRILOBITE_FILL && n.b.data == nullptr) return fail("fill: without places");
  return n.b.data == nullptr || (inside("operand", n.b, n.shape) && apart_or_same(n, n.b));
}

bool check_sum(const Node &n) {
  const int64_t rows = n.shape[2], width = n.shape[3], in[] = {1, 1, rows, width}, out[] = {1, 1, rows, 1};
  if (n.a.dtype != TRILOBITE_F32 || n.out.dtype != TRILOBITE_F32 || n.a.stride[3] != 1 || width < 1)
    return fail("sums: rows of %lld values, or not dense ones of fp32", (long long)width);
  if (n.lanes != 4 && n.lanes != 8 && n.lanes != 16) return fail("sums: %lld lanes", (long long)n.lanes);
  if (n.b.data != nullptr) return fail("sums: of two operands");
  return inside("operand", n.a, in) && result(n.out, out) &&
         apart(n.out, extent(n.out, out, 4), n.a, extent(n.a, in, 4));
}

bool check_softmax(const Node &n) {
  const int64_t rows = n.shape[2], width = n.shape[3];
  if (!known_dtype(n.a.dtype) || n.out.dtype != n.a.dtype || (n.lanes != 4 && n.lanes != 8 && n.lanes != 16))
    return fail("softmax: unknown element type or several, or %lld lanes", (long long)n.lanes);
  const int64_t size = size_of(n.a.dtype);
  int64_t bytes;
  if (rows < 1 || width < 1 || (size < 4 && width > SHORT_ROW) || __builtin_mul_overflow(rows, width, &bytes) ||
      __builtin_mul_overflow(bytes, size, &bytes))
    return fail("softmax: %lld rows of %lld values", (long long)rows, (long long)width);
  return inside("operand", n.a.data, n.a.bytes, bytes, size) && inside("result", n.out.data, n.out.bytes, bytes, size) &&
         apart(n.out, bytes, n.a, bytes);
}

bool check_top(const Node &n) {
  const int64_t rows = n.shape[2], width = n.shape[3], count = n.lanes;
  int64_t bytes;
  if (!known_dtype(n.a.dtype) || n.out.dtype != n.a.dtype) return fail("top: unknown element type, or several");
  if (rows < 1 || width < 1 || width > WIDEST || count < 1 || count > width ||
      __builtin_mul_overflow(rows, width, &bytes) || __builtin_mul_overflow(bytes, 8, &bytes))
    return fail("top: %lld of %lld rows of %lld values", (long long)count, (long long)rows, (long long)width);
  const int64_t size = size_of(n.a.dtype), in = rows * width * size, values = rows * count * size;
  const int64_t places = rows * count * 8;
  return inside("operand", n.a.data, n.a.bytes, in, size) && inside("result", n.out.data, n.out.bytes, values, size) &&
         inside("places", n.b.data, n.b.bytes, places, 8) && apart(n.out, values, n.a, in) &&
         apart(n.b, places, n.a, in) && apart(n.out, values, n.b, places);
}

bool check_number(const Node &n) {
  return n.out.dtype == TRILOBITE_F32 ? inside("result", n.out.data, n.out.bytes, 4, 4) &&
                                            inside("number", n.b.data, n.b.bytes, 8, 8) && apart(n.out, 4, n.b, 8)
                                      : fail("number: not as fp32");
}

bool check_gather(const Node &n) {
  const int64_t rows = n.shape[2], width = n.shape[3];
  int64_t table;
  if (rows < 1 || width < 1 || __builtin_mul_overflow(rows, width, &table))
    return fail("table: %lld rows of %lld bytes", (long long)rows, (long long)width);
  return inside("table", n.a.data, n.a.bytes, table, 1) && inside("index", n.b.data, n.b.bytes, 8, 8) &&
         inside("result", n.out.data, n.out.bytes, width, 1) && apart(n.out, width, n.a, table) &&
         apart(n.out, width, n.b, 8);
}

bool check_places(const Node &n) {
  const int64_t rows = n.shape[2], width = n.shape[3], count = n.lanes;
  const bool scatter = n.kind == TRILOBITE_SCATTER;
  const Operand &wide = scatter ? n.out : n.a;
  if (!known_dtype(wide.dtype) || n.out.dtype != wide.dtype || (scatter && wide.dtype != TRILOBITE_F32))
    return fail("places: unknown element type, or several");
  if (rows < 1 || width < 1 || width > WIDEST || count < 1 || count > WIDEST || rows > MOST_SIDE)
    return fail("places: %lld of %lld rows of %lld values", (long long)count, (long long)rows, (long long)width);
  const int64_t size = size_of(wide.dtype), all = rows * width * size, some = rows * count;
  if (!inside("values", wide.data, wide.bytes, all, size) || !inside("places", n.b.data, n.b.bytes, some * 8, 8))
    return false;
  if (scatter) return apart(n.out, all, n.b, some * 8);
  return inside("result", n.out.data, n.out.bytes, some * size, size) && apart(n.out, some * size, n.a, all) &&
         apart(n.out, some * size, n.b, some * 8);
}

bool check_linear(const Node &n) {
  Matrix m;
  const int64_t tokens = n.shape[2], size = size_of(n.a.dtype);
  if (!known_dtype(n.a.dtype) || n.out.dtype != n.a.dtype || !known_dtype(n.b.dtype) || !known_digits(n.digits))
    return fail("linear: unknown element type or mode");
  if (tokens < 1 || tokens > MOST_SIDE) return fail("linear: %lld tokens", (long long)tokens);
  if (n.call == nullptr) return fail("linear: no matrix");
  if (!describe(*(const trilobite_matrix *)n.call, &m)) return false;
  const int64_t x = tokens * m.k * size, y = tokens * m.n * size, bias = m.n * size_of(n.b.dtype);
  return inside("operand", n.a.data, n.a.bytes, x, size) && inside("result", n.out.data, n.out.bytes, y, size) &&
         (n.b.data == nullptr || inside("bias", n.b.data, n.b.bytes, bias, size_of(n.b.dtype))) &&
         apart(n.out, y, n.a, x) && (n.b.data == nullptr || apart(n.out, y, n.b, bias));
}

bool check_calls(const Node &n) {
  if (n.call == nullptr) return fail("experts: no arguments");
  return check_experts(*(const trilobite_experts_args *)n.call);
}

template <typename Args> bool check_state(const Node &n, bool (*check)(const Args &)) {
  if (n.call == nullptr) return fail("state: no arguments");
  return check(*(const Args *)n.call);
}

bool check_append(const Node &n) {
  const int64_t heads = n.shape[2], width = n.shape[3];
  if (n.call == nullptr || heads < 1 || n.lanes < 1 || n.lanes > width || n.a.dtype != n.b.dtype || n.a.stride[3] != 1 ||
      n.b.stride[3] != 1)
    return fail("cache: %lld heads of %lld and %lld values, or not dense ones", (long long)heads, (long long)width,
                (long long)n.lanes);
  const int64_t key[] = {1, 1, heads, width}, value[] = {1, 1, heads, n.lanes};
  return inside("key", n.a, key) && inside("value", n.b, value);
}

bool check_attend(const Node &n) {
  const int64_t heads = n.shape[1], kv_heads = n.shape[2], width = n.shape[3], size = size_of(n.a.dtype);
  if (n.call == nullptr || !known_dtype(n.a.dtype) || n.out.dtype != n.a.dtype || heads < 1 || kv_heads < 1 ||
      heads % kv_heads || width < ROWS || width % ROWS || heads > MOST_SIDE || width > MOST_SIDE)
    return fail("attention: %lld heads of %lld values on %lld", (long long)heads, (long long)width, (long long)kv_heads);
  const int64_t bytes = heads * width * size;
  if (n.b.data && !(inside("sinks", n.b.data, n.b.bytes, heads * 4, 4) && apart(n.out, bytes, n.b, heads * 4)))
    return false;
  if (n.c.data) {
    int64_t bias;
    if (n.lanes < 1 || __builtin_mul_overflow(heads * 4, n.lanes, &bias) ||
        !inside("bias", n.c.data, n.c.bytes, bias, 4) || !apart(n.out, bytes, n.c, bias))
      return fail("attention: a bias for %lld distances", (long long)n.lanes);
  }
  return inside("query", n.a.data, n.a.bytes, bytes, size) && inside("result", n.out.data, n.out.bytes, bytes, size) &&
         apart(n.out, bytes, n.a, bytes);
}

bool check_dense(const Node &n) {
  const int64_t heads = n.shape[0], tokens = n.shape[1], rows = n.shape[2], k = n.shape[3], size = size_of(n.a.dtype);
  if (!known_dtype(n.a.dtype) || n.out.dtype != n.a.dtype || n.b.dtype != n.a.dtype)
    return fail("dense: unknown element type, or several");
  if (!dense_fits(heads, tokens, rows, k))
    return fail("dense: %lld tokens, %lld matrices of [%lld, %lld]", (long long)tokens, (long long)heads,
                (long long)rows, (long long)k);
  const int64_t x = heads * tokens * k * size, w = heads * rows * k * size, y = heads * tokens * rows * size;
  if (n.c.data != nullptr) {
    const int64_t c = heads * rows * size;
    if (n.c.dtype != n.a.dtype) return fail("dense: a bias of another type");
    if (!inside("bias", n.c.data, n.c.bytes, c, size) || !apart(n.out, y, n.c, c)) return false;
  }
  return inside("operand", n.a.data, n.a.bytes, x, size) && inside("matrix", n.b.data, n.b.bytes, w, size) &&
         inside("result", n.out.data, n.out.bytes, y, size) && apart(n.out, y, n.a, x) && apart(n.out, y, n.b, w);
}

bool check(const Node &n) {
  switch (n.kind) {
    case TRILOBITE_SUM: return check_sum(n);
    case TRILOBITE_SOFTMAX: return check_softmax(n);
    case TRILOBITE_TOP: return check_top(n);
    case TRILOBITE_NUMBER: return check_number(n);
    case TRILOBITE_GATHER: return check_gather(n);
    case TRILOBITE_PICK:
    case TRILOBITE_SCATTER: return check_places(n);
    case TRILOBITE_LINEAR: return check_linear(n);
    case TRILOBITE_EXPERTS: return check_calls(n);
    case TRILOBITE_APPEND: return check_append(n);
    case TRILOBITE_ATTEND: return check_attend(n);
    case TRILOBITE_DENSE: return check_dense(n);
    case TRILOBITE_CONVOLVE: return check_state(n, check_convolution);
    case TRILOBITE_DELTA: return check_state(n, check_delta);
    case TRILOBITE_SCAN: return check_state(n, check_scan);
    default:
      if (n.kind < TRILOBITE_COPY || n.kind > TRILOBITE_FILL) return fail("kind %lld", (long long)n.kind);
      return check_map(n);
  }
}

}  // namespace

bool lies(const trilobite_step_cache &c, int64_t dtype, int64_t heads, int64_t width) {
  const int64_t shape[] = {1, c.limit, heads, width};
  const Operand k = {c.k, c.bytes, dtype, {0, c.row_stride, c.head_stride, 1}};
  const Operand v = {c.v, c.bytes, dtype, {0, c.row_stride, c.head_stride, 1}};
  if (c.rows == nullptr) return fail("cache: no rows");
  return inside("cache", k, shape) && inside("cache", v, shape);
}

}  // namespace trilobite

int trilobite_step_check(const trilobite_step_node *nodes, int64_t count) {
  using namespace trilobite;
  if (count < 0 || (count > 0 && nodes == nullptr)) return fail("step: %lld nodes", (long long)count), TRILOBITE_REFUSED;
  for (int64_t i = 0; i < count; i++)
    if (!check(nodes[i])) {
      const std::string why = last_error();
      fail("step: node %lld of %lld: %s", (long long)i, (long long)count, why.c_str());
      return TRILOBITE_REFUSED;
    }
  return 0;
}
