// Memory for one call: bump allocation from blocks that are kept between calls, so decoding allocates nothing.
#ifndef TRILOBITE_WORKSPACE_H
#define TRILOBITE_WORKSPACE_H
#include <vector>

#include "common.h"

namespace trilobite {

class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace &) = delete;
  Workspace &operator=(const Workspace &) = delete;
  ~Workspace();

  // `count` elements at a multiple of 64 bytes, valid until reset(). Not initialised.
  template <typename T> T *get(int64_t count) { return (T *)bytes(count * (int64_t)sizeof(T)); }
  // In the form that a tier wants; their slack is zeroed.
  Digits digits(const Tier &t, const Activations &a);
  // Forget everything handed out. Keeps at most a decode-sized amount of memory.
  void reset();

 private:
  void *bytes(int64_t size);
  struct Piece {
    uint8_t *data;
    int64_t size;
  };
  std::vector<Piece> pieces_;
  int64_t used_ = 0;
};

// Of the calling thread, for what all threads of a call share; in use until the call returns.
Workspace &call_workspace();
// Of the calling thread, for what it alone uses while it works for a call.
Workspace &worker_workspace();

}  // namespace trilobite
#endif
