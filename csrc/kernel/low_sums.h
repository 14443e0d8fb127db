// Products of a segment with the lowest of three digits of a block's tokens, in units of x: added to those of the others. The
// digit is mostly zero (`LowSteps`), and so are they.
struct LowSums {
  alignas(64) float of[TOKENS][ROWS] = {};

  // one(step, sum): sum + products of a listed step. all(): writes those of all tokens.
  template <typename One, typename All> void fill(const LowSteps &low, One one, All all) {
    if (low.count > LowSteps::MOST) return all();
    for (int i = 0; i < low.count; i++) {
      float *sum = of[low.steps[i].token];
      Isa::store(sum, one(low.steps[i], Isa::load(sum)));
    }
  }

  void clear(const LowSteps &low) {
    if (low.count > LowSteps::MOST) memset(of, 0, sizeof of);
    else
      for (int i = 0; i < low.count; i++) memset(of[low.steps[i].token], 0, sizeof of[0]);
  }
};
