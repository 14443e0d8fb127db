// Groups under super-scales, where codes are multiplied as they are: the sum of a group's products, which fits 16 bits, by
// its scale, and its offset by the sum of its digits. That makes the integers, and so the bits of results, that products
// of what codes count make.

// Of pair j of the groups of a segment, which begins at column `at` of the tile: their offsets, less COUNT_BIAS, as 16-bit
// numbers.
template <typename V = Isa>
ALWAYS_INLINE Isa::Bytes offset_pair(const Isa::Bytes &offsets, int group, int at, int j) {
  Isa::Bytes pair = V::two_of(offsets, at / group / 2 + j);
  if constexpr (V::COUNT_BIAS != 0) pair = V::add_shorts(pair, Isa::factor(-V::COUNT_BIAS));
  return pair;
}

// Sums of the segment += the offsets of pair j times the sums of their digits (`Digits::sums`).
template <int D, typename V = Isa>
ALWAYS_INLINE void add_pair(Isa::Ints a[D], const Isa::Bytes &pair, const int16_t *sums, int seg, int group, int at,
                            int j) {
  UNROLL for (int d = 0; d < D; d++) {
    const int16_t *of = sums + d * SUMS + (group == HALF ? 2 * j : 4);
    int32_t both;
    memcpy(&both, of, 4);
    // Where a segment has but one group, the other's count nothing.
    if (seg == group) both = (int32_t)((uint32_t)(uint16_t)*of << (16 * (at / group % 2)));
    a[d] = V::dot_shorts(a[d], pair, V::two(both));
  }
}

static inline int pairs(int seg, int group) { return seg / group > 2 ? 2 : 1; }

// All pairs of a segment. V: not every Isa has them.
template <int D, typename V = Isa>
ALWAYS_INLINE void add_offsets(Isa::Ints a[D], const Isa::Bytes &offsets, const int16_t *sums, int seg, int group,
                               int at) {
  for (int j = 0; j < pairs(seg, group); j++)
    add_pair<D, V>(a, offset_pair<V>(offsets, group, at, j), sums, seg, group, at, j);
}
