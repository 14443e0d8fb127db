// Attention of the newest token of each of some texts. Rows are cut into chunks of one length, whose results are joined in
// order: threads share chunks, and heads where those are few, and neither changes a bit of the result.
#include "engine.h"

#include <algorithm>

#include "dispatch.h"
#include "matrix.h"
#include "pool.h"

namespace trilobite {

namespace {

constexpr int64_t CHUNK = 256;  // rows
// Values of results of chunks that wait to be joined: bounds the memory of a prompt.
constexpr int64_t SUMS_KEPT = 1 << 22;

int64_t chunks_of(const trilobite_attention_args &a, int64_t text) {
  return ceil_div(a.ends[text] - a.starts[text], CHUNK);
}

// False after leaving a message.
bool check_rows(const trilobite_attention_args &a) {
  int64_t first = a.starts[0], last = a.ends[0];
  for (int64_t t = 0; t < a.texts; t++) {
    if (a.ends[t] <= a.starts[t]) return fail("attention: text %lld has no rows", (long long)t);
    first = std::min(first, a.starts[t]), last = std::max(last, a.ends[t]);
  }
  for (int64_t i = first; i < last; i++)
    if (a.rows[i] < 0 || a.rows[i] >= a.limit)
      return fail("attention: row %lld of %lld", (long long)a.rows[i], (long long)a.limit);
  return true;
}

// Texts [begin, begin + count), which have so many chunks.
void pass(const trilobite_attention_args &a, int64_t begin, int64_t count, int64_t chunks) {
  Workspace &ws = call_workspace();
  float *top = ws.get<float>(chunks * a.heads), *total = ws.get<float>(chunks * a.heads);
  float *sums = ws.get<float>(chunks * a.heads * a.width);
  int64_t *text_of = ws.get<int64_t>(chunks), *first = ws.get<int64_t>(count + 1);
  int64_t rows = 0;
  first[0] = 0;
  for (int64_t i = 0; i < count; i++) {
    first[i + 1] = first[i] + chunks_of(a, begin + i);
    for (int64_t c = first[i]; c < first[i + 1]; c++) text_of[c] = i;
    rows += a.ends[begin + i] - a.starts[begin + i];
  }
  const int64_t work = rows * a.kv_heads * a.width * 4;
  const int threads = work < SMALL ? 1 : (int)a.threads;
  // Whole rows where there are chunks enough, since heads of a row lie side by side.
  const int64_t heads = ceil_div(a.kv_heads, threads == 1 ? 1 : ceil_div(4 * threads, chunks));
  const int64_t parts = ceil_div(a.kv_heads, heads), shared = a.heads / a.kv_heads;
  const auto part = [&](int64_t chunk, int64_t head, int64_t some) {
    const int64_t i = text_of[chunk], text = begin + i, row = a.starts[text] + (chunk - first[i]) * CHUNK;
    const int64_t length = std::min(a.ends[text] - row, CHUNK), at = chunk * a.heads + head * shared;
    return AttentionPart{text, row, length, head, some, top + at, total + at, sums + at * a.width};
  };
  run_team(threads, [&](Team &team, int thread) {
    float *scratch = worker_workspace().get<float>(heads * shared * (a.width + CHUNK) + a.width);
    team.share(thread, 0, chunks * parts, [&](int64_t task) {
      const int64_t head = task % parts * heads, rest = a.kv_heads - head;
      tier().attend(a, part(task / parts, head, rest < heads ? rest : heads), scratch);
    });
    team.share(thread, 1, count, [&](int64_t i) {
      for (int64_t h = 0; h < a.heads; h++) {
        AttentionPart p = part(first[i], 0, a.kv_heads);
        p.top += h, p.total += h, p.sums += h * a.width;
        tier().attend_join(a, begin + i, h, p, first[i + 1] - first[i], scratch);
      }
    });
  });
}

}  // namespace

bool attention(const trilobite_attention_args &a) {
  if (a.texts < 0 || a.heads < 1 || a.kv_heads < 1 || a.heads % a.kv_heads || a.width < ROWS || a.width % ROWS)
    return fail("attention: %lld heads of %lld values on %lld", (long long)a.heads, (long long)a.width,
                (long long)a.kv_heads);
  if (a.bias && a.distances < 1) return fail("attention: a bias for %lld distances", (long long)a.distances);
  if (a.texts == 0) return true;
  if (!check_rows(a)) return false;
  const int64_t most = std::max<int64_t>(1, SUMS_KEPT / (a.heads * a.width));
  for (int64_t begin = 0, end = 0; begin < a.texts; begin = end) {
    int64_t chunks = 0;
    do chunks += chunks_of(a, end++);
    while (end < a.texts && chunks + chunks_of(a, end) <= most);
    pass(a, begin, end - begin, chunks);
  }
  return true;
}

}  // namespace trilobite
