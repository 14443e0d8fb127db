// Products of a few tokens with dense matrices of few rows: a router's, or one for each head of latent attention. Every
// element of the result is made by one thread in one order, whatever else the call computes.
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
  if (!dense_fits(a.heads, a.tokens, a.n, a.k))
    return fail("dense: %lld tokens, %lld matrices of [%lld, %lld]", (long long)a.tokens, (long long)a.heads,
                (long long)a.n, (long long)a.k);
  Workspace &ws = call_workspace();
  float *x = ws.get<float>(a.heads * a.tokens * a.k), *y = ws.get<float>(a.heads * a.tokens * a.n);
  load_floats(a.x, (int)a.dtype, 0, a.heads * a.tokens * a.k, x);
  const int threads = a.heads * a.n * a.k * size_of(a.dtype) * a.tokens < SMALL ? 1 : (int)a.threads;
  const int64_t tasks = ceil_div(a.n, TASK);
  run_team(threads, [&](Team &team, int thread) {
    team.share(thread, 0, a.heads * tasks, [&](int64_t task) {
      const int64_t head = task / tasks, row = task % tasks * TASK, rows = a.n - row < TASK ? a.n - row : TASK;
      tier().dense(a.w, (int)a.dtype, head * a.n + row, rows, a.k, x + head * a.tokens * a.k, a.tokens,
                   y + head * a.tokens * a.n + row, a.n);
    });
  });
  if (a.bias)
    for (int64_t i = 0; i < a.heads * a.n; i++) {
      const float b = element(a.bias, (int)a.dtype, i);
      for (int64_t t = 0; t < a.tokens; t++) y[(i / a.n * a.tokens + t) * a.n + i % a.n] += b;
    }
  tier().store(y, a.heads * a.tokens * a.n, a.y, (int)a.dtype);
  return true;
}

}  // namespace trilobite
