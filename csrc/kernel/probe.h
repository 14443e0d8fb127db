// Probes of the machine's limits: reading memory, and the tier's integer dot product.

static uint64_t read_bytes(const uint8_t *p, int64_t bytes) {
  Isa::Bytes a = Isa::load(p), b = Isa::load(p + 64);
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
    for (int j = 0; j < 256; j += 64) __builtin_prefetch(p + i + 4096 + j);
    a = Isa::either(Isa::either(a, Isa::load(p + i)), Isa::load(p + i + 64));
    b = Isa::either(Isa::either(b, Isa::load(p + i + 128)), Isa::load(p + i + 192));
  }
  uint8_t out[64];
  Isa::store(out, Isa::either(a, b));
  return out[0] + (uint64_t)out[63];
}

static int64_t spin_dots(int64_t rounds) {
  constexpr int CHAINS = 8;  // more than the latency of a product times its rate
  uint8_t ones[64];
  memset(ones, 1, sizeof ones);
  Isa::Bytes codes = Isa::load(ones);
  int8_t x[4 * CHAINS];
  memset(x, 3, sizeof x);
  Isa::Ints a[CHAINS];
  UNROLL
  for (int i = 0; i < CHAINS; i++) a[i] = Isa::zero();
  for (int64_t r = 0; r < rounds; r += CHAINS) {
    __asm__ volatile("" : "+m"(x));  // as if x changed, or the products would be computed once
    UNROLL
    for (int i = 0; i < CHAINS; i++) a[i] = Isa::dot<4>(a[i], codes, x + 4 * i);
  }
  float out[ROWS];
  Isa::Floats f = Isa::to_float(a[0]);
  UNROLL
  for (int i = 1; i < CHAINS; i++) f = Isa::fma(Isa::set1(1), Isa::to_float(a[i]), f);
  Isa::store(out, f);
  return rounds / CHAINS * CHAINS * 64 + (out[0] == 0.5f);
}
