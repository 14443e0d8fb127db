#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
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

constexpr auto SPIN = std::chrono::milliseconds(2);  // longer than what lies between two layers: waking takes 50 microseconds

class Pool {
 public:
  explicit Pool(int workers) {
    for (int i = 0; i < workers; i++) threads_.emplace_back([this, i] { work(i + 1); });
  }

  ~Pool() {
    post(nullptr, 0);
    for (auto &t : threads_) t.join();
  }

  int size() const { return (int)threads_.size() + 1; }
  std::mutex &in_use() { return in_use_; }

  // The caller holds in_use().
  void run(int threads, const std::function<void(int)> &body) {
    running_.store(threads - 1, std::memory_order_relaxed);
    post(&body, threads);
    body(0);
    for (int turn = 0; running_.load(std::memory_order_acquire) != 0; turn++) wait_turn(turn);
  }

 private:
  void post(const std::function<void(int)> *body, int threads) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = body;
      threads_wanted_ = threads;
      job_.fetch_add(1, std::memory_order_release);
    }
    if (sleeping_.load() > 0 || body == nullptr) wake_.notify_all();
  }

  void await_job(int seen) {
    const auto start = std::chrono::steady_clock::now();
    for (int turn = 0; turn % 32 || std::chrono::steady_clock::now() - start < SPIN; turn++) {
      if (job_.load(std::memory_order_acquire) != seen) return;
      wait_turn(turn);
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1);
    wake_.wait(lock, [&] { return job_.load(std::memory_order_relaxed) != seen; });
    sleeping_.fetch_sub(1);
  }

  void work(int thread) {
    for (int seen = 0;;) {
      await_job(seen);
      const std::function<void(int)> *body;
      int wanted;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        seen = job_.load(std::memory_order_relaxed);
        body = body_;
        wanted = threads_wanted_;
      }
      if (body == nullptr) return;
      if (thread >= wanted) continue;
      (*body)(thread);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<std::thread> threads_;
  std::mutex in_use_, mutex_;
  std::condition_variable wake_;
  const std::function<void(int)> *body_ = nullptr;
  int threads_wanted_ = 0;
  std::atomic<int> job_{0}, running_{0}, sleeping_{0};
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
  ~Lifetime() {
    delete g_pool;
    g_pool = nullptr;
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
    for (int64_t k; (k = start + next.fetch_add(1, std::memory_order_relaxed)) < end;) task(k);
  }
  wait_for_all();
}

void Team::wait_for_all() {
  if (count_ == 1) return;
  const int round = round_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
    return;
  }
  for (int turn = 0; round_.load(std::memory_order_acquire) == round; turn++) wait_turn(turn);
}

void run_team(int threads, const std::function<void(Team &, int)> &body) {
  threads = std::min(threads, max_threads());
  if (threads > 1) {
    Pool *p = pool();
    std::unique_lock<std::mutex> lock(p->in_use(), std::try_to_lock);
    if (lock.owns_lock()) {
      Team team(std::min(threads, p->size()));
      return p->run(team.count(), [&](int thread) { body(team, thread); });
    }
  }
  Team alone(1);
  body(alone, 0);
}

}  // namespace trilobite
