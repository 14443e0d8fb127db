// Jobs of random teams: every task of a call of `share` finds all tasks of the one before it done, each once, and what a task
// throws arrives. Built with ThreadSanitizer, which sees what the order of the threads only happened to hide.
//     TRILOBITE_THREADS=5 fuzz_pool [jobs] [seed]
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <random>
#include <stdexcept>
#include <vector>

#include "pool.h"

namespace {

using Values = std::vector<long>;
// Microseconds: after which threads do not spin any more, and of a call's first task, which others' overtake if they may.
constexpr int ASLEEP = 3000, LONG = 50;

std::mt19937_64 g_random;

int pick(int low, int high) { return low + (int)(g_random() % (uint64_t)(high - low + 1)); }

// What a task computes: of all that the tasks before made.
long of_all(const Values &before, int64_t task) {
  long sum = task;
  for (long x : before) sum += x;
  return sum % 1000;
}

// False where a job did not do what its tasks say.
bool fuzz_job() {
  const int threads = pick(1, trilobite::max_threads() + 1), shares = pick(1, trilobite::MAX_SHARES);
  const int failing = pick(0, 20) ? -1 : pick(0, shares - 1);
  std::vector<Values> made(shares + 1), expected(shares + 1);
  for (int i = 0; i <= shares; i++) made[i].resize(pick(1, 40)), expected[i].resize(made[i].size());
  for (int i = 0; i < shares; i++)
    for (size_t k = 0; k < expected[i + 1].size(); k++) expected[i + 1][k] = of_all(expected[i], (int64_t)k);
  if (!pick(0, 50)) usleep(ASLEEP);
  try {
    trilobite::run_team(threads, [&](trilobite::Member &me) {
      for (int i = 0; i < shares; i++)
        me.share((int64_t)made[i + 1].size(), [&](int64_t k) {
          if (k == 0) usleep(LONG);
          if (i == failing && k == 0) throw std::runtime_error("as asked");
          made[i + 1][k] += of_all(made[i], k);
        });
    });
  } catch (const std::runtime_error &) {
    return failing >= 0;
  }
  return failing < 0 && made == expected;
}

}  // namespace

int main(int argc, char **argv) {
  const int jobs = argc > 1 ? atoi(argv[1]) : 1000;
  g_random.seed(argc > 2 ? atoi(argv[2]) : 1);
  for (int i = 0; i < jobs; i++)
    if (!fuzz_job()) {
      printf("job %d of the pool went wrong\n", i);
      return 1;
    }
  printf("%d jobs of up to %d threads\n", jobs, trilobite::max_threads());
  return 0;
}
