/* Preloaded into a process: pthread_create and aligned_alloc fail when told so. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

static atomic_int threads_left = -1;                 /* that may start; -1: any number */
static atomic_int caller_left = -1, workers_left = -1; /* allocations that succeed, of the calling thread and of others */
static _Thread_local int caller;

void failing_threads(int left) { threads_left = left; }
void failing_memory(int of_caller, int of_workers) { caller = 1, caller_left = of_caller, workers_left = of_workers; }

static int may(atomic_int *left) {
  int n = atomic_load(left);
  while (n > 0 && !atomic_compare_exchange_weak(left, &n, n - 1)) {
  }
  return n != 0;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *argument) {
  int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = dlsym(RTLD_NEXT, "pthread_create");
  return may(&threads_left) ? real(thread, attr, run, argument) : EAGAIN;
}

void *aligned_alloc(size_t alignment, size_t size) {
  void *(*real)(size_t, size_t) = dlsym(RTLD_NEXT, "aligned_alloc");
  if (may(caller ? &caller_left : &workers_left)) return real(alignment, size);
  errno = ENOMEM;
  return NULL;
}
