// A decoding step: nodes whose tensors keep their places, one after the other, without anything of Python in between.
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <utility>

#include "dispatch.h"
#include "engine.h"
#include "kernel_convert.h"
#include "matrix.h"
#include "pool.h"
#include "step.h"

namespace trilobite {
namespace {

int refuse(const char *what, int64_t found, int64_t limit) {
  fail("step: %s %lld of %lld", what, (long long)found, (long long)limit);
  return TRILOBITE_REFUSED;
}

constexpr int64_t MOST_ATTENDING = 64;  // texts of one call
constexpr int64_t LINE = 64;            // elements that threads do not share

using Placed = std::pair<float, int64_t>;

// As torch chooses (aten/src/ATen/native/TopKImpl.h), so that equal values come in its order.
void top(const trilobite_step_node &n) {
  const int64_t rows = n.shape[2], width = n.shape[3], count = n.lanes;
  Placed found[WIDEST];
  const auto larger = [](const Placed &x, const Placed &y) {
    return (x.first != x.first && y.first == y.first) || x.first > y.first;
  };
  const int64_t size = size_of(n.a.dtype);
  for (int64_t r = 0; r < rows; r++) {
    const auto *row = (const uint8_t *)n.a.data + r * width * size;
    for (int64_t i = 0; i < width; i++) found[i] = {element(row, (int)n.a.dtype, i), i};
    if (count * 64 <= width) {
      std::partial_sort(found, found + count, found + width, larger);
    } else {
      std::nth_element(found, found + count - 1, found + width, larger);
      if (n.number != 0) std::sort(found, found + count - 1, larger);
    }
    for (int64_t i = 0; i < count; i++) {
      memcpy((uint8_t *)n.out.data + (r * count + i) * size, row + found[i].second * size, size);
      ((int64_t *)n.b.data)[r * count + i] = found[i].second;
    }
  }
}

int gather(const trilobite_step_node &n) {
  const int64_t row = *(const int64_t *)n.b.data;
  if (row < 0 || row >= n.shape[2]) return refuse("row", row, n.shape[2]);
  memcpy(n.out.data, (const uint8_t *)n.a.data + row * n.shape[3], n.shape[3]);
  return 0;
}

// Those of a row that an index says; or, a number put there.
int at_places(const trilobite_step_node &n) {
  const int64_t rows = n.shape[2], width = n.shape[3], size = size_of(n.out.dtype);
  const auto *place = (const int64_t *)n.b.data;
  for (int64_t i = 0; i < rows * n.lanes; i++)
    if (place[i] < 0 || place[i] >= width) return refuse("value", place[i], width);
  for (int64_t i = 0; i < rows * n.lanes; i++) {
    const int64_t at = i / n.lanes * width + place[i];
    if (n.kind == TRILOBITE_SCATTER) ((float *)n.out.data)[at] = n.number;
    else memcpy((uint8_t *)n.out.data + i * size, (const uint8_t *)n.a.data + at * size, size);
  }
  return 0;
}

bool same_input(const trilobite_step_node &n, const trilobite_step_node &other) {
  return other.kind == n.kind && other.a.data == n.a.data && other.a.dtype == n.a.dtype &&
         other.shape[2] == n.shape[2] && other.digits == n.digits && other.threads == n.threads;
}

// This node and its neighbours that read the same x: q, k and v, or gate and up. -> how many these are.
int64_t linears(const trilobite_step_node *nodes, int64_t count, int64_t threads, int *code) {
  const trilobite_step_node &n = nodes[0];
  trilobite_product products[MOST_TOGETHER];
  int64_t some = 0;
  for (; some < count && some < MOST_TOGETHER && same_input(n, nodes[some]); some++)
    products[some] = {(const trilobite_matrix *)nodes[some].call, nodes[some].b.data, nodes[some].b.dtype,
                      nodes[some].out.data};
  *code = trilobite_linears(n.a.data, n.a.dtype, n.shape[2], products, some, n.digits, n.threads ? n.threads : threads);
  return some;
}

int experts(const trilobite_step_node &n, int64_t threads) {
  trilobite_experts_args a = *(const trilobite_experts_args *)n.call;
  a.threads = n.threads ? n.threads : threads;
  return trilobite_experts(&a);
}

template <typename Args> int with_state(const trilobite_step_node &n, int64_t threads, int (*run)(const Args *)) {
  Args a = *(const Args *)n.call;
  a.threads = n.threads ? n.threads : threads;
  return run(&a);
}

int append(const trilobite_step_node &n) {
  auto &cache = *(trilobite_step_cache *)n.call;
  if (cache.end < 0 || cache.end >= cache.capacity) return refuse("row", cache.end, cache.capacity);
  const int64_t heads = n.shape[2], width = n.shape[3], size = size_of(n.a.dtype);
  if (!lies(cache, n.a.dtype, heads, width)) return TRILOBITE_REFUSED;
  const int64_t row = cache.rows[cache.end];
  if (row < 0 || row >= cache.limit) return refuse("row", row, cache.limit);
  for (int64_t h = 0; h < heads; h++) {
    const int64_t at = (row * cache.row_stride + h * cache.head_stride) * size;
    memmove((uint8_t *)cache.k + at, (const uint8_t *)n.a.data + h * n.a.stride[2] * size, width * size);
    uint8_t *v = (uint8_t *)cache.v + at;
    memmove(v, (const uint8_t *)n.b.data + h * n.b.stride[2] * size, n.lanes * size);
    memset(v + n.lanes * size, 0, (width - n.lanes) * size);
  }
  cache.end++;
  return 0;
}

// Whether `other` attends as n does, and nodes from n on write nothing of what it reads or writes.
bool goes_with(const trilobite_step_node &n, const trilobite_step_node &other) {
  if (other.kind != n.kind || other.a.dtype != n.a.dtype || other.shape[1] != n.shape[1] ||
      other.shape[2] != n.shape[2] || other.shape[3] != n.shape[3])
    return false;
  const int64_t bytes = n.shape[1] * n.shape[3] * size_of(n.a.dtype);
  const auto meet = [&](const void *x, const void *y) { return std::abs((intptr_t)x - (intptr_t)y) < bytes; };
  for (const trilobite_step_node *before = &n; before != &other; before++)
    if (meet(before->out.data, other.a.data) || meet(before->out.data, other.out.data)) return false;
  return true;
}

// This node and its neighbours of one shape: those of other texts. -> how many these are.
int64_t attend(const trilobite_step_node *nodes, int64_t count, int64_t threads, int *code) {
  trilobite_attention_args calls[MOST_ATTENDING];
  int64_t bounds[MOST_ATTENDING][2];
  int64_t some = 0;
  for (; some < count && some < MOST_ATTENDING && goes_with(nodes[0], nodes[some]); some++) {
    const trilobite_step_node &n = nodes[some];
    const auto &cache = *(const trilobite_step_cache *)n.call;
    if (cache.first < 0 || cache.first >= cache.end || cache.end > cache.capacity)
      return *code = refuse("row", cache.first, cache.end), 1;
    if (!lies(cache, n.a.dtype, n.shape[2], n.shape[3])) return *code = TRILOBITE_REFUSED, 1;
    bounds[some][0] = 0, bounds[some][1] = cache.end - cache.first;
    trilobite_attention_args &a = calls[some] = {};
    a.q = n.a.data, a.k = cache.k, a.v = cache.v, a.y = n.out.data;
    a.rows = cache.rows + cache.first, a.starts = bounds[some], a.ends = bounds[some] + 1;
    a.dtype = n.a.dtype, a.texts = 1, a.heads = n.shape[1], a.kv_heads = n.shape[2], a.width = n.shape[3];
    a.limit = cache.limit, a.row_stride = cache.row_stride, a.head_stride = cache.head_stride;
    a.threads = threads, a.scale = n.number, a.sinks = (const float *)n.b.data;
    a.bias = (const float *)n.c.data, a.distances = n.lanes;
  }
  *code = trilobite_attentions(calls, some);
  return some;
}

int dense(const trilobite_step_node &n, int64_t threads) {
  trilobite_dense_args a{};
  a.x = n.a.data, a.w = n.b.data, a.bias = n.c.data, a.y = n.out.data, a.dtype = n.a.dtype;
  a.heads = n.shape[0], a.tokens = n.shape[1], a.n = n.shape[2], a.k = n.shape[3], a.threads = threads;
  return trilobite_dense(&a);
}

// `count` of a node's rows, or of the elements of a row, from `first` of that dimension on.
trilobite_step_node part_of(const trilobite_step_node &n, int dimension, int64_t first, int64_t count) {
  trilobite_step_node part = n;
  part.shape[dimension] = count;
  for (trilobite_operand *o : {&part.out, &part.a, &part.b})
    if (o->data) o->data = (uint8_t *)o->data + first * o->stride[dimension] * size_of(o->dtype);
  return part;
}

// An operator whose elements, or rows, do not depend on each other: on as many threads as have enough of them to do.
int share(const trilobite_step_node &n, int64_t threads, void (*run)(const trilobite_step_node &)) {
  const bool sum = n.kind == TRILOBITE_SUM;  // of whole rows; the outer dimensions are not looked at
  const int last = TRILOBITE_DIMENSIONS - 1, end = sum ? last : last + 1;
  int d = sum ? last - 1 : 0;
  int64_t bytes = sizeof(float);
  for (int i = d; i <= last; i++) bytes *= n.shape[i];
  threads = std::min(threads, bytes / (SMALL / 2));
  while (d < end && n.shape[d] < threads) d++;
  if (threads < 2 || d == end) return run(n), 0;
  const int64_t size = n.shape[d], each = d < last ? ceil_div(size, threads) : ceil_div(size, threads * LINE) * LINE;
  run_team((int)threads, [&](Member &me) {
    me.share(ceil_div(size, each), [&](int64_t i) { run(part_of(n, d, i * each, std::min(each, size - i * each))); });
  });
  return 0;
}

int run(const trilobite_step_node &n, int64_t threads) {
  switch (n.kind) {
    case TRILOBITE_SUM: return share(n, threads, tier().sum);
    case TRILOBITE_SOFTMAX: return tier().softmax(n), 0;
    case TRILOBITE_TOP: return top(n), 0;
    case TRILOBITE_NUMBER: return *(float *)n.out.data = (float)*(const int64_t *)n.b.data, 0;
    case TRILOBITE_GATHER: return gather(n);
    case TRILOBITE_PICK:
    case TRILOBITE_SCATTER: return at_places(n);
    case TRILOBITE_EXPERTS: return experts(n, threads);
    case TRILOBITE_APPEND: return append(n);
    case TRILOBITE_DENSE: return dense(n, threads);
    case TRILOBITE_CONVOLVE: return with_state(n, threads, trilobite_convolve);
    case TRILOBITE_DELTA: return with_state(n, threads, trilobite_delta);
    case TRILOBITE_SCAN: return with_state(n, threads, trilobite_scan);
    default: return share(n, threads, tier().map);
  }
}

}  // namespace

int step(const trilobite_step_node *nodes, int64_t count, int64_t threads) {
  for (int64_t i = 0; i < count;) {
    int code = 0;
    if (nodes[i].kind == TRILOBITE_LINEAR) i += linears(nodes + i, count - i, threads, &code);
    else if (nodes[i].kind == TRILOBITE_ATTEND) i += attend(nodes + i, count - i, threads, &code);
    else code = run(nodes[i++], threads);
    if (code) return code;
  }
  return 0;
}

}  // namespace trilobite
