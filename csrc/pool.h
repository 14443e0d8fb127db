// Threads of our own: they spin for a moment after a job, since the next one follows soon while a model decodes, and
// then sleep. One job at a time uses them; a second caller works alone, so that nothing waits for nothing.
#ifndef TRILOBITE_POOL_H
#define TRILOBITE_POOL_H
#include <stdint.h>

#include <atomic>
#include <functional>

namespace trilobite {

constexpr int MAX_THREADS = 256;
constexpr int MAX_PHASES = 8;

// The threads of one job. Each phase is a range of tasks; every thread starts with a contiguous part of it, which keeps
// its reads sequential, and then takes what others have left.
class Team {
 public:
  explicit Team(int count) : count_(count) {
    for (auto &phase : taken_)
      for (int i = 0; i < count; i++) phase[i].next.store(0, std::memory_order_relaxed);
  }
  int count() const { return count_; }
  // Runs task(i) for i in [0, tasks), shared by all threads; returns when all tasks are done. Every thread of the team
  // must make the same calls; `phase` numbers them from 0.
  void share(int thread, int phase, int64_t tasks, const std::function<void(int64_t)> &task);

 private:
  void wait_for_all();

  struct alignas(64) Counter { std::atomic<int64_t> next; };
  const int count_;
  Counter taken_[MAX_PHASES][MAX_THREADS];
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> round_{0};
};

// Runs body(team, thread) on up to `threads` threads, the caller being thread 0.
void run_team(int threads, const std::function<void(Team &, int)> &body);

// What affinity, the cgroup's quota and TRILOBITE_THREADS allow.
int max_threads();

}  // namespace trilobite
#endif
