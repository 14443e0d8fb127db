// Attention of the newest token of each of some texts; those of a prompt have a way of their own (attention_prompt.cpp).
// Rows are cut into chunks of one length, whose results are joined in order: threads share chunks, and heads where those are
// few, and neither changes a bit of the result.
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

// Texts of some calls, one after the other.
struct Text {
  const trilobite_attention_args *call;
  int64_t at;

  int64_t rows() const { return call->ends[at] - call->starts[at]; }
  int64_t chunks() const { return ceil_div(rows(), CHUNK); }
  Text next() const { return at + 1 < call->texts ? Text{call, at + 1} : Text{call + 1, 0}; }
};

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

bool check(const trilobite_attention_args &a) {
  if (a.texts < 0 || a.heads < 1 || a.kv_heads < 1 || a.heads % a.kv_heads || a.width < ROWS || a.width % ROWS)
    return fail("attention: %lld heads of %lld values on %lld", (long long)a.heads, (long long)a.width,
                (long long)a.kv_heads);
  if (a.bias && a.distances < 1) return fail("attention: a bias for %lld distances", (long long)a.distances);
  return a.texts == 0 || check_rows(a);
}

// `count` texts from `begin` on, which have so many chunks.
void pass(Text begin, int64_t count, int64_t chunks, int wanted) {
  const trilobite_attention_args &a = *begin.call;
  Workspace &ws = call_workspace();
  float *top = ws.get<float>(chunks * a.heads), *total = ws.get<float>(chunks * a.heads);
  float *sums = ws.get<float>(chunks * a.heads * a.width);
  int64_t *text_of = ws.get<int64_t>(chunks), *first = ws.get<int64_t>(count + 1);
  Text *texts = ws.get<Text>(count);
  int64_t rows = 0;
  first[0] = 0;
  for (int64_t i = 0; i < count; i++, begin = begin.next()) {
    texts[i] = begin;
    first[i + 1] = first[i] + begin.chunks();
    for (int64_t c = first[i]; c < first[i + 1]; c++) text_of[c] = i;
    rows += begin.rows();
  }
  const int64_t work = rows * a.kv_heads * a.width * 4;
  const int threads = work < SMALL ? 1 : wanted;
  // Whole rows where there are chunks enough, since heads of a row lie side by side.
  const int64_t heads = ceil_div(a.kv_heads, threads == 1 ? 1 : ceil_div(4 * threads, chunks));
  const int64_t parts = ceil_div(a.kv_heads, heads), shared = a.heads / a.kv_heads;
  const auto part = [&](int64_t chunk, int64_t head, int64_t some) {
    const int64_t i = text_of[chunk], row = texts[i].call->starts[texts[i].at] + (chunk - first[i]) * CHUNK;
    const int64_t length = std::min(texts[i].call->ends[texts[i].at] - row, CHUNK), at = chunk * a.heads + head * shared;
    return AttentionPart{texts[i].at, row, length, head, some, top + at, total + at, sums + at * a.width};
  };
  const auto join = [&](int64_t i, int64_t head, float *scratch) {
    AttentionPart p = part(first[i], 0, a.kv_heads);
    p.top += head, p.total += head, p.sums += head * a.width;
    tier().attend_join(*texts[i].call, texts[i].at, head, p, first[i + 1] - first[i], scratch);
  };
  const bool whole = chunks == count;  // every text is one chunk, and is joined where it was computed
  run_team(threads, [&](Member &me) {
    float *scratch = worker_workspace().get<float>(heads * shared * (a.width + CHUNK) + a.width);
    me.share(chunks * parts, [&](int64_t task) {
      const int64_t chunk = task / parts, head = task % parts * heads, some = std::min(heads, a.kv_heads - head);
      tier().attend(*texts[text_of[chunk]].call, part(chunk, head, some), scratch);
      for (int64_t h = head * shared; whole && h < (head + some) * shared; h++) join(chunk, h, scratch);
    });
    if (!whole) me.share(count * a.heads, [&](int64_t i) { join(i / a.heads, i % a.heads, scratch); });
  });
}

}  // namespace

bool attention(const trilobite_attention_args *calls, int64_t count, int threads) {
  Text text{calls, 0};
  int64_t left = 0;
  for (int64_t i = 0; i < count; left += calls[i++].texts) {
    if (!check(calls[i])) return false;
    if (calls[i].texts == 0 && count > 1) return fail("attention: a call without texts among others");
  }
  const int64_t most = std::max<int64_t>(1, SUMS_KEPT / (calls->heads * calls->width));
  while (left > 0) {
    const Text begin = text;
    int64_t some = prompt_tokens(*text.call, text.at), chunks = 0;
    if (some) {
      attend_prompt(*text.call, text.at, some, threads);
      for (int64_t i = 0; i < some; i++) text = text.next();
    } else {
      do chunks += text.chunks(), text = text.next(), some++;
      while (some < left && chunks + text.chunks() <= most && !prompt_tokens(*text.call, text.at));
      pass(begin, some, chunks, threads);
    }
    left -= some;
  }
  return true;
}

}  // namespace trilobite
