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
    post(nullptr, 0);
    for (auto &t : threads_) t.join();
    threads_.clear();
  }

 private:
  void post(const std::function<void(int)> *body, int threads) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = body;
      threads_wanted_ = threads;
      job_.fetch_add(1);
    }
    posted_.notify();
  }

  void work(int thread) {
    for (int seen = 0;;) {
      posted_.wait([&] { return job_.load() != seen; });
      const std::function<void(int)> *body;
      int wanted;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        seen = job_.load();
        body = body_;
        wanted = threads_wanted_;
      }
      if (body == nullptr) return;
      if (thread >= wanted) continue;
      (*body)(thread);
      if (running_.fetch_sub(1) == 1) done_.notify();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex in_use_, mutex_;
  Signal posted_, done_;
  const std::function<void(int)> *body_ = nullptr;
  int threads_wanted_ = 0;
  std::atomic<int> job_{0}, running_{0};
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

void Team::share(int thread, int phase, int64_t tasks, const std::function<void(int64_t)> &task) {
  for (int i = 0; i < count_; i++) {
    const int owner = (thread + i) % count_;
    const int64_t start = tasks * owner / count_, end = tasks * (owner + 1) / count_;
    std::atomic<int64_t> &next = taken_[phase][owner].next;
    // Counts past the end, too: a counter is used once, so nobody needs to undo it.
    for (int64_t k; (k = start + next.fetch_add(1, std::memory_order_relaxed)) < end;) task(k);
  }
  wait_for_all();
}

void Team::wait_for_all() {
  if (count_ == 1) return;
  const int round = round_.load();
  if (arrived_.fetch_add(1) == count_ - 1) {
    arrived_.store(0);
    round_.store(round + 1);
    passed_.notify();
  } else {
    passed_.wait([&] { return round_.load() != round || failed_.load(); });
  }
  if (failed_.load()) throw Abandoned();
}

void Team::run(int thread, const std::function<void(Team &, int)> &body) noexcept {
  try {
    body(*this, thread);
  } catch (const Abandoned &) {
  } catch (...) {
    {
      std::lock_guard<std::mutex> lock(first_error_mutex_);
      if (!first_error_) first_error_ = std::current_exception();
    }
    failed_.store(true);
    passed_.notify();
  }
}

void Team::rethrow() const {
  if (first_error_) std::rethrow_exception(first_error_);
}

void run_team(int threads, const std::function<void(Team &, int)> &body) {
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
  body(alone, 0);
}

}  // namespace trilobite
