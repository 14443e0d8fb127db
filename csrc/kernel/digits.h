// Activations -> digits. See `Digits` in common.h for the layout.

// The least power of two in whose units three digits are enough for what is no larger than `top`: exact for bf16 down to
// 2^-14 of it. two: in multiples of 256 of it.
struct ExactUnit {
  float inverse, scale;
  int shift;

  ExactUnit(uint32_t top, bool two) : shift(two ? 8 : 0) {
    // The largest digits are 127 * 2^16 + 127 * 2^8 + 127, 1.99216 * 2^22; a larger mantissa carries into the exponent.
    int e = (int)((top + 0x10101) >> 23) - 127;
    e = e < -100 ? -100 : e;  // keeps 2^(22-e) finite; what is lost is below 2^-122
    inverse = bits_to_float((uint32_t)(22 - shift - e + 127) << 23);
    scale = bits_to_float((uint32_t)(e - 22 + 127) << 23);
  }
  int32_t of(float x) const { return (int32_t)((uint32_t)(int32_t)__builtin_rintf(x * inverse) << shift); }
};

// All digits but the lowest, as a number.
static inline int32_t above_lowest(int32_t v) { return (v + 128) >> 8; }

// Digits of x [N] -> their scale.
template <int N>
static inline float split_exact(const float *x, uint32_t top, int8_t *q, int64_t stride, bool two, int32_t *total) {
  const ExactUnit unit(top, two);
  int32_t sum = 0;
  for (int i = 0; i < N; i++) {
    const int32_t v = unit.of(x[i]), v1 = above_lowest(v), v2 = above_lowest(v1);
    q[i] = (int8_t)v;
    q[stride + i] = (int8_t)v1;
    q[2 * stride + i] = (int8_t)v2;
    sum += v;
  }
  *total = sum;
  return unit.scale;
}

template <int N> static inline float split_int8(const float *x, uint32_t top, int8_t *q, int32_t *total) {
  const float largest = bits_to_float(top);
  const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
  int32_t sum = 0;
  for (int i = 0; i < N; i++) {
    const int32_t v = (int32_t)__builtin_rintf(x[i] * inverse);
    q[i] = (int8_t)v;
    sum += v;
  }
  *total = sum;
  return largest * (1 / 127.0f);
}

// In every four the middle two change places.
template <typename T> static inline void swap_columns(const T *x, int n, T *out) {
  for (int i = 0; i < n; i += 4) out[i] = x[i], out[i + 1] = x[i + 2], out[i + 2] = x[i + 1], out[i + 3] = x[i + 3];
}

// One segment of one token as it is, or as bfloat16 parts: each part rounds what the parts before it left.
static inline void split_parts(const float *x, const Digits &d, int block, int64_t s, int row) {
  float rest[64], sum = 0;
  for (int i = 0; i < d.seg; i++) sum += x[i];
  d.sum_block(block)[s * d.rows(block) + row] = sum;
  for (int c = 0; d.whole && c < d.seg; c += BLOCK)
    memcpy(d.floats(block, (s * d.seg + c) / BLOCK, row), x + c, BLOCK * sizeof(float));
  if (d.whole) return;
  memcpy(rest, x, d.seg * sizeof(float));
  for (int part = 0; part < d.parts; part++)
    for (int c = 0; c < d.seg; c += BLOCK) {
      uint16_t h[BLOCK];
      for (int i = 0; i < BLOCK; i++) {
        h[i] = float_to_bf16(rest[c + i]);
        rest[c + i] -= bf16_to_float(h[i]);
      }
      swap_columns(h, BLOCK, d.part(block, (s * d.seg + c) / BLOCK, part, row));
    }
}

// The sum of 16 digits: a multiplication adds up those of eight, as numbers without a sign.
static inline int sum_digits(const int8_t *q) {
  constexpr uint64_t SIGNS = 0x8080808080808080, EVEN = 0x00ff00ff00ff00ff, ONES = 0x0001000100010001;
  uint64_t a, b;
  memcpy(&a, q, 8), memcpy(&b, q + 8, 8);
  a ^= SIGNS, b ^= SIGNS;
  return (int)(((a & EVEN) + (a >> 8 & EVEN) + (b & EVEN) + (b >> 8 & EVEN)) * ONES >> 48) - HALF * 128;
}

// Sums of N digits, for `Digits::sums`.
template <int N> static inline void sum_digits(const int8_t *q, int16_t *sums) {
  int of[4] = {};
  for (int j = 0; j < N / HALF; j++) of[j] = sum_digits(q + j * HALF);
  for (int j = 0; j < 4; j++) sums[j] = (int16_t)of[j];
  for (int j = 0; j < 2; j++) sums[4 + j] = (int16_t)(of[2 * j] + of[2 * j + 1]);
}

