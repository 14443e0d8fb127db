#include "workspace.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <new>

namespace trilobite {
namespace {
constexpr int64_t PIECE = 1 << 20;
constexpr int64_t KEPT = 64 << 20;
}  // namespace

Workspace::~Workspace() {
  for (const Piece &p : pieces_) free(p.data);
}

void *Workspace::bytes(int64_t size) {
  size = ceil_div(std::max<int64_t>(size, 1), 64) * 64;
  if (pieces_.empty() || used_ + size > pieces_.back().size) {
    const int64_t room = std::max(size, PIECE);
    pieces_.reserve(pieces_.size() + 1);  // so that nothing throws between an allocation and its owner
    auto *data = (uint8_t *)aligned_alloc(64, room);
    if (data == nullptr) throw std::bad_alloc();
    pieces_.push_back({data, room});
    used_ = 0;
  }
  void *at = pieces_.back().data + used_;
  used_ += size;
  return at;
}

Digits Workspace::digits(const Tier &t, const Activations &a) {
  Digits d{};
  const int parts = a.seg < BLOCK ? 0 : t.parts(a);  // they come in whole blocks of columns
  d.k = a.k, d.segments = a.k / a.seg, d.count = (int)a.count, d.seg = a.seg, d.digits = a.digits;
  d.whole = parts == WHOLE, d.words = parts == WORDS, d.parts = d.whole ? 1 : d.words ? 0 : parts;
  d.two = a.two(), d.summed = a.sums;
  const int64_t q = a.count * a.k * d.element_bytes(), s = a.count * d.segments;
  d.q = get<int8_t>(q + SLACK);
  d.scale = get<float>(s + TOKENS);
  d.sum = get<float>(s + TOKENS);
  if (d.words) d.pairs = get<LowPairs>(d.blocks() * d.segments);
  else if (!d.parts) d.sums = get<int16_t>(s * d.digits * SUMS);
  if (!d.words && !d.parts && d.digits > 1) d.low = get<LowSteps>(s);
  memset(d.q + q, 0, SLACK);
  memset(d.scale + s, 0, TOKENS * sizeof(float));
  memset(d.sum + s, 0, TOKENS * sizeof(float));
  return d;
}

// Several pieces become one, so the next call of the same size finds all its memory in one place.
void Workspace::reset() {
  used_ = 0;
  if (pieces_.size() < 2 && (pieces_.empty() || pieces_[0].size <= KEPT)) return;
  int64_t total = 0;
  for (const Piece &p : pieces_) {
    total += p.size;
    free(p.data);
  }
  pieces_.clear();
  if (total <= KEPT) (void)bytes(total);
  used_ = 0;
}

Workspace &call_workspace() {
  thread_local Workspace w;
  w.reset();
  return w;
}

Workspace &worker_workspace() {
  thread_local Workspace w;
  w.reset();
  return w;
}

}  // namespace trilobite
