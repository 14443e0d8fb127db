// Probes of the machine's limits: reading memory, and the tier's integer dot product.

// Four streams at a time, as the kernels do: one alone does not reach what the memory gives.
static uint64_t read_bytes(const uint8_t *p, int64_t bytes) {
  constexpr int STREAMS = 4;
  const int64_t part = bytes / STREAMS / 128 * 128;
  Isa::Bytes a[STREAMS];
  for (int s = 0; s < STREAMS; s++) a[s] = Isa::load(p + s * part);
  for (int64_t i = 0; i < part; i += 128)
    for (int s = 0; s < STREAMS; s++) {
      const uint8_t *at = p + s * part + i;
      __builtin_prefetch(at + 2048);
      __builtin_prefetch(at + 2048 + 64);
      a[s] = Isa::either(Isa::either(a[s], Isa::load(at)), Isa::load(at + 64));
    }
  uint8_t out[64];
  Isa::store(out, Isa::either(Isa::either(a[0], a[1]), Isa::either(a[2], a[3])));
  return out[0] + (uint64_t)out[63];
}

static int64_t spin_dots(int64_t rounds, int digits) {
  constexpr int CHAINS = 8;  // more than the latency of a product times its rate
  uint8_t ones[64];
  memset(ones, 1, sizeof ones);
  Isa::Bytes codes = Isa::load(ones);
  int8_t x[4 * CHAINS];
  memset(x, 3, sizeof x);
  Isa::Ints a[CHAINS];
  UNROLL for (int i = 0; i < CHAINS; i++) a[i] = Isa::zero();
  for (int64_t r = 0; r < rounds; r += CHAINS) {
    __asm__ volatile("" : "+m"(x));  // as if x changed, or the products would be computed once
    UNROLL for (int i = 0; i < CHAINS; i++) a[i] = Isa::dot<4>(a[i], codes, Isa::quad(x + 4 * i));
  }
  float out[ROWS];
  Isa::Floats f = Isa::to_float(a[0]);
  UNROLL for (int i = 1; i < CHAINS; i++) f = Isa::fma(Isa::set1(1), Isa::to_float(a[i]), f);
  Isa::store(out, f);
  return rounds / CHAINS * CHAINS * 64 / digits + (out[0] == 0.5f);
}

template <Form FORM, typename V = Isa> static int64_t spin_parts(int64_t rounds) {
  constexpr int CHAINS = 8;
  float x[CHAINS];
  for (float &v : x) v = 1;
  const Isa::Floats codes = Isa::set1(1);
  Isa::Floats a[CHAINS];
  UNROLL for (int i = 0; i < CHAINS; i++) a[i] = Isa::set1(0);
  for (int64_t r = 0; r < rounds; r += CHAINS) {
    __asm__ volatile("" : "+m"(x));
    UNROLL for (int i = 0; i < CHAINS; i++) a[i] = V::dot_part(a[i], codes, Isa::set1(x[i]));
  }
  float out[ROWS];
  UNROLL for (int i = 1; i < CHAINS; i++) a[0] = Isa::fma(Isa::set1(1), a[i], a[0]);
  Isa::store(out, a[0]);
  return rounds / CHAINS * CHAINS * 64 / lines(FORM) + (out[0] == 0.5f);
}

[[maybe_unused]] static int64_t spin(int64_t rounds, int digits) {
  if constexpr (Isa::FORM != Form::BYTES)
    if (digits == TRILOBITE_EXACT) return spin_parts<Isa::FORM>(rounds);
  return spin_dots(rounds, digits);
}