// The steps of the lowest digit that are not zero, for `Digits::low`.
template <int N> static inline void find_low_steps(const int8_t *q, LowSteps &low) {
  uint32_t steps = 0;
  for (int i = 0; i < N / 4; i++) {
    int32_t four;
    memcpy(&four, q + 4 * i, 4);
    steps |= (uint32_t)(four != 0) << i;
  }
  int parts = 0;
  for (int i = 0; i < N / HALF; i++) parts |= ((steps >> 4 * i & 15) != 0) << i;
  low.parts = (uint8_t)parts;
  for (int i = 0; i < LowSteps::MOST; i++, steps &= steps - 1) {
    const int step = steps ? __builtin_ctz(steps) : 0;
    int32_t four;
    memcpy(&four, q + 4 * step, 4);
    four = steps ? four : 0;
    memcpy(low.four[i], &four, 4);
    low.step[i] = (uint8_t)step;
  }
  low.more = steps != 0;
}

// Pairs of columns of a token whose lowest digits [n] are not zero join those of tokens before.
static inline void add_low_pairs(const int8_t *q, int n, int token, LowPairs &low) {
  int count = token == 0 ? 0 : low.count;
  for (int at = 0; at < n; at += 8) {
    uint64_t rest;
    memcpy(&rest, q + at, 8);
    for (; rest != 0; count++) {
      const int pair = __builtin_ctzll(rest) / 16, i = at + 2 * pair;
      if (count < LowPairs::MOST) low.pairs[count] = {{q[i], q[i + 1]}, (uint8_t)(i / 2), (uint8_t)token};
      rest &= ~((uint64_t)0xffff << 16 * pair);
    }
  }
  low.count = count;
}

constexpr float LOWEST = 1 / 256.0f;  // the scale of lowest digits, in that of words

// One segment of one token as words, -> the scale of these. A largest value that is not finite leaves zeros.
template <int N>
static inline float split_words(const float *x, const Digits &d, int block, int64_t s, int row, uint32_t top,
                                int32_t *total) {
  int16_t words[N];
  int8_t lowest[N];
  const bool finite = top < 0x7f800000;
  const ExactUnit unit(finite ? top : 0, d.two);
  int32_t sum = 0;
  for (int i = 0; i < N; i++) {
    const int32_t v = unit.of(finite ? x[i] : 0);
    words[i] = (int16_t)above_lowest(v);
    lowest[i] = (int8_t)v;
    sum += v;
  }
  *total = sum;
  swap_columns(words, N, d.word(block, s, row));
  swap_columns(lowest, N, d.lowest(block, s, row));
  add_low_pairs(d.lowest(block, s, row), N, row, d.pairs_block(block)[s]);
  return unit.scale / LOWEST;
}

// One segment of one token, N columns. A NaN or infinite value makes the scale NaN, and with it every result of the token.
template <int N> static inline void quantize(const float *x, const Digits &d, int block, int64_t s, int row) {
  const int rows = d.rows(block);
  const int64_t at = s * rows + row, stride = (int64_t)rows * N;
  int8_t *q = d.q_block(block) + s * d.digits * stride + (int64_t)row * N;
  uint32_t top = 0;
  for (int i = 0; i < N; i++) {
    const uint32_t a = float_to_bits(x[i]) & 0x7fffffff;
    top = a > top ? a : top;
  }
  const bool finite = top < 0x7f800000;
  int32_t total = 0;
  float scale = 0;
  if (d.words) {
    scale = split_words<N>(x, d, block, s, row, top, &total);
  } else if (finite) {
    scale = d.digits == 1 ? split_int8<N>(x, top, q, &total) : split_exact<N>(x, top, q, stride, d.two, &total);
  } else {
    for (int i = 0; i < d.digits; i++) memset(q + i * stride, 0, N);
  }
  d.scale_block(block)[at] = finite ? scale : bits_to_float(0x7fc00000);
  d.sum_block(block)[at] = finite ? (d.words ? scale * LOWEST : scale) * (float)total : bits_to_float(0x7fc00000);
  if (!SHORT_FEW || d.words) return;
  if (d.low && d.two) d.low_block(block)[at] = {};
  else if (d.low) find_low_steps<N>(q, d.low_block(block)[at]);
  for (int i = 0; d.summed && i < d.digits; i++)
    sum_digits<N>(q + i * stride, d.sums_block(block) + (at * d.digits + i) * SUMS);
}

static inline void quantize_segment(const float *x, const Digits &d, int block, int64_t s, int row) {
  if (d.parts) return split_parts(x, d, block, s, row);
  if (d.seg == 64) return quantize<64>(x, d, block, s, row);
  if (d.seg == BLOCK) return quantize<BLOCK>(x, d, block, s, row);
  quantize<HALF>(x, d, block, s, row);
}

static void quantize_block(const void *x, int dtype, const int32_t *index, const Digits &d, int block) {
  float buffer[64];
  for (int r = 0; r < d.rows(block); r++) {
    const int64_t token = (int64_t)block * TOKENS + r, row = index ? index[token] : token;
    for (int64_t s = 0; s < d.segments; s++) {
      load_floats(x, dtype, row * d.k + s * d.seg, d.seg, buffer);
      quantize_segment(buffer, d, block, s, r);
    }
  }
}

static void quantize_columns(const float *x, int64_t ld, int64_t column, int width, const Digits &d) {
  for (int t = 0; t < d.count; t++)
    for (int c = 0; c < width; c += d.seg)
      quantize_segment(x + t * ld + c, d, t / TOKENS, (column + c) / d.seg, t % TOKENS);
}
