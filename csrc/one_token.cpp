// One token through one packed matrix, for who counts its instructions (benchmarks/speed/arm.py).
//     one_token tier bits group super digits n k
#include "fuzz.h"

int main(int argc, char **argv) {
  if (argc != 8) return fprintf(stderr, "one_token tier bits group super digits n k\n"), 1;
  trilobite_set_tier(argv[1]);
  if (strcmp(trilobite_tier(), argv[1])) return fprintf(stderr, "no tier %s here\n", argv[1]), 1;
  fuzz::Weight w;
  w.m.bits = atoi(argv[2]), w.m.group = atoi(argv[3]), w.m.n = atoi(argv[6]), w.m.k = atoi(argv[7]);
  if (atoi(argv[4])) fuzz::super_codes(w, w.m.n, w.m.k);
  else fuzz::plain_codes(w, w.m.n, w.m.k);
  w.point();
  const auto x = fuzz::activations(w.m.k);
  std::vector<float> y(w.m.n);
  return trilobite_linear(x.data(), TRILOBITE_F32, 1, &w.m, nullptr, TRILOBITE_F32, y.data(), atoi(argv[5]), 1);
}
