// Compensators. V is turned, 16 ranks at a time, into 8-bit tiles in scratch and multiplied like any packed matrix;
// U is decoded for 64 rows at a time and added to the results while they are in cache.

// Eight 3-bit codes of a little-endian stream -> eight bytes.
static inline uint64_t spread3(const uint8_t *p) {
  uint32_t w = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16;
#ifdef __BMI2__
  return _pdep_u64(w, 0x0707070707070707ull);
#else
  uint64_t x = (w & 0xfff) | (uint64_t)(w & 0xfff000) << 20;
  x = (x & 0x0000003f0000003full) | (x & 0x00000fc000000fc0ull) << 10;
  return (x & 0x0007000700070007ull) | (x & 0x0038003800380038ull) << 5;
#endif
}

// One group of 64 values: codes and their scale.
static inline float factor_group(const uint8_t *p, int bits, uint8_t codes[LR_GROUP]) {
  if (bits == 3) {
    for (int i = 0; i < 8; i++) {
      const uint64_t v = spread3(p + 3 * i);
      memcpy(codes + 8 * i, &v, 8);
    }
  } else {
    memcpy(codes, p, LR_GROUP);
  }
  uint16_t h;
  memcpy(&h, p + LR_GROUP / 8 * bits, 2);
  return half_to_float(h);
}

// Codes [16][64] of one group -> the dword order of tiles: a step of 4 columns is 16 dwords, one a row.
static inline void transpose_codes(const uint32_t rows[ROWS][LR_GROUP / 4], int first_step, int steps, uint8_t *out) {
  uint32_t *o = (uint32_t *)out;
  for (int step = 0; step < steps; step++)
    for (int r = 0; r < ROWS; r++) o[step * ROWS + r] = rows[r][first_step + step];
}

// Ranks [rank, rank + 16) of V as one band of tiles of bytes, a group per segment; absent ranks are zero.
static Matrix expand_v(const Matrix &m, int64_t rank, int seg, uint8_t *scratch) {
  const int64_t bytes = LR_GROUP / 8 * m.rank_bits + 2, groups = ceil_div(m.k, LR_GROUP);
  const int present = m.rank - rank < ROWS ? (int)(m.rank - rank) : ROWS;
  alignas(64) uint32_t rows[ROWS][LR_GROUP / 4];
  memset(rows, 0, sizeof rows);
  Matrix v{};
  v.packed = scratch;
  v.n = ROWS, v.k = m.k, v.bits = m.rank_bits, v.kind = 8, v.group = seg, v.bands = 1, v.groups = m.k / seg,
  v.wide = true;
  v.code_bytes = seg * ROWS, v.tile_bytes = v.code_bytes + 2 * ROWS * 4;
  for (int64_t g = 0; g < groups; g++) {
    float scale[2][ROWS] = {};
    for (int r = 0; r < present; r++) {
      const float s = factor_group(m.lrb + ((rank + r) * groups + g) * bytes, m.rank_bits, (uint8_t *)rows[r]);
      scale[0][r] = s;
      scale[1][r] = -(float)(1 << (m.rank_bits - 1)) * s;
    }
    for (int64_t c = g * LR_GROUP; c < (g + 1) * LR_GROUP && c < m.k; c += seg) {
      uint8_t *tile = scratch + c / seg * v.tile_bytes;
      transpose_codes(rows, (int)(c % LR_GROUP) / 4, seg / 4, tile);
      memcpy(tile + v.code_bytes, scale, sizeof scale);
    }
  }
  return v;
}

// The values [k] that prepared activations of one token stand for.
static void restore(const Digits &x, int token, float *out) {
  const int block = token / TOKENS, row = token % TOKENS, rows = x.rows(block);
  for (int64_t c = 0; x.whole && c < x.k / BLOCK; c++)
    memcpy(out + c * BLOCK, x.floats(block, c, row), BLOCK * sizeof(float));
  if (x.whole) return;
  constexpr int ORDER[4] = {0, 2, 1, 3};  // of words and parts
  if (x.parts) {
    for (int64_t c = 0; c < x.k / BLOCK; c++)
      for (int i = 0; i < BLOCK; i++) {
        float v = 0;
        for (int p = x.parts - 1; p >= 0; p--) v += bf16_to_float(x.part(block, c, p, row)[i / 4 * 4 + ORDER[i % 4]]);
        out[c * BLOCK + i] = v;
      }
    return;
  }
  const int64_t digit = (int64_t)rows * x.seg;
  for (int64_t s = 0; s < x.segments; s++) {
    const float scale = x.scale_block(block)[s * rows + row];
    if (x.words) {
      const int16_t *word = x.word(block, s, row);
      const int8_t *lowest = x.lowest(block, s, row);
      for (int i = 0; i < x.seg; i++) {
        const int at = i / 4 * 4 + ORDER[i % 4];
        out[s * x.seg + i] = scale * LOWEST * (float)(256 * word[at] + lowest[at]);
      }
      continue;
    }
    const int8_t *q = x.q_block(block) + s * x.digits * digit + (int64_t)row * x.seg;
    for (int i = 0; i < x.seg; i++) {
      int32_t v = q[i];
      if (x.digits == 3) v += 256 * q[digit + i] + 65536 * q[2 * digit + i];
      out[s * x.seg + i] = scale * (float)v;
    }
  }
}

