// One tile to quantize; the struct that csrc/quantize.cpp fills and kernel/quantize.h works on.
#ifndef TRILOBITE_QUANTIZE_H
#define TRILOBITE_QUANTIZE_H
#include <stdint.h>

namespace trilobite {

enum { QUANTIZE_RTN = 0, QUANTIZE_SEARCH = 1, QUANTIZE_HQQ = 2 };

struct QuantizeTile {
  const float *w;         // [rows, ld], the first column of the group
  float *scale, *offset;  // [rows] at stride line_ld: the line found, before fp16
  const float *weight;    // [group] of mean 1: of the columns' errors in a search, or NULL: all 1
  const float *original;  // [rows, ld] or NULL
  float *values;          // [rows, ld] or NULL: what is stored, taken from `original` where given
  uint8_t *packed;        // the tile, or NULL
  uint8_t *super;         // super-scales of the span, where there are
  void *scratch;          // (64 + 16) * group bytes, or of a span, 64-byte aligned
  int64_t ld, line_ld;
  int rows, group, bits, method, steps;
  int tile_columns;       // under super-scales
  bool symmetric, given;  // given: a search begins with the lines that are there
};

}  // namespace trilobite
#endif
