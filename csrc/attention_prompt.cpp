// Attention of the tokens of a prompt, block by block: some tokens of the heads that share keys. Threads share blocks.
#include <algorithm>

#include "dispatch.h"
#include "engine.h"
#include "matrix.h"
#include "pool.h"

namespace trilobite {

constexpr int64_t FEW = 8;   // tokens: fewer are texts by themselves, whose rows threads share
constexpr int LEAST = ROWS;  // queries of a block: a register of them

int64_t prompt_tokens(const trilobite_attention_args &a, int64_t at) {
  if (a.bias) return 0;
  int64_t n = 1;
  for (; at + n < a.texts; n++) {
    const int64_t *start = a.starts + at + n, *end = a.ends + at + n;
    if (end[0] != end[-1] + 1 || start[0] < start[-1] || start[0] >= end[-1]) break;
  }
  return n < FEW ? 0 : n;
}

void attend_prompt(const trilobite_attention_args &a, int64_t at, int64_t tokens, int threads) {
  const int64_t shared = a.heads / a.kv_heads, together = std::min<int64_t>(shared, QUERIES);
  const int64_t parts = ceil_div(shared, together) * a.kv_heads;  // of the heads
  int64_t each = QUERIES / together;
  while (each * together > LEAST && ceil_div(tokens, each) * parts < 4 * threads) each = ceil_div(each, 2);
  const int64_t blocks = ceil_div(tokens, each), width = a.width;
  const int64_t scratch = 2 * width * QUERIES + PROMPT_ROWS * (QUERIES + 2 * width);
  run_team(threads, [&](Member &me) {
    float *own = worker_workspace().get<float>(scratch);
    me.share(blocks * parts, [&](int64_t task) {
      // The last tokens look at most, and come first.
      const int64_t first = (blocks - 1 - task / parts) * each, part = task % parts;
      const int64_t head = part / a.kv_heads * together + part % a.kv_heads * shared;
      const int64_t heads = std::min(together, (part % a.kv_heads + 1) * shared - head);
      tier().attend_prompt(a, {at + first, std::min(each, tokens - first), a.starts[at], head, heads}, own);
    });
  });
}

}  // namespace trilobite
