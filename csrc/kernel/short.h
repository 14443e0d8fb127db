// A token, or as few as registers have room for sums of. Sums of a segment, or of a group under super-scales (group_sums.h),
// are made in a run: where a product of bytes is two sums of two in 16 bits, of 16 bits, and only then widened to 32; with
// VNNI of 32. They are the integers, and make the bits of results, that rows.h makes. More tokens: short_many.h, words.h.

// Tokens that share a decoded step.
constexpr int most_short(int digits) { return digits == 1 ? Isa::SHORT_INT8 : Isa::SHORT_EXACT; }

constexpr int PART = HALF / 4;  // steps that have a lowest of three digits together, or have none (`LowSteps::parts`)

template <int KIND> constexpr int stored_bits() { return KIND >= SUPER ? KIND - SUPER : KIND; }

template <int KIND> using ShortPlanes = Planes<stored_bits<KIND>(), Isa::LANES == 16>;

// Steps of a run, where it ends in a block of 32 columns; or 0: it is that of a segment. In 16 bits at most 2 * 7 * 128 or
// 2 * 15 * 128 of each fit; a group's sum has to, with VNNI 4 * 15 * 128.
template <int KIND, int SUB> constexpr int run_steps() {
  constexpr bool wide = stored_bits<KIND>() == 4;
  if (SUB) return wide && !Isa::SHORT_SUMS ? PART : SUB / 4;
  return wide && Isa::SHORT_SUMS ? BLOCK / 4 : 0;
}

// Whether, where the run is that of a segment and of 32 bits, every other step goes to the sums themselves: twice as many that
// do not wait for each other, and codes of odd steps may stay at the bit of their byte where they are.
constexpr bool two_sums(int run) { return Isa::LANES == 16 && !Isa::SHORT_SUMS && run == 0; }

// Sums of D digits of NT tokens in a segment.
template <int D, int NT, typename V = Isa> struct Sums {
  Isa::Ints a[NT][D];
  typename V::Run run[NT][D];

  void begin() {
    UNROLL for (int t = 0; t < NT; t++) UNROLL for (int d = 0; d < D; d++) {
      a[t][d] = Isa::zero();
      run[t][d] = V::no_run();
    }
  }
  template <int KIND, int RUN> void end() {
    if constexpr (RUN == 0) UNROLL for (int t = 0; t < NT; t++) UNROLL for (int d = 0; d < D; d++) {
        if constexpr (two_sums(RUN)) a[t][d] = V::template shr_ints<stored_bits<KIND>()>(a[t][d]);
        a[t][d] = V::end_run(a[t][d], run[t][d]);
      }
  }
};

// Steps AT and on of a part of a block: runs of RUN steps, or that of the segment, the former added to sums when they end,
// times the scale of a group if it has one.
template <int KIND, int D, int NT, int SUB, int RUN, int AT, typename V = Isa>
ALWAYS_INLINE void short_part(Sums<D, NT> &sums, const ShortPlanes<KIND> &planes, const int8_t *q, int seg,
                              const Isa::Bytes &scale, int group) {
  constexpr bool OTHER = two_sums(RUN) && AT % 2;
  constexpr bool BEGINS = RUN != 0 && AT % (RUN ? RUN : 1) == 0, ENDS = RUN != 0 && (AT + 1) % (RUN ? RUN : 1) == 0;
  const Isa::Bytes c = decode_step<stored_bits<KIND>(), AT, OTHER ? stored_bits<KIND>() : 0>(planes);
  UNROLL for (int t = 0; t < NT; t++) UNROLL for (int d = 0; d < D; d++) {
    auto &a = sums.a[t][d];
    auto &run = sums.run[t][d];
    const auto x = Isa::quad_once(q + (d * NT + t) * seg + 4 * AT);
    if constexpr (BEGINS) run = V::first_of_run(c, x);
    else if constexpr (OTHER) V::add_to_run(a, c, x);
    else V::add_to_run(run, c, x);
    if constexpr (ENDS && SUB != 0) a = V::end_run(a, run, scale, group + 4 * AT / (SUB ? SUB : 1));
    else if constexpr (ENDS) a = V::end_run(a, run);
  }
  if constexpr ((AT + 1) % PART != 0) short_part<KIND, D, NT, SUB, RUN, AT + 1>(sums, planes, q, seg, scale, group);
}

// Sums of D digits at q, in blocks; `ahead` is prefetched.
template <int KIND, int D, int NT, int SUB, int BLOCKS>
ALWAYS_INLINE void short_blocks(Sums<D, NT> &sums, const uint8_t *codes, int64_t ahead, const int8_t *q, int seg,
                                const Isa::Bytes &scale, int group) {
  constexpr int BITS = stored_bits<KIND>(), RUN = run_steps<KIND, SUB>();
  UNROLL for (int i = 0; i < BITS; i++) __builtin_prefetch(codes + ahead + 64 * i, 0, Isa::LOCALITY);
  const ShortPlanes<KIND> planes(codes);
  short_part<KIND, D, NT, SUB, RUN, 0>(sums, planes, q, seg, scale, group);
  short_part<KIND, D, NT, SUB, RUN, PART>(sums, planes, q, seg, scale, group);
  if constexpr (BLOCKS > 1)
    short_blocks<KIND, D, NT, SUB, BLOCKS - 1>(sums, codes + BITS * 64, ahead, q + BLOCK, seg, scale,
                                               group + BLOCK / (SUB ? SUB : 1));
}

