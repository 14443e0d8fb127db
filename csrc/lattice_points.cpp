// The points of the lattice codebooks, by their rules.
#include "lattice_points.h"

#include <algorithm>

namespace trilobite {
namespace {

constexpr int LANES = LATTICE_LANES;

// Section C.1 of QuIP#: the patterns of norm 12.
constexpr const char *PADDING =
    "311133331311333311313333111333333331331133313131333113313331311333311313333111333313331133133131"
    "331313313313311333131313331311333133331131333131313313313133311331331313133311331333331113333131"
    "1333133113333113133313131133133333113331";

int norm(const Point &p) {
  int n = 0;
  for (int v : p) n += v * v;
  return n;
}

// All points with lanes from `values`, in lexicographic order, for which `keep` holds -> out.
template <typename Keep> void enumerate(const std::array<int, 3> &values, Keep keep, Points &out, int &count) {
  for (int i = 0; i < 6561; i++) {
    Point p;
    for (int lane = LANES - 1, rest = i; lane >= 0; lane--, rest /= 3) p[lane] = values[rest % 3];
    if (keep(p)) out[count++] = p;
  }
}

}  // namespace

Points e8p_patterns() {
  Points points{};
  int count = 0;
  enumerate({1, 3, 5}, [](const Point &p) { return norm(p) <= 40; }, points, count);
  std::stable_sort(points.begin(), points.begin() + count,
                   [](const Point &a, const Point &b) { return norm(a) < norm(b); });
  for (const char *c = PADDING; count < LATTICE_POINTS; c += LANES, count++)
    for (int lane = 0; lane < LANES; lane++) points[count][lane] = c[lane] - '0';
  return points;
}

Points e8_codebook() {
  Points points{};
  int count = 1;
  const auto root = [](const Point &p) {
    int sum = 0;
    for (int v : p) sum += v;
    return norm(p) == 8 && sum % 4 == 0;
  };
  enumerate({-2, 0, 2}, root, points, count);
  for (int i = 0; i < 256; i++) {
    Point p;
    for (int lane = 0; lane < LANES; lane++) p[lane] = i >> lane & 1 ? 1 : -1;
    if (root(p)) points[count++] = p;
  }
  std::sort(points.begin() + 1, points.begin() + count);
  for (int i = 0; count < LATTICE_POINTS; i++) points[count++][i / 2] = i % 2 ? -4 : 4;
  return points;
}

}  // namespace trilobite
