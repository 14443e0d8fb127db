// Attention of the newest token of each of some texts: heads of texts are shared out to threads.
#include "engine.h"
#include "dispatch.h"
#include "matrix.h"
#include "pool.h"

namespace trilobite {

namespace {

// Numbers that `attend` wants for so many heads of k.
int64_t attention_scratch(const trilobite_attention_args &a, int64_t count, int64_t length) {
  return count * (a.heads / a.kv_heads) * (2 * a.width + length + 4 + 1);
}

// The longest text; 0 after leaving a message.
int64_t longest(const trilobite_attention_args &a) {
  int64_t most = 0;
  for (int64_t t = 0; t < a.texts; t++) {
    const int64_t length = a.starts[t + 1] - a.starts[t];
    if (length < 1) return fail("attention: text %lld has no rows", (long long)t), 0;
    most = length > most ? length : most;
  }
  for (int64_t i = a.starts[0]; i < a.starts[a.texts]; i++)
    if (a.rows[i] < 0 || a.rows[i] >= a.limit)
      return fail("attention: row %lld of %lld", (long long)a.rows[i], (long long)a.limit), 0;
  return most;
}

}  // namespace

bool attention(const trilobite_attention_args &a) {
  if (a.texts < 0 || a.heads < 1 || a.kv_heads < 1 || a.heads % a.kv_heads || a.width < ROWS || a.width % ROWS)
    return fail("attention: %lld heads of %lld values on %lld", (long long)a.heads, (long long)a.width,
                (long long)a.kv_heads);
  if (a.texts == 0) return true;
  const int64_t most = longest(a);
  if (most == 0) return false;
  const int64_t work = (a.starts[a.texts] - a.starts[0]) * a.kv_heads * a.width * 4;
  const int threads = work < SMALL ? 1 : (int)a.threads;
  // Whole rows where there are texts enough, since heads of a row lie side by side.
  const int64_t parts = ceil_div(4 * threads, a.texts), count = ceil_div(a.kv_heads, threads == 1 ? 1 : parts);
  const int64_t per_text = ceil_div(a.kv_heads, count);
  run_team(threads, [&](Team &team, int thread) {
    float *scratch = worker_workspace().get<float>(attention_scratch(a, count, most));
    team.share(thread, 0, a.texts * per_text, [&](int64_t task) {
      const int64_t first = task % per_text * count, rest = a.kv_heads - first;
      tier().attend(a, task / per_text, first, rest < count ? rest : count, scratch);
    });
  });
  return true;
}

}  // namespace trilobite
