#!/bin/sh
# Builds the library with Clang, which Macs have, and runs the fuzz driver: for this processor, and, where emulate.sh has what
# it needs, for ARM.
#     csrc/clang.sh [rounds] [build folder]
set -e
source=$(cd "$(dirname "$0")" && pwd)
build=${2:-$source/../build/clang}
cmake -S "$source" -B "$build" -DTRILOBITE_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++ >/dev/null
cmake --build "$build" --parallel 2
"$build/fuzz" "${1:-200}"
if command -v qemu-aarch64 >/dev/null && [ -d /usr/aarch64-linux-gnu/include/c++ ]; then
  "$source/emulate.sh" "${1:-200}" "$build-aarch64" clang++
fi
