#!/bin/sh
# Builds the library for ARM and runs the fuzz driver on it under emulation: NEON against the portable tier.
# Needs a cross compiler and QEMU (Debian: g++-aarch64-linux-gnu, qemu-user).
#     csrc/emulate.sh [rounds] [build folder] [compiler]
set -e
source=$(cd "$(dirname "$0")" && pwd)
build=${2:-$source/../build/aarch64}
root=/usr/aarch64-linux-gnu
cmake -S "$source" -B "$build" -DTRILOBITE_FUZZ=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER="${3:-aarch64-linux-gnu-g++}" -DCMAKE_CXX_COMPILER_TARGET=aarch64-linux-gnu >/dev/null
cmake --build "$build" --parallel 2
qemu-aarch64 -L "$root" -E "LD_LIBRARY_PATH=$build:$root/lib" "$build/fuzz" "${1:-200}"
