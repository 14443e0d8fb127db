// GPTQ's loops over rows, which are independent of each other (the loops of trilobite/quantize/methods/gptq.py).
#include "dispatch.h"
#include "engine.h"
#include "matrix.h"
#include "pool.h"

namespace trilobite {
namespace {

// Rows that a call of a tier gets: as many as its registers have lanes.
template <class Work> void share_rows(int64_t rows, int64_t threads, int64_t bytes, const Work &work) {
  const int lanes = tier().lanes;
  run_team(threads < 1 ? 1 : (int)threads, [&](Member &me) {
    void *scratch = worker_workspace().get<uint8_t>(bytes);
    me.share(ceil_div(rows, lanes), [&](int64_t strip) {
      const int64_t first = strip * lanes;
      work(first, (int)(rows - first < lanes ? rows - first : lanes), scratch);
    });
  });
}

}  // namespace

bool feed_back(const trilobite_feedback_args &a) {
  const bool bits = a.bits == 2 || a.bits == 3 || a.bits == 4 || a.bits == 8;
  const bool group = a.group > 0 && a.columns % a.group == 0 && (!a.cost || a.group <= SPAN);
  if (!bits || !group || a.rows < 0 || a.columns < 1 || a.columns > a.upper_ld || a.upper_ld > (1 << 24))
    return fail("feed back: %lld bits, group %lld of %lld columns", (long long)a.bits, (long long)a.group,
                (long long)a.columns);
  if (a.units && (a.bits == 8 || a.symmetric || !a.cost)) return fail("feed back: not a format under super-scales");
  share_rows(a.rows, a.threads, a.columns * 64, [&](int64_t first, int count, void *scratch) {
    trilobite_feedback_args rows = a;
    if (a.units) rows.units += first;
    rows.w += first, rows.scale += first, rows.offset += first, rows.codes += first, rows.errors += first;
    tier().feed_back(rows, count, scratch);
  });
  return true;
}

bool descend(const trilobite_descent_args &a) {
  if (!is_under_super(a.columns, a.group, a.bits) || a.columns > SPAN || a.rows < 0 || a.columns > a.hessian_ld)
    return fail("descend: %lld bits, group %lld of %lld columns under super-scales", (long long)a.bits,
                (long long)a.group, (long long)a.columns);
  share_rows(a.rows, a.threads, 4 * a.columns * 64, [&](int64_t first, int count, void *scratch) {
    trilobite_descent_args rows = a;
    rows.codes += first, rows.scale += first, rows.offset += first, rows.units += first;
    rows.error += first, rows.slope += first;
    tier().descend(rows, count, scratch);
  });
  return true;
}

}  // namespace trilobite
