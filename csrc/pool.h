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
constexpr int MAX_SHARES = 8;  // of one job

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

class Member;

// The threads of one job.
class Team {
 public:
  explicit Team(int count) : count_(count) {
    for (int i = 0; i < MAX_SHARES * count; i++) taken_[i].next.store(0, std::memory_order_relaxed);
  }
  int count() const { return count_; }
  // What body throws is kept for rethrow(), and the others leave where they wait next.
  void run(int thread, const std::function<void(Member &)> &body) noexcept;
  // Throws what a thread threw first, if any did. All threads have returned.
  void rethrow() const;

 private:
  friend class Member;
  struct Abandoned {};
  // A cache line each, as all that many threads write.
  struct alignas(64) Counter { std::atomic<int64_t> next; };

  void wait_for(int shares);  // until all threads have done so many; throws when one has failed
  void finish(int shares);    // this thread has

  const int count_;
  Counter taken_[MAX_SHARES * MAX_THREADS];
  alignas(64) std::atomic<int> finished_{0};
  alignas(64) std::atomic<int> passed_{0};
  std::atomic<bool> failed_{false};
  Signal passing_;
  std::mutex first_error_mutex_;
  std::exception_ptr first_error_;
};

// One thread of a team.
class Member {
 public:
  Member(Team &team, int thread) : team_(team), thread_(thread) {}
  int threads() const { return team_.count(); }

  // Runs task(i) for i in [0, tasks), shared by all threads, each of which makes the same calls, at most MAX_SHARES. A thread
  // starts with a contiguous part, which keeps its reads sequential, and then takes what others have left. Tasks of earlier
  // calls are done when those of this one begin; its own when the next one's do, or the job has ended. Throws when another
  // thread has failed.
  template <typename Task> void share(int64_t tasks, const Task &task) {
    const int count = team_.count_;
    team_.wait_for(shares_);
    Team::Counter *taken = team_.taken_ + shares_ * count;
    for (int i = 0; i < count; i++) {
      const int owner = (thread_ + i) % count;
      const int64_t start = tasks * owner / count, size = tasks * (owner + 1) / count - start;
      std::atomic<int64_t> &next = taken[owner].next;
      // To look takes the line from nobody. Counts past the end, too: a counter is used once, so nobody needs to undo it.
      if (next.load(std::memory_order_relaxed) >= size) continue;
      for (int64_t k; (k = next.fetch_add(1, std::memory_order_relaxed)) < size;) task(start + k);
    }
    team_.finish(++shares_);
  }

 private:
  Team &team_;
  const int thread_;
  int shares_ = 0;
};

// Runs body(member) on up to `threads` threads, one of which is the caller. Throws what a thread threw first, and
// std::system_error when no thread can start; the next call begins afresh.
void run_team(int threads, const std::function<void(Member &)> &body);

// What affinity, the cgroup's quota and TRILOBITE_THREADS allow.
int max_threads();

}  // namespace trilobite
#endif
