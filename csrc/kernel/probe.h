// Probes of the machine's limits: reading memory, and the tier's integer dot product.

// Four streams at a time, as the kernels do: one alone does not reach what the memory gives.
static uint64_t read_bytes(const uint8_t *p, int64_t bytes, int64_t ahead) {
  constexpr int STREAMS = 4;
  const int64_t part = bytes / STREAMS / 128 * 128;
  Isa::Bytes a[STREAMS];
  for (int s = 0; s < STREAMS; s++) a[s] = Isa::load(p + s * part);
  for (int64_t i = 0; i < part; i += 128)
    for (int s = 0; s < STREAMS; s++) {
      const uint8_t *at = p + s * part + i;
      __builtin_prefetch(at + ahead, 0, Isa::LOCALITY);
      __builtin_prefetch(at + ahead + 64, 0, Isa::LOCALITY);
      a[s] = Isa::either(Isa::either(a[s], Isa::load(at)), Isa::load(at + 64));
    }
  uint8_t out[64];
  Isa::store(out, Isa::either(Isa::either(a[0], a[1]), Isa::either(a[2], a[3])));
  return out[0] + (uint64_t)out[63];
}

// As if values were read and changed here: what the compiler knows of them it would compute once, what nobody reads never.
template <typename T> static inline void hide(T &values) { __asm__ volatile("" : "+m"(values)); }

// Sums are read, but only here, so that they stay in registers.
template <typename T, int N> static inline void read_sums(const T (&sums)[N]) {
  T copy[N];
  UNROLL16 for (int i = 0; i < N; i++) copy[i] = sums[i];
  hide(copy);
}

constexpr int CHAINS = Isa::LANES == 16 ? 12 : 6;  // more registers than the latency of a product times its rate
constexpr int LINES = Isa::LANES == 16 ? 3 : 1;  // of codes, where there are registers: each x is loaded for all of them

static inline Isa::Bytes some_codes() {
  uint8_t ones[64];
  memset(ones, 1, sizeof ones);
  hide(ones);
  return Isa::load(ones);
}

// So many products of a line of codes, and `multiply(sum, codes, x)` is one.
template <typename F> static inline int64_t spin_products(int64_t rounds, F multiply) {
  Isa::Bytes codes[LINES];
  for (Isa::Bytes &line : codes) line = some_codes();
  int8_t x[4 * CHAINS / LINES];
  memset(x, 3, sizeof x);
  Isa::Ints a[CHAINS];
  UNROLL16 for (int i = 0; i < CHAINS; i++) a[i] = Isa::zero();
  for (int64_t r = 0; r < rounds; r += CHAINS) {
    hide(x);
    UNROLL16 for (int i = 0; i < CHAINS; i++) multiply(a[i], codes[i % LINES], Isa::quad(x + i / LINES * 4));
  }
  read_sums(a);
  return rounds / CHAINS * CHAINS;
}

static int64_t spin_dots(int64_t rounds, int digits) {
  return spin_products(rounds, [](auto &sum, auto codes, auto x) { sum = Isa::dot<4>(sum, codes, x); }) * 64 / digits;
}

// V: not every Isa has them.
template <typename V = Isa> static int64_t spin_words(int64_t rounds) {
  return spin_products(rounds, [](auto &sum, auto codes, auto x) { V::add_words(sum, codes, x); }) * 64 /
         lines(Form::WORDS);
}

// The short sums of `multiply_short`, of a segment of 64 columns. Of three digits the lowest is mostly left out. V: not every Isa has them.
template <typename V = Isa> static int64_t spin_shorts(int64_t rounds, int digits) {
  constexpr int STEPS = 64 / 4;
  Isa::Bytes codes = some_codes();
  int8_t x[4 * CHAINS];
  memset(x, 3, sizeof x);
  Isa::Ints a[CHAINS];
  UNROLL16 for (int i = 0; i < CHAINS; i++) a[i] = Isa::zero();
  for (int64_t r = 0; r < rounds; r += CHAINS * STEPS) {
    Isa::Bytes run[CHAINS];
    UNROLL16 for (int i = 0; i < CHAINS; i++) run[i] = Isa::bytes(0);
    for (int step = 0; step < STEPS; step++) {
      V::hide(codes);  // or its products are made once for all steps
      UNROLL16 for (int i = 0; i < CHAINS; i++) V::add_to_run(run[i], codes, Isa::quad(x + 4 * i));
    }
    UNROLL16 for (int i = 0; i < CHAINS; i++) a[i] = V::dot_shorts(a[i], run[i], Isa::factor(1));
    hide(x);
  }
  read_sums(a);
  const int64_t all = CHAINS * STEPS;
  return (rounds + all - 1) / all * all * 64 / (digits == TRILOBITE_EXACT ? 2 : digits);
}

template <Form FORM, typename V = Isa> static int64_t spin_parts(int64_t rounds) {
  float x[CHAINS / LINES], ones[ROWS];
  for (float &v : x) v = 1;
  for (float &v : ones) v = 1;
  Isa::Floats codes[LINES];
  for (Isa::Floats &line : codes) {
    hide(ones);
    line = Isa::load(ones);
  }
  Isa::Floats a[CHAINS];
  UNROLL16 for (int i = 0; i < CHAINS; i++) a[i] = Isa::set1(0);
  for (int64_t r = 0; r < rounds; r += CHAINS) {
    hide(x);
    UNROLL16 for (int i = 0; i < CHAINS; i++) a[i] = V::dot_part(a[i], codes[i % LINES], Isa::set1(x[i / LINES]));
  }
  read_sums(a);
  return rounds / CHAINS * CHAINS * 64 / lines(FORM);
}

[[maybe_unused]] static int64_t spin(int64_t rounds, int digits) {
  if constexpr (Isa::SHORT_SUMS) return spin_shorts(rounds, digits);
  if constexpr (Isa::FORM == Form::PAIRS)
    if (digits == TRILOBITE_EXACT) return spin_parts<Isa::FORM>(rounds);
  if constexpr (Isa::WORDS > 0)
    if (digits == TRILOBITE_EXACT) return spin_words(rounds);
  return spin_dots(rounds, digits);
}
