// Rows of a matrix that GPTQ rounds against a Hessian, a block of columns at a time; the structs that csrc/feedback.cpp
// fills and kernel/feedback.h works on.
#ifndef TRILOBITE_FEEDBACK_H
#define TRILOBITE_FEEDBACK_H
#include "trilobite.h"

namespace trilobite {

// Some rows of a block: pointers begin at the first of them. Rows of the struct are those there are, at most a register's.
struct FeedbackRows {
  trilobite_feedback_args block;
  void *scratch;  // 64 bytes a column, 64-byte aligned
};

struct DescentRows {
  trilobite_descent_args span;
  void *scratch;  // 4 * 64 bytes a column
};

}  // namespace trilobite
#endif