static inline float dot_half(const uint8_t *half, const float *x, int64_t n) {
  float lanes[ROWS] = {}, total = 0;
  for (int64_t k = 0; k < n; k += ROWS)
    for (int j = 0; j < ROWS; j++) {
      uint16_t h;
      memcpy(&h, half + 2 * (k + j), 2);
      lanes[j] += half_to_float(h) * x[k + j];
    }
  for (int j = 0; j < ROWS; j++) total += lanes[j];
  return total;
}

// fp16 factors keep their precision: plain fp32 dot products.
static void low_rank_v16(const Matrix &m, int64_t rank, const Digits &x, float *z, int64_t ld, float *buffer) {
  for (int t = 0; t < x.count; t++) {
    restore(x, t, buffer);
    for (int64_t i = rank; i < rank + ROWS && i < m.rank; i++)
      z[t * ld + i - rank] = dot_half(m.lrb + i * m.k * 2, buffer, m.k);
  }
}

static void low_rank_v(const Matrix &m, int64_t rank, const Digits &x, float *z, int64_t ld, void *scratch) {
  if (m.rank_bits == 16) return low_rank_v16(m, rank, x, z, ld, (float *)scratch);
  uint8_t *tiles = (uint8_t *)scratch;
  const Matrix v = expand_v(m, rank, x.seg, tiles);
  constexpr int BLOCKS = 16;
  alignas(64) float part[BLOCKS * TOKENS * ROWS];
  const int present = m.rank - rank < ROWS ? (int)(m.rank - rank) : ROWS;
  uint8_t *rest = tiles + ceil_div(v.groups * v.tile_bytes, 64) * 64;
  for (int block = 0; block < x.blocks(); block += BLOCKS) {
    const Digits some = x.blocks_from(block, BLOCKS);
    rows_tier(v, 0, 1, some, part, ROWS, rest);
    for (int t = 0; t < some.count; t++) memcpy(z + (block * TOKENS + t) * ld, part + t * ROWS, present * sizeof(float));
  }
}

// Codes of U for one rank and up to 64 rows, as fp32 without their scale; returns the scale.
static inline float u_values(const Matrix &m, int64_t row, int64_t rank, float values[LR_GROUP]) {
  if (m.rank_bits == 16) {
    const int64_t count = m.n - row < LR_GROUP ? m.n - row : LR_GROUP;
    memset(values, 0, LR_GROUP * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
      uint16_t h;
      memcpy(&h, m.lra + 2 * (rank * m.n + row + i), 2);
      values[i] = half_to_float(h);
    }
    return 1;
  }
  const int64_t bytes = LR_GROUP / 8 * m.rank_bits + 2, groups = ceil_div(m.n, LR_GROUP);
  alignas(64) uint8_t codes[LR_GROUP];
  const float scale = factor_group(m.lra + (rank * groups + row / LR_GROUP) * bytes, m.rank_bits, codes);
  const int centre = 1 << (m.rank_bits - 1);
  for (int i = 0; i < LR_GROUP; i++) values[i] = (float)((int)codes[i] - centre);
  return scale;
}

// out[t][0..64) += sum over 16 ranks of z[t][r] * u[r], four lanes of 16 rows at a time.
static inline void add_outer(const float u[ROWS][LR_GROUP], const float *z, int ranks, float *out) {
  Isa::Floats acc[UNIT_BANDS];
  for (int b = 0; b < UNIT_BANDS; b++) acc[b] = Isa::load(out + b * ROWS);
  for (int r = 0; r < ranks; r++)
    for (int b = 0; b < UNIT_BANDS; b++) acc[b] = Isa::fma(Isa::load(u[r] + b * ROWS), Isa::set1(z[r]), acc[b]);
  for (int b = 0; b < UNIT_BANDS; b++) Isa::store(out + b * ROWS, acc[b]);
}

static void low_rank_u(const Matrix &m, int64_t row, const float *z, int64_t ldz, int count, float *out, int64_t ld) {
  alignas(64) float u[ROWS][LR_GROUP];
  for (int64_t first = 0; first < m.rank; first += ROWS) {
    const int ranks = m.rank - first < ROWS ? (int)(m.rank - first) : ROWS;
    for (int r = 0; r < ranks; r++) {
      const float scale = u_values(m, row, first + r, u[r]);
      for (int i = 0; i < LR_GROUP; i++) u[r][i] *= scale;
    }
    for (int t = 0; t < count; t++) add_outer(u, z + t * ldz + first, ranks, out + t * ld);
  }
}
