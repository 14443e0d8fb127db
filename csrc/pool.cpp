#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>
#include <vector>

namespace trilobite {
namespace {

// One turn of a waiting loop. After a few microseconds of pauses every turn offers the core to others: to torch's own
// threads between our calls, and to a thread of ours that was pushed aside while the others wait for it.
inline void wait_turn(int turn) {
#ifdef TRILOBITE_X86
  if (turn < 128) return __builtin_ia32_pause();
#elif defined(TRILOBITE_ARM)
  if (turn < 128) {
    __asm__ volatile("yield");
    return;
  }
#endif
  (void)turn;
  sched_yield();
}

// Longer than what lies between two layers of a model that decodes: to wake a thread takes 50 microseconds.
constexpr auto SPIN = std::chrono::milliseconds(2);

}  // namespace

template <typename Ready> void Signal::wait(Ready ready) {
  if (ready()) return;
  const auto start = std::chrono::steady_clock::now();
  for (int turn = 0; turn % 32 || std::chrono::steady_clock::now() - start < SPIN; turn++) {
    if (ready()) return;
    wait_turn(turn);
  }
  std::unique_lock<std::mutex> lock(mutex_);
  sleeping_.fetch_add(1);
  wake_.wait(lock, ready);
  sleeping_.fetch_sub(1);
}

// What `ready` looks at has changed before. Either this sees the sleeper, or the sleeper sees the change: all of it is
// sequentially consistent.
void Signal::notify() {
  if (sleeping_.load() == 0) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
  }
  wake_.notify_all();
}

namespace {

class Pool {
 public:
  // Throws std::system_error when a thread cannot start; those that have started end.
  explicit Pool(int workers) {
    try {
      for (int i = 0; i < workers; i++) threads_.emplace_back([this, i] { work(i + 1); });
    } catch (...) {
      stop();
      throw;
    }
  }

  int size() const { return (int)threads_.size() + 1; }
  std::mutex &in_use() { return in_use_; }

  // The caller holds in_use(). `body` must not throw.
  void run(int threads, const std::function<void(int)> &body) {
    running_.store(threads - 1);
    post(&body, threads);
    body(0);
    done_.wait([&] { return running_.load() == 0; });
  }

  void stop() {
    post(nullptr, MAX_THREADS);
    for (auto &t : threads_) t.join();
    threads_.clear();
  }

 private:
  void post(const std::function<void(int)> *body, int threads) {
    body_ = body;
    job_.store((job_.load() / JOB + 1) * JOB + threads);
    posted_.notify();
  }

  void work(int thread) {
    for (uint64_t seen = 0;;) {
      posted_.wait([&] { return job_.load() != seen; });
      seen = job_.load();
      if (thread >= (int)(seen % JOB)) continue;
      // Of this job: no other one is posted before all its threads have said that they are done.
      if (body_ == nullptr) return;
      (*body_)(thread);
      if (running_.fetch_sub(1) == 1) done_.notify();
    }
  }

  static constexpr uint64_t JOB = 2 * MAX_THREADS;

  std::vector<std::thread> threads_;
  std::mutex in_use_;
  Signal posted_, done_;
  // Who waits for a job looks at a line that nobody writes meanwhile. In one word the number of jobs, times JOB, and how many
  // threads this one has, so that who is not one of them reads nothing else.
  alignas(64) std::atomic<uint64_t> job_{0};
  const std::function<void(int)> *body_ = nullptr;
  alignas(64) std::atomic<int> running_{0};
};

// A pool is leaked on purpose in a forked child, where its threads do not exist and its locks may be held.
std::mutex *g_guard = new std::mutex;
Pool *g_pool = nullptr;

void forget_pool() {
  g_guard = new std::mutex;
  g_pool = nullptr;
}

struct Lifetime {
  Lifetime() { pthread_atfork(nullptr, nullptr, forget_pool); }
  // Waits for a job that another thread runs, and keeps the pool: who comes later works alone, and nothing is freed
  // under anybody.
  ~Lifetime() {
    std::lock_guard<std::mutex> lock(*g_guard);
    if (g_pool == nullptr) return;
    g_pool->in_use().lock();
    g_pool->stop();
  }
} g_lifetime;

Pool *pool() {
  std::lock_guard<std::mutex> lock(*g_guard);
  if (g_pool == nullptr) g_pool = new Pool(max_threads() - 1);
  return g_pool;
}

int quota_threads() {
  long long quota = 0, period = 0;
  if (FILE *f = fopen("/sys/fs/cgroup/cpu.max", "r")) {
    const int read = fscanf(f, "%lld %lld", &quota, &period);
    fclose(f);
    if (read == 2 && period > 0) return std::max(1, (int)((quota + period - 1) / period));
  }
  FILE *q = fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "r"), *p = fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "r");
  const bool read = q && p && fscanf(q, "%lld", &quota) == 1 && fscanf(p, "%lld", &period) == 1;
  if (q) fclose(q);
  if (p) fclose(p);
  return read && quota > 0 && period > 0 ? std::max(1, (int)((quota + period - 1) / period)) : MAX_THREADS;
}

int detect_threads() {
  cpu_set_t set;
  int count = (int)std::max(1u, std::thread::hardware_concurrency());
  if (sched_getaffinity(0, sizeof set, &set) == 0) count = CPU_COUNT(&set);
  count = std::min(count, quota_threads());
  if (const char *text = getenv("TRILOBITE_THREADS")) {
    const int wanted = atoi(text);
    if (wanted > 0) count = wanted;
  }
  return std::min(std::max(1, count), MAX_THREADS);
}

}  // namespace

int max_threads() {
  static const int count = detect_threads();
  return count;
}

void Team::finish(int shares) {
  if (finished_.fetch_add(1) + 1 < shares * count_) return;
  passed_.store(shares);
  passing_.notify();
}

void Team::wait_for(int shares) {
  passing_.wait([&] { return passed_.load() >= shares || failed_.load(); });
  if (failed_.load()) throw Abandoned();
}

void Team::run(int thread, const std::function<void(Member &)> &body) noexcept {
  try {
    Member member(*this, thread);
    body(member);
  } catch (const Abandoned &) {
  } catch (...) {
    {
      std::lock_guard<std::mutex> lock(first_error_mutex_);
      if (!first_error_) first_error_ = std::current_exception();
    }
    failed_.store(true);
    passing_.notify();
  }
}

void Team::rethrow() const {
  if (first_error_) std::rethrow_exception(first_error_);
}

void run_team(int threads, const std::function<void(Member &)> &body) {
  threads = std::min(threads, max_threads());
  if (threads > 1) {
    Pool *p = pool();
    std::unique_lock<std::mutex> lock(p->in_use(), std::try_to_lock);
    if (lock.owns_lock()) {
      Team team(std::min(threads, p->size()));
      p->run(team.count(), [&](int thread) { team.run(thread, body); });
      return team.rethrow();
    }
  }
  Team alone(1);
  Member member(alone, 0);
  body(member);
}

}  // namespace trilobite
