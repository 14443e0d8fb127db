// Nearest points of the lattice codebooks: the loops of trilobite/formats/lattice.py, which explains the search.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "lattice_points.h"
#include "matrix.h"

namespace trilobite {
namespace {

constexpr int LANES = LATTICE_LANES, PADS = LATTICE_POINTS - WHOLE_CLASSES, POWERS = 6561;
constexpr float FAR = 1e15f;  // stands for what is farther away, or not a number
constexpr float SHIFTS[2] = {-0.25f, 0.25f};
constexpr struct { int threes, fives; } CLASSES[] = {{0, 0}, {1, 0}, {2, 0}, {3, 0}, {4, 0}, {0, 1}, {1, 1}};

struct Tables {
  float patterns[LATTICE_POINTS][LANES], e8[LATTICE_POINTS][LANES];
  float pads[LANES][PADS];  // the patterns of norm 12
  uint8_t row[POWERS];      // sum of 3^lane * (half - 1) / 2 -> pattern
  int power[LANES];
  uint8_t half[256];                 // signs, lane 0 in bit 0 -> root of halves
  uint8_t pair[LANES][LANES][2][2];  // two lanes, whether they are negative -> root of two ones
  uint8_t axis[LANES][2];            // of lane 7 there is no negative one

  Tables() : patterns{}, e8{}, pads{}, row{}, power{}, half{}, pair{}, axis{} {
    const Points source = e8p_patterns(), small = e8_codebook();
    for (int l = 0, p = 1; l < LANES; l++, p *= 3) power[l] = p;
    for (int i = 0; i < LATTICE_POINTS; i++) {
      int key = 0, signs = 0, size = 0, count = 0, lanes[LANES] = {};
      for (int l = 0; l < LANES; l++) {
        patterns[i][l] = (float)source[i][l] / 2, e8[i][l] = (float)small[i][l] / 2;
        if (i >= WHOLE_CLASSES) pads[l][i - WHOLE_CLASSES] = patterns[i][l];
        key += power[l] * (source[i][l] - 1) / 2;
        signs |= (small[i][l] < 0) << l;
        if (small[i][l]) lanes[count++] = l, size = abs(small[i][l]);
      }
      row[key] = (uint8_t)i;
      const auto negative = [&](int n) { return signs >> lanes[n] & 1; };
      if (size == 1) half[signs] = (uint8_t)i;
      if (size == 4) axis[lanes[0]][negative(0)] = (uint8_t)i;
      if (size != 2) continue;
      pair[lanes[0]][lanes[1]][negative(0)][negative(1)] = (uint8_t)i;
      pair[lanes[1]][lanes[0]][negative(1)][negative(0)] = (uint8_t)i;
    }
  }
};

const Tables &tables() {
  static const Tables made;
  return made;
}

// Sizes of the lanes of a vector, and the lanes from the largest to the smallest, equal ones as they lie.
struct Ranked {
  float a[LANES];
  int order[LANES], signs = 0;  // negative lanes, lane 0 in bit 0

  Ranked(const float *x, float shift) {
    for (int l = 0; l < LANES; l++) {
      const float z = x[l] - shift, size = fabsf(z);
      signs |= (z < 0) << l;
      a[l] = size < FAR ? size : FAR;
    }
    int rank[LANES] = {};
    for (int i = 1; i < LANES; i++)
      for (int j = 0; j < i; j++) {
        const int before = a[j] >= a[i];
        rank[i] += before, rank[j] += 1 - before;
      }
    for (int l = 0; l < LANES; l++) order[rank[l]] = l;
  }

