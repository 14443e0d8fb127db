// Layers that keep a state of a fixed size; their heads, or channels, are shared among threads.
#include "engine.h"
#include "dispatch.h"
#include "matrix.h"
#include "pool.h"
#include "step.h"

namespace trilobite {

namespace {

constexpr int64_t CHANNELS = 1024;  // of a task
constexpr int64_t MOST = 1 << 13;   // heads, and values of a side of a state: 4 bytes of all, times tokens, fit 63 bits
constexpr int64_t MOST_TOKENS = 1 << 21;

bool all_within(std::initializer_list<int64_t> sizes) {
  for (int64_t size : sizes)
    if (size < 1 || size > MOST) return false;
  return true;
}

// Heads one by one, each with `floats` of scratch; bytes: of all of their states, times tokens.
template <typename Call> void for_heads(int64_t heads, int64_t bytes, int64_t threads, int64_t floats, Call call) {
  run_team(bytes < SMALL ? 1 : (int)threads, [&](Member &me) {
    float *scratch = worker_workspace().get<float>(floats);
    me.share(heads, [&](int64_t head) { call(head, scratch); });
  });
}

}  // namespace

bool check_convolution(const trilobite_convolution_args &a) {
  if (!known_dtype(a.dtype) || a.channels < 1 || a.channels > MOST * MOST || a.taps < 1 || a.taps > MOST_TAPS)
    return fail("convolution: %lld channels of %lld inputs, of type %lld", (long long)a.channels, (long long)a.taps,
                (long long)a.dtype);
  return true;
}

bool check_delta(const trilobite_delta_args &a) {
  if (!known_dtype(a.dtype) || a.tokens < 1 || a.tokens > MOST_TOKENS ||
      !all_within({a.heads, a.key_heads, a.width, a.value_width}) || a.heads % a.key_heads || a.value_width % ROWS)
    return fail("delta rule: %lld tokens, %lld heads of [%lld, %lld] on %lld keys, of type %lld", (long long)a.tokens,
                (long long)a.heads, (long long)a.width, (long long)a.value_width, (long long)a.key_heads,
                (long long)a.dtype);
  return true;
}

bool check_scan(const trilobite_scan_args &a) {
  if (!known_dtype(a.dtype) || a.tokens < 1 || a.tokens > MOST_TOKENS ||
      !all_within({a.heads, a.groups, a.width, a.size}) || a.heads % a.groups || a.size % ROWS)
    return fail("state space: %lld tokens, %lld heads of [%lld, %lld] in %lld groups, of type %lld", (long long)a.tokens,
                (long long)a.heads, (long long)a.width, (long long)a.size, (long long)a.groups, (long long)a.dtype);
  return true;
}

void convolve(const trilobite_convolution_args &a) {
  const int64_t bytes = 2 * a.channels * a.taps * size_of(a.dtype);
  run_team(bytes < SMALL ? 1 : (int)a.threads, [&](Member &me) {
    me.share(ceil_div(a.channels, CHANNELS), [&](int64_t task) {
      const int64_t first = task * CHANNELS, rest = a.channels - first;
      tier().convolve(a, first, rest < CHANNELS ? rest : CHANNELS);
    });
  });
}

void delta(const trilobite_delta_args &a) {
  for_heads(a.heads, a.tokens * a.heads * a.width * a.value_width * 4, a.threads,
            STATE_TOKENS * (3 * a.width + a.value_width + 1),
            [&](int64_t head, float *scratch) { tier().delta(a, head, scratch); });
}

void scan(const trilobite_scan_args &a) {
  for_heads(a.heads, a.tokens * a.heads * a.width * a.size * 4, a.threads, 2 * (a.size + a.width),
            [&](int64_t head, float *scratch) { tier().scan(a, head, scratch); });
}

}  // namespace trilobite
