// The product of a few tokens with a dense matrix of few rows, such as a router's. Every element of the result is made by one
// thread in one order, whatever else the call computes.
#include "engine.h"
#include "dispatch.h"
#include "kernel_convert.h"
#include "matrix.h"
#include "pool.h"
#include "step.h"

namespace trilobite {

namespace {

constexpr int64_t TASK = 8;  // rows

}  // namespace

bool dense(const trilobite_dense_args &a) {
  if (!known_dtype(a.dtype)) return fail("dense: unknown element type");
  if (a.tokens < 1 || a.n < 1 || a.k < 1 || a.tokens > MOST_DENSE || a.n > MOST_DENSE || a.k > MOST_DENSE)
    return fail("dense: %lld tokens, a matrix of [%lld, %lld]", (long long)a.tokens, (long long)a.n, (long long)a.k);
  Workspace &ws = call_workspace();
  float *x = ws.get<float>(a.tokens * a.k), *y = ws.get<float>(a.tokens * a.n);
  load_floats(a.x, (int)a.dtype, 0, a.tokens * a.k, x);
  const int threads = a.n * a.k * size_of(a.dtype) * a.tokens < SMALL ? 1 : (int)a.threads;
  run_team(threads, [&](Team &team, int thread) {
    team.share(thread, 0, ceil_div(a.n, TASK), [&](int64_t task) {
      const int64_t row = task * TASK, rows = a.n - row < TASK ? a.n - row : TASK;
      tier().dense(a.w, (int)a.dtype, row, rows, a.k, x, a.tokens, y + row, a.n);
    });
  });
  if (a.bias)
    for (int64_t i = 0; i < a.n; i++) {
      const float b = element(a.bias, (int)a.dtype, i);
      for (int64_t t = 0; t < a.tokens; t++) y[t * a.n + i] += b;
    }
  tier().store(y, a.tokens * a.n, a.y, (int)a.dtype);
  return true;
}

}  // namespace trilobite
