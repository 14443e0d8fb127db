// Panels: codes of some columns of a band, decoded once for many tokens (many.h, amx.h), in the form that a product wants.
// A step of 16 rows x 4 columns is
//   BYTES    one line of 64 bytes, as `decode` leaves it
//   WORDS    two lines of 16-bit numbers, columns 0 and 2, then 1 and 3
//   PAIRS    two lines of bfloat16, columns 0 and 2, then 1 and 3: whole numbers below 256 are exact there
//   SINGLES  four lines of fp32

// Bytes ahead, into the second-level cache: the first-level one is full of the panel and its activations. NEAR: from there
// on into the first-level one, or 0.
constexpr int PANEL_PREFETCH = 6144;

constexpr int lines(Form form) { return form == Form::SINGLES ? 4 : form == Form::BYTES ? 1 : 2; }

#ifdef __AVX512BF16__
// bfloat16 of 0 .. 31.
alignas(64) static const uint16_t WHOLE_NUMBERS[32] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                       0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
                                                       0x4180, 0x4188, 0x4190, 0x4198, 0x41a0, 0x41a8, 0x41b0, 0x41b8,
                                                       0x41c0, 0x41c8, 0x41d0, 0x41d8, 0x41e0, 0x41e8, 0x41f0, 0x41f8};

// The bytes of a dword that one permutation, or one shift, spreads to 16 bits are those of columns 0 and 2, then 1 and 3.
// Activations have their columns in this order, too.
template <int BITS> static inline void store_pairs(uint8_t *out, __m512i codes) {
  if (code_bits(BITS) < 8) {
    // The index is the low five bits of each word: column 0 or 2, then 1 or 3. Codes have at most four.
    const __m512i table = _mm512_load_si512(WHOLE_NUMBERS);
    Isa::store(out, _mm512_permutexvar_epi16(codes, table));
    Isa::store(out + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table));
    return;
  }
  __m512i f[4];
  f[0] = _mm512_castps_si512(Isa::from_byte<0>(codes)), f[1] = _mm512_castps_si512(Isa::from_byte<1>(codes));
  f[2] = _mm512_castps_si512(Isa::from_byte<2>(codes)), f[3] = _mm512_castps_si512(Isa::from_byte<3>(codes));
  Isa::store(out, _mm512_or_si512(_mm512_srli_epi32(f[0], 16), f[2]));
  Isa::store(out + 64, _mm512_or_si512(_mm512_srli_epi32(f[1], 16), f[3]));
}
#endif

// V: not every Isa has SINGLES, or WORDS.
template <int BITS, Form FORM, typename V = Isa> static inline void store_step(uint8_t *out, Isa::Bytes codes) {
  [[maybe_unused]] constexpr bool SIGNS = BITS >= SUPER && Isa::COUNT_BIAS;
  if constexpr (FORM == Form::BYTES) {
    Isa::store(out, codes);
  } else if constexpr (FORM == Form::WORDS) {
    Isa::store(out, V::template words<0, SIGNS>(codes));
    Isa::store(out + 64, V::template words<1, SIGNS>(codes));
  } else if constexpr (FORM == Form::SINGLES) {
    auto *f = (float *)out;
    Isa::store(f, V::template from_byte<0, SIGNS>(codes));
    Isa::store(f + ROWS, V::template from_byte<1, SIGNS>(codes));
    Isa::store(f + 2 * ROWS, V::template from_byte<2, SIGNS>(codes));
    Isa::store(f + 3 * ROWS, V::template from_byte<3, SIGNS>(codes));
  } else {
#ifdef __AVX512BF16__
    store_pairs<BITS>(out, codes);
#endif
  }
}

// Columns [at, at + width) of a tile; whole blocks. PLAIN: codes as they are, under super-scales, too.
template <int BITS, Form FORM, int NEAR, bool PLAIN>
__attribute__((noinline)) static void decode_stretch(const Matrix &m, const uint8_t *tile, int at, int width,
                                                     uint8_t *out) {
  const uint8_t *codes = tile + at / BLOCK * planes<BITS>(m) * 64;
  [[maybe_unused]] Sub sub;
  constexpr bool SCALED = has_sub(BITS) && !PLAIN;
  if constexpr (SCALED) sub = read_sub<BITS>(m, tile + m.code_bytes);
  for (int b = 0; b < width; b += BLOCK, codes += planes<BITS>(m) * 64) {
    for (int j = 0; j < planes<BITS>(m); j++) {
      __builtin_prefetch(codes + PANEL_PREFETCH + 64 * j, 0, 2);
      if (NEAR) __builtin_prefetch(codes + NEAR + 64 * j, 0, 3);
    }
    Isa::Bytes c[8];
    decode<BITS>(codes, planes<BITS>(m), c);
    if constexpr (SCALED) scale_codes<8>(sub, m.sub, at + b, c);
    UNROLL for (int j = 0; j < 8; j++) { store_step<BITS, FORM>(out + (b * ROWS + 64 * j) * lines(FORM), c[j]); }
  }
}

template <Form FORM, int NEAR, bool PLAIN = false> static void decode_columns(const Matrix &m, const uint8_t *tile,
                                                                              int at, int width, uint8_t *out) {
  switch (m.kind) {
    case E8P: return decode_stretch<E8P, FORM, NEAR, PLAIN>(m, tile, at, width, out);
    case E8: return decode_stretch<E8, FORM, NEAR, PLAIN>(m, tile, at, width, out);
    case 2: return decode_stretch<2, FORM, NEAR, PLAIN>(m, tile, at, width, out);
    case 3: return decode_stretch<3, FORM, NEAR, PLAIN>(m, tile, at, width, out);
    case 4: return decode_stretch<4, FORM, NEAR, PLAIN>(m, tile, at, width, out);
    case SUPER + 2: return decode_stretch<SUPER + 2, FORM, NEAR, PLAIN>(m, tile, at, width, out);
    case SUPER + 3: return decode_stretch<SUPER + 3, FORM, NEAR, PLAIN>(m, tile, at, width, out);
    case SUPER + 4: return decode_stretch<SUPER + 4, FORM, NEAR, PLAIN>(m, tile, at, width, out);
    default: return decode_stretch<8, FORM, NEAR, PLAIN>(m, tile, at, width, out);
  }
}
