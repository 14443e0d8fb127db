// Attention of the newest token of each of some texts. Rows are cut into chunks of one length, whose results are joined in
// order: threads share chunks, and heads where those are few, and neither changes a bit of the result.
#include "engine.h"
#include "dispatch.h"
#include "matrix.h"
#include "pool.h"

namespace trilobite {

namespace {

constexpr int64_t CHUNK = 256;  // rows

// Chunks of all texts; 0 after leaving a message.
int64_t count_chunks(const trilobite_attention_args &a) {
  int64_t chunks = 0;
  for (int64_t t = 0; t < a.texts; t++) {
    const int64_t length = a.starts[t + 1] - a.starts[t];
    if (length < 1) return fail("attention: text %lld has no rows", (long long)t), 0;
    chunks += ceil_div(length, CHUNK);
  }
  for (int64_t i = a.starts[0]; i < a.starts[a.texts]; i++)
    if (a.rows[i] < 0 || a.rows[i] >= a.limit)
      return fail("attention: row %lld of %lld", (long long)a.rows[i], (long long)a.limit), 0;
  return chunks;
}

}  // namespace

bool attention(const trilobite_attention_args &a) {
  if (a.texts < 0 || a.heads < 1 || a.kv_heads < 1 || a.heads % a.kv_heads || a.width < ROWS || a.width % ROWS)
    return fail("attention: %lld heads of %lld values on %lld", (long long)a.heads, (long long)a.width,
                (long long)a.kv_heads);
  if (a.texts == 0) return true;
  const int64_t chunks = count_chunks(a);
  if (chunks == 0) return false;
  Workspace &ws = call_workspace();
  float *top = ws.get<float>(chunks * a.heads), *total = ws.get<float>(chunks * a.heads);
  float *sums = ws.get<float>(chunks * a.heads * a.width);
  int64_t *text_of = ws.get<int64_t>(chunks), *first = ws.get<int64_t>(a.texts + 1);
  first[0] = 0;
  for (int64_t t = 0; t < a.texts; t++) {
    first[t + 1] = first[t] + ceil_div(a.starts[t + 1] - a.starts[t], CHUNK);
    for (int64_t c = first[t]; c < first[t + 1]; c++) text_of[c] = t;
  }
  const int64_t work = (a.starts[a.texts] - a.starts[0]) * a.kv_heads * a.width * 4;
  const int threads = work < SMALL ? 1 : (int)a.threads;
  // Whole rows where there are chunks enough, since heads of a row lie side by side.
  const int64_t heads = ceil_div(a.kv_heads, threads == 1 ? 1 : ceil_div(4 * threads, chunks));
  const int64_t parts = ceil_div(a.kv_heads, heads), shared = a.heads / a.kv_heads;
  const auto part = [&](int64_t chunk, int64_t head, int64_t count) {
    const int64_t text = text_of[chunk], row = a.starts[text] + (chunk - first[text]) * CHUNK;
    const int64_t rest = a.starts[text + 1] - row, at = chunk * a.heads + head * shared;
    return AttentionPart{text, row, rest < CHUNK ? rest : CHUNK, head, count, top + at, total + at, sums + at * a.width};
  };
  run_team(threads, [&](Team &team, int thread) {
    float *scratch = worker_workspace().get<float>(heads * shared * (a.width + CHUNK) + a.width);
    team.share(thread, 0, chunks * parts, [&](int64_t task) {
      const int64_t head = task % parts * heads, rest = a.kv_heads - head;
      tier().attend(a, part(task / parts, head, rest < heads ? rest : heads), scratch);
    });
    team.share(thread, 1, a.texts, [&](int64_t text) {
      for (int64_t h = 0; h < a.heads; h++) {
        AttentionPart p = part(first[text], 0, a.kv_heads);
        p.top += h, p.total += h, p.sums += h * a.width;
        tier().attend_join(a, text, h, p, first[text + 1] - first[text], scratch);
      }
    });
  });
  return true;
}

}  // namespace trilobite
