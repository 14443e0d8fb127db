// Shuffles within 16 bytes: byte j of every four into all four, or into both words with zeros above, or into the first;
// bytes 2 j and 2 j + 1 into a word each, likewise.
struct alignas(64) Spread {
  uint8_t bytes[4][64], words[4][64], ones[4][64], pairs[2][64];

  constexpr Spread() : bytes{}, words{}, ones{}, pairs{} {
    for (int j = 0; j < 4; j++)
      for (int i = 0; i < 64; i++) {
        bytes[j][i] = (uint8_t)(i % 16 / 4 * 4 + j);
        words[j][i] = i % 2 ? 0x80 : bytes[j][i];
        ones[j][i] = i % 4 ? 0x80 : bytes[j][i];
        if (j < 2) pairs[j][i] = i % 2 ? 0x80 : (uint8_t)(i % 16 / 4 * 4 + 2 * j + i % 4 / 2);
      }
  }
};
static constexpr Spread SPREAD;
