// Threads of our own: whoever waits, for a job, for the others of a team, or for the end of a job, spins for a moment,
// since what it waits for follows soon while a model decodes, and then sleeps, so that a thread that was pushed aside gets
// the core. One job at a time uses them; a second caller works alone, so that nothing waits for nothing.
#ifndef TRILOBITE_POOL_H
#define TRILOBITE_POOL_H
#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>

namespace trilobite {

constexpr int MAX_THREADS = 256;
constexpr int MAX_PHASES = 8;

// Wakes those who wait until something is so.
class Signal {
 public:
  template <typename Ready> void wait(Ready ready);  // `ready` looks at sequentially consistent atomics
  void notify();

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> sleeping_{0};
};

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
  // must make the same calls; `phase` numbers them from 0. Throws when another thread of the team has failed.
  void share(int thread, int phase, int64_t tasks, const std::function<void(int64_t)> &task);
  // body(team, thread); what it throws is kept for rethrow(), and the others leave at their next barrier.
  void run(int thread, const std::function<void(Team &, int)> &body) noexcept;
  // Throws what a thread threw first, if any did. All threads have returned.
  void rethrow() const;

 private:
  struct Abandoned {};

  void wait_for_all();

  // A cache line each: all threads write them all the time.
  struct alignas(64) Counter { std::atomic<int64_t> next; };
  const int count_;
  Counter taken_[MAX_PHASES][MAX_THREADS];
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> round_{0};
  Signal passed_;
  std::atomic<bool> failed_{false};
  std::mutex first_error_mutex_;
  std::exception_ptr first_error_;
};

// Runs body(team, thread) on up to `threads` threads, the caller being thread 0. Throws what a thread threw first, and
// std::system_error when no thread can start; the next call begins afresh.
void run_team(int threads, const std::function<void(Team &, int)> &body);

// What affinity, the cgroup's quota and TRILOBITE_THREADS allow.
int max_threads();

}  // namespace trilobite
#endif
