// Codes and metadata of a tile -> registers (formats/bitpack.py,
// formats/affine.py).

// Width of the codes that `decode` leaves; planes of 64 bytes that a block
// takes in memory.
constexpr int code_bits(int kind) { return kind >= SUPER ? 8 : kind >= E8P ? 4 : kind; }
template <int KIND> static inline int planes(const Matrix &m) {
  return KIND >= SUPER ? KIND - SUPER : KIND >= E8P ? m.bits : KIND;
}

// A block's planes of 64 bytes. HELD: in registers, of which there have to be enough, so that each is read once; or read
// where they are wanted.
template <int BITS, bool HELD> struct Planes {
  const uint8_t *codes;
  Isa::Bytes held[HELD ? BITS : 1];

  explicit Planes(const uint8_t *p) : codes(p) {
    if constexpr (HELD) hold<0>();
  }
  // V: not every Isa has registers enough.
  template <int I, typename V = Isa> void hold() {
    held[I] = Isa::load(codes + 64 * I);
    V::hide(held[I]);  // or it is read again by each instruction that has it as an operand
    if constexpr (I + 1 < BITS) hold<I + 1>();
  }
  Isa::Bytes operator[](int i) const { return HELD ? held[i] : Isa::load(codes + 64 * i); }
};

// Step I of a block of 16 rows x 32 columns: 16 rows x 4 codes, from bit UP of each byte on.
template <int BITS, int I, int UP = 0, bool HELD> ALWAYS_INLINE Isa::Bytes decode_step(const Planes<BITS, HELD> &p) {
  if constexpr (BITS == 8) {
    return p[I];
  } else if constexpr (BITS == 4) {
    return Isa::field<4 * (I % 2), 4, UP>(p[I / 2]);
  } else if constexpr (BITS == 2) {
    return Isa::field<2 * (I % 4), 2, UP>(p[I / 4]);
  } else if constexpr (I < 6) {
    return Isa::field<3 * (I % 2), 3, UP>(p[I / 2]);
  } else {
    // A byte has room for two codes of 3 bits; its last two bits, of three
    // planes, make up the codes of steps 6 and 7.
    return Isa::either(Isa::field<6, 2, UP>(p[I - 6]), Isa::field<I, 1, UP + 2>(p[2]));
  }
}

// Steps [FROM, FROM + COUNT) of a block of `planes` planes.
template <int BITS, int FROM, int COUNT>
static inline void decode_steps(const uint8_t *p, int planes, Isa::Bytes c[COUNT]) {
  if constexpr (BITS >= SUPER) {
    decode_steps<BITS - SUPER, FROM, COUNT>(p, planes, c);
  } else if constexpr (BITS >= E8P) {
    Isa::Bytes v[4];
    lattice_words<BITS, FROM / 2, COUNT / 2>(p, 16 * planes, v);
    for (int i = 0; i < COUNT; i += 2) {
      c[i] = Isa::field<0, 4>(v[(FROM + i) / 2]);
      c[i + 1] = Isa::field<4, 4>(v[(FROM + i) / 2]);
    }
  } else {
    c[0] = decode_step<BITS, FROM>(Planes<BITS, false>(p));
    if constexpr (COUNT > 1) decode_steps<BITS, FROM + 1, COUNT - 1>(p, planes, c + 1);
  }
}

// All eight steps.
template <int BITS>
static inline void decode(const uint8_t *p, int planes, Isa::Bytes c[8]) {
  decode_steps<BITS, 0, 8>(p, planes, c);
}

// Under super-scales a code counts as scale * code + unit * offset, a byte from
// which tiers take Isa::COUNT_BIAS (formats/superscale.py).
constexpr bool has_sub(int kind) { return kind > SUPER && kind < SUPER + 8; }
// Codes of up to 4 bits, and whether short.h multiplies few tokens of these.
constexpr bool has_short_codes(int kind) { return kind <= 4 || has_sub(kind); }
constexpr bool SHORT_FEW = Isa::SHORT_EXACT > 0;
constexpr int offset_unit(int kind) { return kind == SUPER + 2 ? 3 : kind == SUPER + 3 ? 6 : 8; }

