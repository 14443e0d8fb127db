// What the ways to run a layer of experts share: experts.cpp and experts_down.cpp (affine formats), lattice_experts.cpp (with
// rotations).
#ifndef TRILOBITE_EXPERTS_H
#define TRILOBITE_EXPERTS_H
#include <atomic>

#include "engine.h"
#include "pool.h"

namespace trilobite {

struct Active {
  int64_t expert, first;  // first of its pairs in the sorted order
  int count;
  bool gated;
  Matrix gate, up, down;
  Digits x, h;
  float *z_gate, *z_up, *z_down;
  // Where bands of gate and up lie apart: h [intermediate] of its token, units that are not done. Otherwise NULL.
  float *whole_h;
  std::atomic<int64_t> *left;
};

struct ExpertsCall {
  const trilobite_experts_args &a;
  const Tier &t;
  int64_t start, tokens;  // of this pass
  Active *active;
  int64_t count;   // of active experts
  int32_t *token;  // [pairs] token of each pair, sorted by expert; relative to `start`
  float *weight;   // [pairs]
  bool shared_x;   // one token: every expert reads the same digits
  bool sums;       // some matrix reads sums of digits
  // For `down_apart`, or NULL: [pairs, hidden] what each expert makes, sorted like `token`; [tokens, active] the pairs of a
  // token, in the order of the experts, then -1.
  float *results;
  int32_t *pairs;

  const uint8_t *x() const;
};

int64_t element_size(int64_t dtype);
float *low_rank_buffer(Workspace &ws, const Matrix &m, int count);
// 16 ranks at a time: of a compensator's V, or of those of gate and then up, times x.
int64_t ranks(const Matrix &m);
void project(const ExpertsCall &c, const Matrix &m, int64_t i, const Digits &x, float *z, void *scratch);
void project_x(const ExpertsCall &c, const Active &e, int64_t i, void *scratch);
// Where the biases of an expert begin in gate_up_bias.
int64_t gate_bias(const trilobite_experts_args &a, int64_t expert);
int64_t up_bias(const trilobite_experts_args &a, int64_t expert);
void add_bias(const trilobite_experts_args &a, const void *bias, int64_t at, int64_t width, int count, float *out,
              int64_t ld);
// Bands of a task of the down projections of all experts: wide when there are many tokens, so that their digits are read less
// often.
int down_bands(const ExpertsCall &c, int threads);
inline int64_t units(const Matrix &m) { return ceil_div(m.bands, UNIT_BANDS); }

// One flat range of tasks over all active experts: `size(expert)` tasks each.
template <typename Size, typename Task>
void share_flat(const ExpertsCall &c, Member &me, Size size, Task task) {
  int64_t total = 0;
  for (int64_t i = 0; i < c.count; i++) total += size(c.active[i]);
  if (total == 0) return;
  int64_t i = 0, first = 0;  // tasks come in ascending order within a stretch, so the search goes on from the last
  me.share(total, [&](int64_t k) {
    if (k < first) i = 0, first = 0;
    for (int64_t n; k >= first + (n = size(c.active[i])); i++) first += n;
    task(c.active[i], k - first);
  });
}

// The down projections and the sums of the layer. Together: a task is of some rows of all experts, and adds their products up
// while they are in the cache. Apart: a task is of one expert, and follows what was read before it; the products are added up
// when all are there. `most`: tokens of the busiest expert; `ws`: the thread's.
void down_together(const ExpertsCall &c, Member &me, int most, Workspace &ws, void *scratch);
void down_apart(const ExpertsCall &c, Member &me, int most, Workspace &ws, void *scratch);

// The pass for layers in which an active expert has a matrix in a lattice format.
// `most`: tokens of the busiest expert.
void lattice_pass(const ExpertsCall &c, Workspace &ws, int threads, int most);

}  // namespace trilobite
#endif
