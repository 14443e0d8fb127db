#!/bin/sh
# Builds the library with AddressSanitizer and UndefinedBehaviorSanitizer and runs the fuzz driver on every tier.
#     csrc/sanitize.sh [rounds] [build folder]
set -e
source=$(cd "$(dirname "$0")" && pwd)
build=${2:-$source/../build/sanitize}
cmake -S "$source" -B "$build" -DTRILOBITE_SANITIZE=ON -DTRILOBITE_FUZZ=ON >/dev/null
cmake --build "$build" --parallel 2
UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 ASAN_OPTIONS=detect_leaks=0 "$build/fuzz" "${1:-200}"
