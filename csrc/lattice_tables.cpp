// The codebooks of formats/lattice.py as tables of 4-bit codes.
//
// In quarters, an E8P lane is sign * a + shift with a = 4c + 2, c = 0, 1, 2, and a shift of +-1. As whole numbers v with
// lane = (2v - 15) / 4 that is v = 2c + 8 + (shift > 0), of which a negative sign flips the upper three bits: so v is an
// exclusive or of what the pattern gives and of what the low byte of the codeword gives.
#include "common.h"
#include "lattice_points.h"

namespace trilobite {
namespace {

constexpr int LANES = LATTICE_LANES;

// Eight codes -> where `decode` wants them.
uint32_t place(const std::array<int, LANES> &codes) {
  uint32_t word = 0;
  for (int lane = 0; lane < LANES; lane++) word |= (uint32_t)codes[lane] << (lane % 4 * 8 + lane / 4 * 4);
  return word;
}

void fill_patterns(uint32_t *table) {
  const Points points = e8p_patterns();
  for (int i = 0; i < 256; i++) {
    Point codes;
    int sum = 0;
    for (int lane = 0; lane < LANES; lane++) codes[lane] = points[i][lane] - 1, sum += points[i][lane];
    if (sum / 2 % 2) codes[0] ^= 14;  // lane 0 makes the sum even
    table[i] = place(codes);
  }
}

void fill_signs(uint32_t *table) {
  for (int low = 0; low < 256; low++) {
    Point codes;
    int parity = 0;
    for (int lane = LANES - 1; lane >= 0; lane--) {
      const int negative = lane ? low >> (LANES - lane) & 1 : parity;
      parity ^= negative;
      codes[lane] = 8 ^ (low & 1) ^ (negative ? 14 : 0);
    }
    table[low] = place(codes);
  }
}

// Byte `byte` of sign[low] ^ sign[0] as GF2P8AFFINEQB wants it: byte 7 - i picks of `low` what makes up bit i.
uint64_t flip_matrix(const uint32_t *sign, int byte) {
  uint64_t matrix = 0;
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 8; j++)
      matrix |= (uint64_t)((sign[1 << j] ^ sign[0]) >> (8 * byte + i) & 1) << (8 * (7 - i) + j);
  return matrix;
}

// Codes are twice the lane plus 4.
void fill_e8(uint32_t *table) {
  const Points points = e8_codebook();
  for (int i = 0; i < 256; i++) {
    Point codes = points[i];
    for (int &v : codes) v += 4;
    table[i] = place(codes);
  }
}

}  // namespace

LatticeTables::LatticeTables() {
  fill_patterns(pattern);
  fill_signs(sign);
  for (int i = 0; i < 16; i++) high[i] = sign[16 * i] ^ sign[0];
  for (int i = 0; i < 8; i++) middle[i] = sign[8 * i] ^ sign[0], top[i] = high[i % 4 * 4];
  fill_e8(e8);
  for (int b = 0; b < 4; b++) {
    for (int i = 0; i < 256; i++) {
      pattern_bytes[b][i] = (uint8_t)((pattern[i] ^ sign[0]) >> 8 * b);
      e8_bytes[b][i] = (uint8_t)(e8[i] >> 8 * b);
    }
    flips[b] = flip_matrix(sign, b);
  }
}

const LatticeTables LATTICE;

}  // namespace trilobite