  int odd() const { return __builtin_popcount((unsigned)signs) & 1; }
};

// A pattern under one shift. score: the squared distance, less |z|^2; flip: the lane that changes its sign, or none
struct Pattern {
  float score;
  int index, flip;
};

void try_pads(const Tables &t, const Ranked &r, Pattern &best) {
  float sum[PADS] = {}, least[PADS];
  for (float &v : least) v = 4 * FAR;
  for (int l = 0; l < LANES; l++)
    for (int p = 0; p < PADS; p++) {
      const float product = r.a[l] * t.pads[l][p];
      sum[p] += product;
      least[p] = product < least[p] ? product : least[p];
    }
  const bool wrong = !r.odd();
  int pick = -1;
  for (int p = 0; p < PADS; p++) {
    const float score = 12 - 2 * (wrong ? sum[p] - 2 * least[p] : sum[p]);
    if (score < best.score) best.score = score, pick = p;
  }
  if (pick < 0) return;
  best.index = WHOLE_CLASSES + pick, best.flip = -1;
  for (int l = 0; wrong && best.flip < 0; l++)
    if (r.a[l] * t.pads[l][pick] == least[pick]) best.flip = l;
}

Pattern best_pattern(const Tables &t, const Ranked &r) {
  float top[LANES + 1] = {};  // sums of the largest
  int keys[LANES + 1] = {};
  for (int i = 0; i < LANES; i++) {
    top[i + 1] = top[i] + r.a[r.order[i]];
    keys[i + 1] = keys[i] + t.power[r.order[i]];
  }
  const int odd = r.odd(), last = r.order[LANES - 1];
  // By the parity of the pattern: what one of the wrong parity loses by a sign.
  const float sums[2] = {top[LANES] / 2 - (odd ? r.a[last] : 0), top[LANES] / 2 - (odd ? 0 : r.a[last])};
  Pattern best{INFINITY, 0, -1};
  int key = 0;
  for (const auto &c : CLASSES) {
    float product = sums[c.threes & 1] + top[c.threes + c.fives];
    if (c.fives) product += r.a[r.order[0]];
    const float score = (float)(2 + 2 * c.threes + 6 * c.fives) - 2 * product;
    if (score >= best.score) continue;
    best.score = score, best.flip = odd != (c.threes & 1) ? last : -1;
    key = keys[c.threes + c.fives] + (c.fives ? keys[1] : 0);
  }
  best.index = t.row[key];
  if (12 - 2 * (sums[1] + top[5]) < best.score) try_pads(t, r, best);
  return best;
}

uint32_t nearest_e8p(const Tables &t, const float *x, float *point) {
  float least = INFINITY;
  uint32_t code = 0;
  for (int s = 0; s < 2; s++) {
    const Ranked r(x, SHIFTS[s]);
    const Pattern p = best_pattern(t, r);
    float distance = p.score;
    for (float a : r.a) distance += a * a;
    if (s && distance >= least) break;
    least = distance;
    const int signs = r.signs ^ (p.flip < 0 ? 0 : 1 << p.flip);
    code = (uint32_t)p.index << 8 | (uint32_t)s;
    for (int l = 0; l < LANES; l++) {
      const int negative = signs >> l & 1;
      if (l) code |= (uint32_t)negative << (LANES - l);
      point[l] = (negative ? -t.patterns[p.index][l] : t.patterns[p.index][l]) + SHIFTS[s];
    }
  }
  return code;
}

uint32_t nearest_e8(const Tables &t, const float *x, float *point) {
  const Ranked r(x, 0);
  const int *lane = r.order, last = lane[LANES - 1];
  const auto negative = [&](int l) { return r.signs >> l & 1; };
  float sum = 0;
  for (float a : r.a) sum += a;
  // Half of |point|^2, less the product with it: of zero, two ones, halves, a two.
  const float scores[] = {0, 1 - (r.a[lane[0]] + r.a[lane[1]]), 1 - (sum / 2 - (r.odd() ? r.a[last] : 0)),
                          2 - 2 * r.a[lane[0]]};
  int best = 0;
  for (int i = 1; i < 4; i++) best = scores[i] < scores[best] ? i : best;
  // Without the missing axis two ones are nearer than any other.
  if (best == 3 && !t.axis[lane[0]][negative(lane[0])]) best = scores[1] <= scores[2] ? 1 : 2;
  const int codes[] = {0, t.pair[lane[0]][lane[1]][negative(lane[0])][negative(lane[1])],
                       t.half[r.signs ^ (r.odd() ? 1 << last : 0)], t.axis[lane[0]][negative(lane[0])]};
  memcpy(point, t.e8[codes[best]], sizeof t.e8[0]);
  return (uint32_t)codes[best];
}

}  // namespace

bool nearest_points(const float *x, int64_t count, int64_t bits, double ratio, int64_t *codes, float *points) {
  if (bits < 1 || bits > 4 || count < 0 || !(ratio > 0))
    return fail("nearest points: %lld bits, %lld vectors", (long long)bits, (long long)count);
  const Tables &t = tables();
  const float in = (float)ratio, out = (float)(1 / ratio);
  for (int64_t i = 0; i < count; i++, x += LANES, points += LANES) {
    codes[i] = bits == 1 ? nearest_e8(t, x, points) : nearest_e8p(t, x, points);
    if (bits < 3) continue;
    float rest[LANES], second[LANES];
    for (int l = 0; l < LANES; l++) rest[l] = (x[l] - points[l]) * in;
    codes[i] |= (int64_t)(bits == 3 ? nearest_e8(t, rest, second) : nearest_e8p(t, rest, second)) << 16;
    for (int l = 0; l < LANES; l++) points[l] += out * second[l];
  }
  return true;
}

}  // namespace trilobite
