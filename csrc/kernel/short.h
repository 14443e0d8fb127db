// A token, or as few as registers have room for sums of. Sums of a segment, or of a group under super-scales (group_sums.h),
// are made in a run: where a product of bytes is two sums of two in 16 bits, of 16 bits, and only then widened to 32; with
// VNNI of 32. They are the integers, and make the bits of results, that rows.h makes. More tokens: short_many.h, words.h.

// Tokens that share a decoded step.
constexpr int most_short(int digits) { return digits == 1 ? Isa::SHORT_INT8 : Isa::SHORT_EXACT; }

constexpr int PART = HALF / 4;  // steps that have a lowest of three digits together, or have none (`LowSteps::parts`)

template <int KIND> constexpr int stored_bits() { return KIND >= SUPER ? KIND - SUPER : KIND; }

// Steps of a run, where it ends in a block of 32 columns; or 0: it is that of a segment. In 16 bits at most 2 * 7 * 128 or
// 2 * 15 * 128 of each fit; a group's sum has to, with VNNI 4 * 15 * 128.
template <int KIND, int SUB> constexpr int run_steps() {
  constexpr bool wide = stored_bits<KIND>() == 4;
  if (SUB) return wide && !Isa::SHORT_SUMS ? PART : SUB / 4;
  return wide && Isa::SHORT_SUMS ? BLOCK / 4 : 0;
}

// Steps AT and on of a part of a block, digits FIRST and on: sums of a run in `run`, then added to `a`, times the scale of a
// group if it has one.
template <int KIND, int D, int FIRST, int NT, int SUB, int AT, typename V = Isa>
ALWAYS_INLINE void short_part(Isa::Ints a[NT][D], typename V::Run run[NT][D], const uint8_t *codes, const int8_t *q,
                              int seg, const Isa::Bytes &scale, int group) {
  constexpr int RUN = run_steps<KIND, SUB>();
  const Isa::Bytes c = decode_step<stored_bits<KIND>(), AT>(codes);
  UNROLL for (int t = 0; t < NT; t++) {
    if constexpr (FIRST != 0 && RUN > PART && AT == 0) run[t][0] = V::no_run();
    UNROLL for (int d = FIRST; d < D; d++) {
      const auto x = Isa::quad_once(q + (d * NT + t) * seg + 4 * AT);
      if constexpr (RUN != 0 && AT % (RUN ? RUN : 1) == 0) run[t][d] = V::first_of_run(c, x);
      else V::add_to_run(run[t][d], c, x);
    }
  }
  if constexpr (RUN != 0 && (AT + 1) % (RUN ? RUN : 1) == 0) {
    UNROLL for (int t = 0; t < NT; t++) UNROLL for (int d = RUN > PART ? 0 : FIRST; d < D; d++) {
      if constexpr (SUB != 0) a[t][d] = V::end_run(a[t][d], run[t][d], scale, group + 4 * AT / (SUB ? SUB : 1));
      else a[t][d] = V::end_run(a[t][d], run[t][d]);
    }
  }
  if constexpr ((AT + 1) % PART != 0) short_part<KIND, D, FIRST, NT, SUB, AT + 1>(a, run, codes, q, seg, scale, group);
}

// Blocks, the first one from step AT on. low: a bit for each part, the lowest for the first, that has a lowest of three
// digits.
template <int KIND, int D, int NT, int SUB, int AT, int BLOCKS, typename V = Isa>
ALWAYS_INLINE void short_blocks(Isa::Ints a[NT][D], typename V::Run run[NT][D], const uint8_t *codes, const int8_t *q,
                                int seg, const Isa::Bytes &scale, int group, int low) {
  if (D == 1 || low & 1) short_part<KIND, D, 0, NT, SUB, AT>(a, run, codes, q, seg, scale, group);
  else short_part<KIND, D, D == 1 ? 0 : 1, NT, SUB, AT>(a, run, codes, q, seg, scale, group);
  if constexpr (AT == 0) short_blocks<KIND, D, NT, SUB, PART, BLOCKS>(a, run, codes, q, seg, scale, group, low >> 1);
  else if constexpr (BLOCKS > 1)
    short_blocks<KIND, D, NT, SUB, 0, BLOCKS - 1>(a, run, codes + stored_bits<KIND>() * 64, q + BLOCK, seg, scale,
                                                  group + BLOCK / (SUB ? SUB : 1), low >> 1);
}

