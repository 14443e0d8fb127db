// What the machine could do: the limits that benchmarks print beside their figures.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "engine.h"
#include "dispatch.h"
#include "pool.h"

namespace trilobite {
namespace {

std::atomic<uint64_t> g_sink{0};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

// Processors differ in how far ahead they want to be told: a Granite Rapids reads a sixth less with the longer distance.
double read_seconds(const void *data, int64_t bytes, int threads) {
  constexpr int64_t CHUNK = 1 << 17, DISTANCES[] = {512, 2048};
  const auto *p = (const uint8_t *)data;
  double best = INFINITY;
  for (const int64_t ahead : DISTANCES) {
    const auto start = std::chrono::steady_clock::now();
    run_team(threads, [&](Member &me) {
      uint64_t sum = 0;
      me.share(bytes / CHUNK, [&](int64_t i) { sum ^= tier().read(p + i * CHUNK, CHUNK, ahead); });
      g_sink.fetch_xor(sum);
    });
    best = std::min(best, seconds_since(start));
  }
  return best;
}

double peak_macs(int digits, int threads) {
  std::atomic<int64_t> macs{0};
  const auto start = std::chrono::steady_clock::now();
  run_team(threads, [&](Member &me) { me.share(64, [&](int64_t) { macs.fetch_add(tier().spin(1000000, digits)); }); });
  return (double)macs.load() / seconds_since(start);
}

}  // namespace trilobite
