// The lattice codewords of a block -> registers [FROM, FROM + COUNT) of its four, of 16 rows x 8 codes of 4 bits each
// (LatticeTables), and others where that costs nothing; those of 8 columns lie `stride` bytes apart.
#if defined(__AVX512VBMI__) && defined(__GFNI__)
// For a permutation of bytes: in lane r, byte s is byte `at` of the codeword of `width` bytes of row r, columns 8 s and on,
// but with the rows and columns of every 16 bytes exchanged, which `lattice_words` undoes.
struct alignas(64) LatticeOrder {
  uint8_t index[64];

  constexpr LatticeOrder(int width, int at) : index{} {
    for (int i = 0; i < 64; i++) index[i] = (uint8_t)(16 * width * (i / 4 % 4) + width * (i / 16 * 4 + i % 4) + at);
  }
};
static constexpr LatticeOrder LOW_BYTES(2, 0), HIGH_BYTES(2, 1), ONLY_BYTES(1, 0);

static inline __m512i look_up(const uint8_t table[256], __m512i index) {
  const __m512i low = _mm512_permutex2var_epi8(Isa::load(table), index, Isa::load(table + 64));
  const __m512i high = _mm512_permutex2var_epi8(Isa::load(table + 128), index, Isa::load(table + 192));
  return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
}

template <int KIND, int FROM, int COUNT>
static inline void lattice_words(const uint8_t *p, int stride, Isa::Bytes v[4]) {
  __m512i f[4];  // byte i of all codewords
  if (KIND == E8) {
    __m512i c = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
    c = _mm512_inserti32x4(c, _mm_loadu_si128((const __m128i *)(p + stride)), 1);
    c = _mm512_inserti32x4(c, _mm_loadu_si128((const __m128i *)(p + 2 * stride)), 2);
    c = _mm512_inserti32x4(c, _mm_loadu_si128((const __m128i *)(p + 3 * stride)), 3);
    c = _mm512_permutexvar_epi8(Isa::load(ONLY_BYTES.index), c);
    UNROLL for (int i = 0; i < 4; i++) f[i] = look_up(LATTICE.e8_bytes[i], c);
  } else {
    const auto pair = [](const uint8_t *a, const uint8_t *b) {
      const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)a));
      return _mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i *)b), 1);
    };
    const __m512i a = pair(p, p + stride), b = pair(p + 2 * stride, p + 3 * stride);
    const __m512i low = _mm512_permutex2var_epi8(a, Isa::load(LOW_BYTES.index), b);
    const __m512i high = _mm512_permutex2var_epi8(a, Isa::load(HIGH_BYTES.index), b);
    // What the sign bits flip is linear over GF(2): one instruction for a byte of 64 codewords.
    UNROLL for (int i = 0; i < 4; i++) {
      const __m512i flips = _mm512_gf2p8affine_epi64_epi8(low, _mm512_set1_epi64((long long)LATTICE.flips[i]), 0);
      f[i] = _mm512_xor_si512(look_up(LATTICE.pattern_bytes[i], high), flips);
    }
  }
  const __m512i a = _mm512_unpacklo_epi8(f[0], f[1]), b = _mm512_unpacklo_epi8(f[2], f[3]);
  const __m512i c = _mm512_unpackhi_epi8(f[0], f[1]), d = _mm512_unpackhi_epi8(f[2], f[3]);
  v[0] = _mm512_unpacklo_epi16(a, b), v[1] = _mm512_unpackhi_epi16(a, b);
  v[2] = _mm512_unpacklo_epi16(c, d), v[3] = _mm512_unpackhi_epi16(c, d);
}
#elif defined(__AVX512F__)
template <int KIND, int FROM, int COUNT>
static inline void lattice_words(const uint8_t *p, int stride, Isa::Bytes v[4]) {
  // Of either half of their byte, what the sign bits flip is in a register.
  const __m512i low = Isa::load((const uint8_t *)LATTICE.sign), high = Isa::load((const uint8_t *)LATTICE.high);
  p += FROM * stride;
  UNROLL for (int i = FROM; i < FROM + COUNT; i++, p += stride) {
    if (KIND == E8) {
      const __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
      v[i] = _mm512_i32gather_epi32(c, LATTICE.e8, 4);
      continue;
    }
    const __m512i c = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    const __m512i pattern = _mm512_i32gather_epi32(_mm512_srli_epi32(c, 8), LATTICE.pattern, 4);
    v[i] = _mm512_ternarylogic_epi32(pattern, _mm512_permutexvar_epi32(c, low),
                                     _mm512_permutexvar_epi32(_mm512_srli_epi32(c, 4), high), 0x96);
  }
}
#elif defined(__AVX2__)
// Of eight rows, whose bytes lie STEP apart. From memory into lanes: a gather takes twice as long, and words that are put
// side by side in memory cannot be read together before they have left the core's store buffer.
template <int STEP> static inline __m256i look_up(const uint32_t table[256], const uint8_t *p) {
  const auto four = [table](const uint8_t *at) {
    __m128i v = _mm_cvtsi32_si128((int)table[at[0]]);
    v = _mm_insert_epi32(v, (int)table[at[STEP]], 1);
    v = _mm_insert_epi32(v, (int)table[at[2 * STEP]], 2);
    return _mm_insert_epi32(v, (int)table[at[3 * STEP]], 3);
  };
  return _mm256_inserti128_si256(_mm256_castsi128_si256(four(p)), four(p + 4 * STEP), 1);
}

// What the sign bits of eight codewords flip: linear over GF(2), so that of three, three and two bits is in registers.
static inline __m256i sign_flips(const uint8_t *p) {
  const auto eight = [](const uint32_t *table) { return _mm256_loadu_si256((const __m256i *)table); };
  const __m256i c = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  const __m256i low = _mm256_permutevar8x32_epi32(eight(LATTICE.sign), c);
  const __m256i middle = _mm256_permutevar8x32_epi32(eight(LATTICE.middle), _mm256_srli_epi32(c, 3));
  const __m256i high = _mm256_permutevar8x32_epi32(eight(LATTICE.top), _mm256_srli_epi32(c, 6));
  return _mm256_xor_si256(_mm256_xor_si256(low, middle), high);
}

template <int KIND, int FROM, int COUNT>
static inline void lattice_words(const uint8_t *p, int stride, Isa::Bytes v[4]) {
  p += FROM * stride;
  UNROLL for (int i = FROM; i < FROM + COUNT; i++, p += stride) {
    if (KIND == E8) {
      v[i] = {look_up<1>(LATTICE.e8, p), look_up<1>(LATTICE.e8, p + 8)};
      continue;
    }
    v[i].a = _mm256_xor_si256(look_up<2>(LATTICE.pattern, p + 1), sign_flips(p));
    v[i].b = _mm256_xor_si256(look_up<2>(LATTICE.pattern, p + 17), sign_flips(p + 16));
  }
}
#else
template <int KIND, int FROM, int COUNT>
static inline void lattice_words(const uint8_t *p, int stride, Isa::Bytes v[4]) {
  p += FROM * stride;
  UNROLL for (int i = FROM; i < FROM + COUNT; i++, p += stride) {
    alignas(64) uint32_t words[ROWS];
    for (int r = 0; r < ROWS; r++)
      words[r] = KIND == E8 ? LATTICE.e8[p[r]] : LATTICE.pattern[p[2 * r + 1]] ^ LATTICE.sign[p[2 * r]];
    v[i] = Isa::load((const uint8_t *)words);
  }
}
#endif
