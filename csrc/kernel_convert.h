// The scalar conversions for translation units that belong to no tier.
#include <string.h>

#include "common.h"

namespace trilobite {
namespace {
#include "kernel/convert.h"
[[maybe_unused]] constexpr auto unused_store = store_floats;
}  // namespace
}  // namespace trilobite