// Of a tile, in byte j of lane r: group j, row r.
struct Sub { Isa::Bytes scale, offset; };

template <int KIND> static inline Isa::Bytes unit_offsets(Isa::Bytes lines) {
  return Isa::times(Isa::field<4, 4>(lines), Isa::factor(offset_unit(KIND)));
}

template <int KIND>
static inline Sub read_sub(const Matrix &m, const uint8_t *meta) {
  const Isa::Bytes v = Isa::load_lanes(meta, m.group / m.sub);
  Sub sub{Isa::plus(Isa::mask(v, 15), Isa::bytes(1)), unit_offsets<KIND>(v)};
  if (Isa::COUNT_BIAS) sub.offset = Isa::plus(sub.offset, Isa::bytes((uint8_t)-Isa::COUNT_BIAS));
  return sub;
}

// Codes of STEPS steps from column `at` of the tile -> what they count.
template <int STEPS>
static inline void scale_codes(const Sub &sub, int group, int at, Isa::Bytes c[STEPS]) {
  const int shift = group == HALF ? 4 : 5;
  UNROLL for (int i = 0; i < STEPS; i += 4) {
    const int j = (at + 4 * i) >> shift;
    const Isa::Bytes scale = Isa::factor(sub.scale, j), offset = Isa::spread(sub.offset, j);
    UNROLL for (int s = i; s < i + 4; s++) c[s] = Isa::plus(Isa::times(c[s], scale), offset);
  }
}

struct Affine { Isa::Floats scale, offset; };  // w = scale * code + offset, 16 rows

static inline float read_float(const uint8_t *p) {
  float f;
  memcpy(&f, p, 4);
  return f;
}

static inline Isa::Floats second_level(const uint8_t *codes, const uint8_t *pair) {
  return Isa::fma(Isa::from_u8(codes), Isa::set1(read_float(pair)), Isa::set1(read_float(pair + 4)));
}

// fp16 scales and offsets: what most files have.
static inline bool has_plain_scales(const Matrix &m) {
  return !m.sub && !m.lattice() && !m.wide && !m.double_quant && !m.symmetric;
}
static inline Affine read_plain(const uint8_t *meta) { return {Isa::from_half(meta), Isa::from_half(meta + 2 * ROWS)}; }

// Of what codes count under super-scales, less COUNT_BIAS.
static inline Affine read_super(const Matrix &m, int unit, int64_t band, int64_t tile) {
  const Isa::Floats super = Isa::from_half(m.super + (band * m.supers + tile * m.group / SPAN) * 2 * ROWS);
  const Isa::Floats scale = Isa::mul(super, Isa::set1(1.0f / 128));
  return {scale, Isa::mul(scale, Isa::set1((float)(Isa::COUNT_BIAS - 15 * unit)))};
}

static inline Affine read_affine(const Matrix &m, const uint8_t *meta, int64_t band, int64_t group) {
  Affine a;
  if (m.sub) return read_super(m, offset_unit(m.kind), band, group);
  if (m.lattice()) return {Isa::set1(m.scale), Isa::set1(m.offset)};
  if (m.wide) return {Isa::load((const float *)meta), Isa::load((const float *)meta + ROWS)};
  if (!m.double_quant) {
    if (!m.symmetric) return read_plain(meta);
    a.scale = Isa::from_half(meta);
  } else {
    const int per = m.bits >= 4 ? 16 : 8;  // groups that share a pair of the
                                           // second level (formats/affine.py)
    const uint8_t *pair = m.super + (band * m.supers + group / per) * (m.symmetric ? 8 : 16);
    a.scale = second_level(meta, pair);
    if (!m.symmetric) a.offset = second_level(meta + ROWS, pair + 8);
  }
  // Codes are stored without a sign; their middle stands for zero.
  if (m.symmetric) a.offset = Isa::mul(a.scale, Isa::set1(-(float)(1 << (m.bits - 1))));
  return a;
}
