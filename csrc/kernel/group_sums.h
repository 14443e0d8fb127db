// Groups under super-scales, where codes are multiplied as they are: the sum of a group's products, which fits 16 bits, by
// its scale, and its offset by the sum of its digits. That makes the integers, and so the bits of results, that products
// of what codes count make.

// Sums of a segment of `seg` columns from column `at` of the tile += offsets of its groups, less COUNT_BIAS, times the sums of
// their digits (`Digits::sums`). V: not every Isa has them.
template <int D, typename V = Isa>
__attribute__((always_inline)) static inline void add_offsets(Isa::Ints a[D], const Isa::Bytes &offsets,
                                                              const int16_t *sums, int seg, int group, int at) {
  const int pairs = seg / group > 2 ? 2 : 1;
  UNROLL for (int j = 0; j < pairs; j++) {
    Isa::Bytes pair = V::two_of(offsets, at / group / 2 + j);
    if constexpr (V::COUNT_BIAS != 0) pair = V::add_shorts(pair, Isa::factor(-V::COUNT_BIAS));
    UNROLL for (int d = 0; d < D; d++) {
      const int16_t *of = sums + d * SUMS + (group == HALF ? 2 * j : 4);
      int32_t both;
      memcpy(&both, of, 4);
      // Where a segment has but one group, the other's count nothing.
      if (seg == group) both = (int32_t)((uint32_t)(uint16_t)*of << (16 * (at / group % 2)));
      a[d] = V::dot_shorts(a[d], pair, V::two(both));
    }
  }
}
