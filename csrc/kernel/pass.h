// Many tokens (many.h, short_many.h): how they are cut into passes, and into runs that registers have room for.

constexpr int PANEL_NEAR = 1024;                           // bytes ahead that a panel is prefetched (panel.h)
constexpr int MOST_SUMS = Isa::SUMS / Isa::BANDS_AT_ONCE;  // that registers have room for, of each band
// Tokens that share what was decoded: they and their results stay in the first-level cache.
constexpr int TOKENS_A_PASS = 64;

template <int MOST = TOKENS_A_PASS, typename F>
static inline void in_passes(const Digits &x, float *out, int64_t ld, F pass) {
  constexpr int BLOCKS = MOST / TOKENS;
  for (int block = 0; block < x.blocks(); block += BLOCKS)
    pass(x.blocks_from(block, BLOCKS), out + (int64_t)block * TOKENS * ld);
}

// Results of a pass for NB bands. Here those of one token follow those of another; in `out` they may be as far apart as
// lines that a cache has the same few places for.
template <int NB, int MOST = TOKENS_A_PASS> struct PassSums {
  alignas(64) float sums[MOST][NB * ROWS];

  PassSums(const Matrix &m, const Digits &x, const float *out, int64_t ld) {
    for (int t = 0; t < x.count; t++) {
      if (m.add) memcpy(sums[t], out + t * ld, sizeof sums[t]);
      else memset(sums[t], 0, sizeof sums[t]);
    }
  }
  float *of(int block) { return sums[block * TOKENS]; }
  void store(const Digits &x, float *out, int64_t ld) const {
    for (int t = 0; t < x.count; t++) memcpy(out + t * ld, sums[t], sizeof sums[t]);
  }
};

// Of up to a block of tokens as few runs of up to MOST as there can be, which are as large as each other: the first one's
// size, by how many tokens are left.
template <int MOST> struct Runs {
  int first[TOKENS + 1] = {};
  constexpr Runs() {
    for (int rest = 1; rest <= TOKENS; rest++) {
      const int runs = (rest + MOST - 1) / MOST;
      first[rest] = (rest + runs - 1) / runs;
    }
  }
};

template <int N> struct Count { static constexpr int VALUE = N; };

template <int N, typename F> static inline void call_with(int n, int first, F &run) {
  if (n == N) return run(Count<N>{}, first);
  if constexpr (N > 1) call_with<N - 1>(n, first, run);
}

// run(Count<N>, first) for tokens [first, first + N).
template <int MOST, typename F> static inline void in_runs(int rows, F run) {
  static constexpr Runs<MOST> RUNS;
  for (int first = 0, n; first < rows; first += n) {
    n = RUNS.first[rows - first];
    call_with<MOST>(n, first, run);
  }
}

// out [ROWS] += w * dot + offset * sum
static inline void add_product(const Affine &w, Isa::Floats dot, float sum, float *out) {
  Isa::store(out, Isa::fma(w.offset, Isa::set1(sum), Isa::fma(w.scale, dot, Isa::load(out))));
}
