// Codes and metadata of a tile -> registers (formats/bitpack.py, formats/affine.py).

// One block of 16 rows x 32 columns -> eight steps of 16 rows x 4 codes.
template <int BITS> static inline void decode(const uint8_t *p, Isa::Bytes c[8]) {
  if (BITS == 8) {
    for (int i = 0; i < 8; i++) c[i] = Isa::load(p + 64 * i);
  } else if (BITS == 4) {
    for (int i = 0; i < 4; i++) {
      const Isa::Bytes v = Isa::load(p + 64 * i);
      c[2 * i] = Isa::field<0, 4>(v);
      c[2 * i + 1] = Isa::field<4, 4>(v);
    }
  } else if (BITS == 2) {
    for (int i = 0; i < 2; i++) {
      const Isa::Bytes v = Isa::load(p + 64 * i);
      c[4 * i] = Isa::field<0, 2>(v);
      c[4 * i + 1] = Isa::field<2, 2>(v);
      c[4 * i + 2] = Isa::field<4, 2>(v);
      c[4 * i + 3] = Isa::field<6, 2>(v);
    }
  } else {
    const Isa::Bytes v0 = Isa::load(p), v1 = Isa::load(p + 64), v2 = Isa::load(p + 128);
    c[0] = Isa::field<0, 3>(v0);
    c[1] = Isa::field<3, 3>(v0);
    c[2] = Isa::field<0, 3>(v1);
    c[3] = Isa::field<3, 3>(v1);
    c[4] = Isa::field<0, 3>(v2);
    c[5] = Isa::field<3, 3>(v2);
    c[6] = Isa::either(Isa::field<6, 2>(v0), Isa::field<6, 1, 2>(v2));
    c[7] = Isa::either(Isa::field<6, 2>(v1), Isa::field<7, 1, 2>(v2));
  }
}

struct Affine { Isa::Floats scale, offset; };  // w = scale * code + offset, 16 rows

static inline float read_float(const uint8_t *p) { float f; memcpy(&f, p, 4); return f; }

static inline Isa::Floats second_level(const uint8_t *codes, const uint8_t *pair) {
  return Isa::fma(Isa::from_u8(codes), Isa::set1(read_float(pair)), Isa::set1(read_float(pair + 4)));
}

static inline Affine read_affine(const Matrix &m, const uint8_t *meta, int64_t band, int64_t group) {
  Affine a;
  if (m.wide) return {Isa::load((const float *)meta), Isa::load((const float *)meta + ROWS)};
  if (!m.double_quant) {
    a.scale = Isa::from_half(meta);
    if (!m.symmetric) a.offset = Isa::from_half(meta + 2 * ROWS);
  } else {
    const int per = m.bits >= 4 ? 16 : 8;
    const uint8_t *pair = m.super + (band * m.supers + group / per) * (m.symmetric ? 8 : 16);
    a.scale = second_level(meta, pair);
    if (!m.symmetric) a.offset = second_level(meta + ROWS, pair + 8);
  }
  if (m.symmetric) a.offset = Isa::mul(a.scale, Isa::set1(-(float)(1 << (m.bits - 1))));
  return a;
}
