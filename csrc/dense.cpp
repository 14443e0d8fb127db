// Products of some tokens with dense matrices of few rows: a router's, or one for each head of latent attention. Every
// element of the result is made by one thread in one order, whatever else the call computes.
#include "engine.h"

#include <algorithm>

#include "dispatch.h"
#include "kernel_convert.h"
#include "matrix.h"
#include "pool.h"
#include "step.h"

namespace trilobite {

namespace {

// Of a task.
constexpr int64_t TASK_ROWS = 8, TASK_TOKENS = 16;

}  // namespace

bool dense(const trilobite_dense_args &a) {
  if (!known_dtype(a.dtype)) return fail("dense: unknown element type");
  if (!dense_fits(a.heads, a.tokens, a.n, a.k))
    return fail("dense: %lld tokens, %lld matrices of [%lld, %lld]", (long long)a.tokens, (long long)a.heads,
                (long long)a.n, (long long)a.k);
  Workspace &ws = call_workspace();
  const bool converts = a.dtype != TRILOBITE_F32;
  const int64_t all = a.heads * a.tokens * a.k, bytes = all * (int64_t)sizeof(float);
  float *floats = converts ? ws.get<float>(all) : nullptr, *y = (float *)a.y;
  const float *x = converts ? floats : (const float *)a.x;
  if (converts) y = ws.get<float>(a.heads * a.tokens * a.n);
  const bool few = bytes < SMALL;
  if (converts && few) load_floats(a.x, (int)a.dtype, 0, all, floats);
  const int threads = a.heads * a.n * a.k * size_of(a.dtype) * a.tokens < SMALL ? 1 : (int)a.threads;
  const int64_t strips = ceil_div(a.n, TASK_ROWS), blocks = ceil_div(a.tokens, TASK_TOKENS);
  run_team(threads, [&](Member &me) {
    if (converts && !few)
      me.share(a.heads * a.tokens, [&](int64_t t) { load_floats(a.x, (int)a.dtype, t * a.k, a.k, floats + t * a.k); });
    me.share(a.heads * blocks * strips, [&](int64_t task) {
      const int64_t row = task % strips * TASK_ROWS, head = task / strips / blocks;
      const int64_t token = task / strips % blocks * TASK_TOKENS, at = head * a.tokens + token;
      tier().dense(a.w, (int)a.dtype, head * a.n + row, std::min(TASK_ROWS, a.n - row), a.k, x + at * a.k,
                   std::min(TASK_TOKENS, a.tokens - token), y + at * a.n + row, a.n);
    });
  });
  if (a.bias)
    for (int64_t i = 0; i < a.heads * a.n; i++) {
      const float b = element(a.bias, (int)a.dtype, i);
      for (int64_t t = 0; t < a.tokens; t++) y[(i / a.n * a.tokens + t) * a.n + i % a.n] += b;
    }
  if (converts) tier().store(y, a.heads * a.tokens * a.n, a.y, (int)a.dtype);
  return true;
}

}  // namespace trilobite
