// The C interface: range checks, then the engine. No exception leaves it.
#include <new>

#include "engine.h"
#include "dispatch.h"
#include "matrix.h"
#include "pool.h"

using namespace trilobite;

namespace {

bool known_dtype(int64_t d) { return d == TRILOBITE_F32 || d == TRILOBITE_F16 || d == TRILOBITE_BF16; }
bool known_digits(int64_t d) { return d == TRILOBITE_EXACT || d == TRILOBITE_INT8; }
int threads_of(int64_t wanted) { return wanted < 1 ? 1 : wanted > MAX_THREADS ? MAX_THREADS : (int)wanted; }

// Runs body, which returns false after fail(); turns lack of memory into an error too.
template <typename Body> int guarded(Body body) {
  try {
    return body() ? 0 : -1;
  } catch (const std::bad_alloc &) {
    fail("out of memory");
    return -1;
  }
}

bool check_experts(const trilobite_experts_args &a) {
  if (!known_dtype(a.dtype) || !known_dtype(a.weights_dtype) || !known_dtype(a.bias_dtype) || !known_digits(a.digits) ||
      (a.index_bytes != 8 && a.index_bytes != 4))
    return fail("experts: unknown element type or mode");
  if (a.tokens < 0 || a.active < 1 || a.experts < 1 || a.active > (1 << 20))
    return fail("experts: %lld tokens, %lld active of %lld experts", (long long)a.tokens, (long long)a.active,
                (long long)a.experts);
  return true;
}

}  // namespace

int trilobite_linear(const void *x, int64_t dtype, int64_t tokens, const trilobite_matrix *w, const void *bias,
                     int64_t bias_dtype, void *y, int64_t digits, int64_t threads) {
  return guarded([&] {
    Matrix m;
    if (!known_dtype(dtype) || !known_dtype(bias_dtype) || !known_digits(digits) || tokens < 0)
      return fail("linear: unknown element type or mode");
    if (!describe(*w, &m)) return false;
    linear(x, (int)dtype, tokens, m, bias, (int)bias_dtype, y, (int)digits, threads_of(threads));
    return true;
  });
}

int trilobite_rotate(const trilobite_rotation *r, const void *signs, int64_t tuned, int64_t adjoint, float *x,
                     int64_t count) {
  return guarded([&] {
    if (r == nullptr || r->n < 1 || !fits(r, r->n)) return fail("rotate: the orders of the cores do not multiply to n");
    float *buffer = call_workspace().get<float>(r->n);
    for (int64_t i = 0; i < count; i++)
      tier().rotate({(const uint8_t *)signs, tuned != 0, r}, adjoint != 0, x + i * r->n, buffer);
    return true;
  });
}

int trilobite_experts(const trilobite_experts_args *args) {
  return guarded([&] {
    trilobite_experts_args a = *args;
    a.threads = threads_of(a.threads);
    return check_experts(a) && experts(a);
  });
}

int trilobite_quantize(const trilobite_quantize_args *args) {
  return guarded([&] {
    trilobite_quantize_args a = *args;
    a.threads = threads_of(a.threads);
    return quantize(a);
  });
}

int trilobite_abi(void) { return TRILOBITE_ABI; }
const char *trilobite_error(void) { return last_error(); }
const char *trilobite_tier(void) { return tier().name; }
int trilobite_set_tier(const char *name) { return choose_tier(name) ? 0 : -1; }
int64_t trilobite_max_threads(void) { return max_threads(); }
double trilobite_read_seconds(const void *data, int64_t bytes, int64_t threads) {
  return read_seconds(data, bytes, threads_of(threads));
}
double trilobite_peak_macs(int64_t digits, int64_t threads) {
  return known_digits(digits) ? peak_macs((int)digits, threads_of(threads)) : 0;
}