// Up to UNIT_BANDS bands, each a stream of its own, a segment of each in turn: what is loaded of the activations is in the
// first-level cache for all but the first.
// SEG: columns of a segment, or 0: any number.
template <int KIND, int D, int NT, int SEG, int SUB, typename V = Isa>
static void short_bands(const Matrix &m, int64_t band, int bands, const Digits &x, float *out, int64_t ld) {
  constexpr int BYTES = stored_bits<KIND>() * 64;  // of a block
  const int64_t far = PREFETCH / bands;
  const int seg = SEG ? SEG : x.seg, per_group = m.group / seg, blocks = seg / BLOCK,
            lines = (SEG == 64 ? 64 : m.group) / (SUB ? SUB : 1);
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
      for (int n = 0; n < bands; n++) {
        const int8_t *near = q;
        const int16_t *near_sums = sums;
        // Or GCC 12 copies what is loaded from there to the stack, for all bands.
        __asm__("" : "+r"(near), "+r"(near_sums));
        const uint8_t *at = tile + n * hop, *codes = at + s * blocks * BYTES, *meta = at + m.code_bytes;
        for (int i = 0; i < blocks * BYTES; i += 64) __builtin_prefetch(codes + ahead + i, 0, Isa::LOCALITY);
        Isa::Ints a[NT][D];
        Isa::Bytes scales{};
        typename V::Run run[NT][D];
        UNROLL for (int t = 0; t < NT; t++) UNROLL for (int d = 0; d < D; d++) {
          a[t][d] = Isa::zero();
          run[t][d] = V::no_run();
        }
        if constexpr (SUB != 0) scales = Isa::plus(Isa::mask(Isa::load_lanes(meta, lines), 15), Isa::bytes(1));
        constexpr int SOME = SEG ? SEG / BLOCK : 1;
        for (int b = 0; b < blocks; b += SOME)
          short_blocks<KIND, D, NT, SUB, 0, SOME>(a, run, codes + b * BYTES, near + b * BLOCK, seg, scales,
                                                  group + b * BLOCK / (SUB ? SUB : 1), low >> 2 * b);
        if constexpr (run_steps<KIND, SUB>() == 0)
          UNROLL for (int t = 0; t < NT; t++) UNROLL for (int d = 0; d < D; d++) a[t][d] =
              V::end_run(a[t][d], run[t][d]);
        if constexpr (SUB != 0) {
          __asm__("" : "+r"(meta));  // or offsets are held, on the stack, while codes are multiplied
          const Isa::Bytes offsets = unit_offsets<KIND>(Isa::load_lanes(meta, lines));
          UNROLL for (int t = 0; t < NT; t++) {
            const int16_t *of = near_sums + t * D * SUMS;
            if (D > 1 && low == 0) add_offsets<D, V, D == 1 ? 0 : 1>(a[t], offsets, of, seg, SUB, s * seg);
            else add_offsets<D>(a[t], offsets, of, seg, SUB, s * seg);
          }
        }
        const Affine w = SUB     ? read_super(m, offset_unit(KIND), band + n * m.apart, g)
                         : plain ? read_plain(meta)
                                 : read_affine(m, meta, band + n * m.apart, g);
        UNROLL for (int t = 0; t < NT; t++) {
          const Isa::Floats dot = Isa::mul(combine<D>(a[t]), Isa::set1(scale[t]));
          acc[n][t] = Isa::fma(w.offset, Isa::set1(sum[t]), Isa::fma(w.scale, dot, acc[n][t]));
        }
      }
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