// Sums of the lowest of three digits, whose parts are decoded once more, as few have any. low: a bit for each part, the
// lowest for the first, that has one.
template <int KIND, int NT, int SUB>
ALWAYS_INLINE void sum_lowest(Sums<1, NT> &sums, const uint8_t *codes, const int8_t *q, int seg, const Isa::Bytes &scale,
                              int group, int low) {
  constexpr int BITS = stored_bits<KIND>(), ALL = run_steps<KIND, SUB>(), RUN = ALL > PART ? PART : ALL;
  sums.begin();
  for (; low; low >>= 2, codes += BITS * 64, q += BLOCK, group += BLOCK / (SUB ? SUB : 1)) {
    const ShortPlanes<KIND> planes(codes);
    if (low & 1) short_part<KIND, 1, NT, SUB, RUN, 0>(sums, planes, q, seg, scale, group);
    if (low & 2) short_part<KIND, 1, NT, SUB, RUN, PART>(sums, planes, q, seg, scale, group);
  }
  sums.template end<KIND, RUN>();
}

// Up to UNIT_BANDS bands, each a stream of its own, a segment of each in turn: what is loaded of the activations is in the
// first-level cache for all but the first.
// SEG: columns of a segment, or 0: any number.
template <int KIND, int D, int NT, int SEG, int SUB, typename V = Isa>
static void short_bands(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  constexpr int UPPER = D > 1 ? 2 : 1;             // digits but the lowest of three
  constexpr int BYTES = stored_bits<KIND>() * 64;  // of a block
  constexpr int SOME = SEG ? SEG / BLOCK : 1;      // blocks
  const int64_t far = PREFETCH / bands;
  const int seg = SEG ? SEG : x.seg, per_group = m.group / seg, blocks = seg / BLOCK;
  [[maybe_unused]] const int lines = (SEG == 64 ? 64 : m.group) / (SUB ? SUB : 1);
  const int64_t stride = m.groups * m.tile_bytes, hop = m.apart * stride;
  const int8_t *q = x.q;
  const float *scale = x.scale, *sum = x.sum;
  const int16_t *sums = x.sums;
  const LowSteps *lows = x.low;
  const uint8_t *tile = m.packed + band * stride;
  const bool plain = has_plain_scales(m);
  Isa::Floats acc[UNIT_BANDS][NT];
  for (int n = 0; n < bands; n++)
    for (int t = 0; t < NT; t++) acc[n][t] = m.add ? Isa::load(out + t * ld + n * ROWS) : Isa::set1(0);
  for (int64_t g = 0; g < m.groups; g++, tile += m.tile_bytes) {
    // At the end of its band a stream goes on with the next band that nobody reads yet: where bands lie apart, the next one.
    const int64_t ahead = g * m.tile_bytes + far < stride ? far : far + (hop == stride ? bands - 1 : 0) * stride;
    for (int n = 0; n < bands; n++) __builtin_prefetch(tile + n * hop + m.code_bytes + ahead, 0, Isa::LOCALITY);
    for (int s = 0; s < per_group; s++, q += NT * D * seg, scale += NT, sum += NT, sums += NT * D * SUMS) {
      int low = 0;
      for (int t = 0; D > 1 && t < NT; t++) low |= lows++->parts;
      [[maybe_unused]] const int group = s * seg / (SUB ? SUB : 1);
      const auto multiply = [&](int n) __attribute__((always_inline)) {
        const int8_t *near = q;
        const int16_t *near_sums = sums;
        // Or GCC 12 copies what is loaded from there to the stack, for all bands.
        __asm__("" : "+r"(near), "+r"(near_sums));
        const uint8_t *at = tile + n * hop, *codes = at + s * blocks * BYTES, *meta = at + m.code_bytes;
        Sums<UPPER, NT> upper;
        Sums<1, NT> lowest;
        Isa::Bytes scales{}, offsets{};
        upper.begin();
        if constexpr (SUB != 0) scales = Isa::plus(Isa::mask(Isa::load_lanes(meta, lines), 15), Isa::bytes(1));
        for (int b = 0; b < blocks; b += SOME)
          short_blocks<KIND, UPPER, NT, SUB, SOME>(upper, codes + b * BYTES, ahead,
                                                   near + (D - UPPER) * NT * seg + b * BLOCK, seg, scales,
                                                   group + b * BLOCK / (SUB ? SUB : 1));
        upper.template end<KIND, run_steps<KIND, SUB>()>();
        if constexpr (SUB != 0) {
          __asm__("" : "+r"(meta));  // or offsets are held, on the stack, while codes are multiplied
          offsets = unit_offsets<KIND>(Isa::load_lanes(meta, lines));
          UNROLL for (int t = 0; t < NT; t++)
              add_offsets<UPPER, V>(upper.a[t], offsets, near_sums + (t * D + D - UPPER) * SUMS, seg, SUB, s * seg);
        }
        if (D > 1 && low) {
          sum_lowest<KIND, NT, SUB>(lowest, codes, near, seg, scales, group, low);
          if constexpr (SUB != 0)
            UNROLL for (int t = 0; t < NT; t++)
                add_offsets<1, V>(lowest.a[t], offsets, near_sums + t * D * SUMS, seg, SUB, s * seg);
        }
        const Affine w = SUB     ? read_super(m, offset_unit(KIND), band + n * m.apart, g)
                         : plain ? read_plain(meta)
                                 : read_affine(m, meta, band + n * m.apart, g);
        UNROLL for (int t = 0; t < NT; t++) {
          // A scale of three digits is a power of two: these are the bits of `combine`, times it.
          const float unit = D == 1 ? scale[t] : 256 * scale[t];
          Isa::Floats dot =
              Isa::mul(UPPER == 1 ? Isa::to_float(upper.a[t][0]) : combine_high(upper.a[t]), Isa::set1(unit));
          if (D > 1 && low) dot = Isa::fma(Isa::to_float(lowest.a[t][0]), Isa::set1(scale[t]), dot);
          acc[n][t] = Isa::fma(w.offset, Isa::set1(sum[t]), Isa::fma(w.scale, dot, acc[n][t]));
        }
      };
      // Loads of its own for each stream of one token: processors foresee what a load reads by the address of its instruction,
      // and one that reads four streams in turn has half of what the memory gives (Zen 5).
      if (NT == 1 && bands == UNIT_BANDS) UNROLL for (int n = 0; n < UNIT_BANDS; n++) multiply(n);
      else
        for (int n = 0; n < bands; n++) multiply(n);
    }
  }
  for (int n = 0; n < bands; n++)
    for (int t = 0; t < NT; t++) Isa::store(out + t * ld + n * ROWS, acc[n][t]);
}

