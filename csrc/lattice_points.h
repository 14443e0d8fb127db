// The points of the lattice codebooks in the order of their codes (trilobite/formats/lattice.py).
#ifndef TRILOBITE_LATTICE_POINTS_H
#define TRILOBITE_LATTICE_POINTS_H
#include <array>

namespace trilobite {

constexpr int LATTICE_LANES = 8, LATTICE_POINTS = 256;
using Point = std::array<int, LATTICE_LANES>;  // in halves
using Points = std::array<Point, LATTICE_POINTS>;

// E8P's table S (section C.1 of QuIP#): lanes 1, 3 or 5, by norm, the patterns of norm 12 last.
Points e8p_patterns();
constexpr int WHOLE_CLASSES = 227;  // patterns before those of norm 12

// The 1-bit codebook: zero, the 240 roots, and 15 axes.
Points e8_codebook();

}  // namespace trilobite
#endif
