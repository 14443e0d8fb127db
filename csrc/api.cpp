// The C interface: range checks of scalars, then the engine. Every exception ends here, as a code and a line.
#include <exception>
#include <new>
#include <system_error>

#include "engine.h"
#include "dispatch.h"
#include "matrix.h"
#include "pool.h"
#include "step.h"

using namespace trilobite;

namespace {

int threads_of(int64_t wanted) { return wanted < 1 ? 1 : wanted > MAX_THREADS ? MAX_THREADS : (int)wanted; }

// Runs body, which returns false after fail(). Python's frames know nothing of C++ exceptions: one that left would end
// the process.
template <typename Body> int guarded(Body body) noexcept {
  try {
    return body() ? 0 : TRILOBITE_REFUSED;
  } catch (const std::bad_alloc &) {
    fail("the machine has too little memory for this call: pass fewer tokens at a time, or free some");
  } catch (const std::system_error &e) {
    fail("a thread of the CPU engine cannot start (%s): allow more (ulimit -u), or set TRILOBITE_THREADS=1", e.what());
  } catch (const std::exception &e) {
    fail("the CPU engine failed: %s", e.what());
  } catch (...) {
    fail("the CPU engine failed");
  }
  return TRILOBITE_EXHAUSTED;
}

}  // namespace

namespace trilobite {

bool check_experts(const trilobite_experts_args &a) {
  if (!known_dtype(a.dtype) || !known_dtype(a.weights_dtype) || !known_dtype(a.bias_dtype) || !known_digits(a.digits) ||
      (a.index_bytes != 8 && a.index_bytes != 4))
    return fail("experts: unknown element type or mode");
  constexpr int64_t LIMIT = 1 << 20;  // with those of describe(), keeps every product of sizes within int64
  if (a.tokens < 0 || a.active < 1 || a.experts < 1 || a.active > LIMIT || a.experts > LIMIT)
    return fail("experts: %lld tokens, %lld active of %lld experts", (long long)a.tokens, (long long)a.active,
                (long long)a.experts);
  if (a.hidden < 1 || a.intermediate < 1 || a.hidden > MOST_SIDE || a.intermediate > MOST_SIDE)
    return fail("experts: matrices of %lld and %lld are out of range", (long long)a.hidden, (long long)a.intermediate);
  return true;
}

}  // namespace trilobite

int trilobite_linear(const void *x, int64_t dtype, int64_t tokens, const trilobite_matrix *w, const void *bias,
                     int64_t bias_dtype, void *y, int64_t digits, int64_t threads) {
  const trilobite_product product{w, bias, bias_dtype, y};
  return trilobite_linears(x, dtype, tokens, &product, 1, digits, threads);
}

int trilobite_linears(const void *x, int64_t dtype, int64_t tokens, const trilobite_product *products, int64_t count,
                      int64_t digits, int64_t threads) {
  return guarded([&] {
    if (!known_dtype(dtype) || !known_digits(digits) || tokens < 0) return fail("linear: unknown element type or mode");
    Matrix matrices[MOST_TOGETHER];
    Product some[MOST_TOGETHER];
    int have = 0;
    const auto run = [&] { linear(x, (int)dtype, tokens, some, have, (int)digits, threads_of(threads)), have = 0; };
    for (int64_t i = 0; i < count; i++) {
      const trilobite_product &p = products[i];
      Matrix next;
      if (!known_dtype(p.bias_dtype)) return fail("linear: unknown element type or mode");
      if (!describe(*p.w, &next)) return false;
      if (have == MOST_TOGETHER || (have > 0 && !together(matrices[0], next, tokens))) run();
      matrices[have] = next;
      some[have] = {&matrices[have], p.bias, (int)p.bias_dtype, p.y};
      have++;
    }
    if (have > 0) run();
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

int trilobite_attention(const trilobite_attention_args *args) { return trilobite_attentions(args, 1); }

int trilobite_attentions(const trilobite_attention_args *calls, int64_t count) {
  return guarded([&] {
    for (int64_t i = 0; i < count; i++) {
      const trilobite_attention_args &a = calls[i];
      if (!known_dtype(a.dtype)) return fail("attention: unknown element type");
      if (a.dtype != calls->dtype || a.heads != calls->heads || a.kv_heads != calls->kv_heads || a.width != calls->width)
        return fail("attention: calls of several types or shapes");
    }
    return count < 1 || attention(calls, count, threads_of(calls->threads));
  });
}

int trilobite_dense(const trilobite_dense_args *args) {
  return guarded([&] {
    trilobite_dense_args a = *args;
    a.threads = threads_of(a.threads);
    return dense(a);
  });
}

int trilobite_convolve(const trilobite_convolution_args *args) {
  return guarded([&] {
    trilobite_convolution_args a = *args;
    a.threads = threads_of(a.threads);
    return check_convolution(a) && (convolve(a), true);
  });
}

int trilobite_delta(const trilobite_delta_args *args) {
  return guarded([&] {
    trilobite_delta_args a = *args;
    a.threads = threads_of(a.threads);
    return check_delta(a) && (delta(a), true);
  });
}

int trilobite_scan(const trilobite_scan_args *args) {
  return guarded([&] {
    trilobite_scan_args a = *args;
    a.threads = threads_of(a.threads);
    return check_scan(a) && (scan(a), true);
  });
}

int trilobite_quantize(const trilobite_quantize_args *args) {
  return guarded([&] {
    trilobite_quantize_args a = *args;
    a.threads = threads_of(a.threads);
    return quantize(a);
  });
}

int trilobite_feed_back(const trilobite_feedback_args *args) {
  return guarded([&] {
    trilobite_feedback_args a = *args;
    a.threads = threads_of(a.threads);
    return feed_back(a);
  });
}

int trilobite_descend(const trilobite_descent_args *args) {
  return guarded([&] {
    trilobite_descent_args a = *args;
    a.threads = threads_of(a.threads);
    return descend(a);
  });
}

int trilobite_nearest_points(const float *x, int64_t count, int64_t bits, double ratio, int64_t *codes, float *points) {
  return guarded([&] { return nearest_points(x, count, bits, ratio, codes, points); });
}

int trilobite_step(const trilobite_step_node *nodes, int64_t count, int64_t threads) {
  int code = 0;
  const int failed = guarded([&] { return code = step(nodes, count, threads_of(threads)), true; });
  return failed ? failed : code;
}

int trilobite_abi(void) { return TRILOBITE_ABI; }
const char *trilobite_error(void) { return last_error(); }
const char *trilobite_tier(void) { return tier().name; }
const char *trilobite_better_tier(void) {
  static thread_local std::string why;
  return guarded([&] { return why = better_tier(), true; }) ? "" : why.c_str();
}
int trilobite_set_tier(const char *name) { return choose_tier(name) ? 0 : -1; }
int64_t trilobite_max_threads(void) { return max_threads(); }
double trilobite_read_seconds(const void *data, int64_t bytes, int64_t threads) {
  double seconds = 0;
  const int code = guarded([&] { return seconds = read_seconds(data, bytes, threads_of(threads)), true; });
  return code ? code : seconds;
}
double trilobite_peak_macs(int64_t digits, int64_t threads) {
  double macs = 0;
  const int code = guarded([&] {
    if (!known_digits(digits)) return fail("peak_macs: unknown mode");
    return macs = peak_macs((int)digits, threads_of(threads)), true;
  });
  return code ? code : macs;
}