#ifdef __SANITIZE_ADDRESS__
constexpr bool SANITIZED = true;
#else
constexpr bool SANITIZED = false;
#endif

template <int KIND, int D, int SUB>
static void short_tokens(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  auto all = [&](auto count, int) {
    constexpr int NT = decltype(count)::VALUE;
    for (int b = 0; b < bands; b += UNIT_BANDS) {
      const int some = bands - b < UNIT_BANDS ? bands - b : UNIT_BANDS;
      float *to = out + b * ROWS;
      // A loop over blocks is a quarter of the code. Wide registers lose nothing by it; sanitizers would be built for minutes.
      if constexpr (Isa::LANES == 16 || SANITIZED)
        short_bands<KIND, D, NT, 0, SUB>(m, band + b * m.apart, some, x, to, ld);
      else if (x.seg == 64) short_bands<KIND, D, NT, 64, SUB>(m, band + b * m.apart, some, x, to, ld);
      else short_bands<KIND, D, NT, BLOCK, SUB>(m, band + b * m.apart, some, x, to, ld);
    }
  };
  call_with<most_short(D)>(x.count, 0, all);
}

template <int KIND, int D>
static void short_groups(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  if constexpr (!has_sub(KIND)) short_tokens<KIND, D, 0>(m, band, bands, x, out, ld);
  else if (m.sub == HALF) short_tokens<KIND, D, HALF>(m, band, bands, x, out, ld);
  else short_tokens<KIND, D, BLOCK>(m, band, bands, x, out, ld);
}

template <int KIND, typename V = Isa>
static bool short_digits(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  if constexpr (V::SHORT_EXACT > 0) {
    if (x.digits == TRILOBITE_INT8) short_groups<KIND, 1>(m, band, bands, x, out, ld);
    else short_groups<KIND, 3>(m, band, bands, x, out, ld);
  }
  return SHORT_FEW;
}

// Whether it was done here: digits of few tokens in segments of 32 or 64 columns, codes of up to 4 bits.
static bool rows_short(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  if (x.count > most_short(x.digits) || x.seg < BLOCK) return false;
  switch (m.kind) {
    case 2: return short_digits<2>(m, band, bands, x, out, ld);
    case 3: return short_digits<3>(m, band, bands, x, out, ld);
    case 4: return short_digits<4>(m, band, bands, x, out, ld);
    case SUPER + 2: return short_digits<SUPER + 2>(m, band, bands, x, out, ld);
    case SUPER + 3: return short_digits<SUPER + 3>(m, band, bands, x, out, ld);
    case SUPER + 4: return short_digits<SUPER + 4>(m, band, bands, x, out, ld);
    default: return false;
  }
}
