#!/bin/sh
# Builds the library with AddressSanitizer and UndefinedBehaviorSanitizer and runs the fuzz driver on every tier; its threads
# with ThreadSanitizer.
#     csrc/sanitize.sh [rounds] [build folder]
set -e
source=$(cd "$(dirname "$0")" && pwd)
build=${2:-$source/../build/sanitize}
evex=OFF  # the tier of AVX-VNNI runs on processors with AVX-512's VNNI, too, in their encoding
if grep -qs avx512_vnni /proc/cpuinfo; then evex=ON; fi
cmake -S "$source" -B "$build" -DTRILOBITE_SANITIZE=ON -DTRILOBITE_FUZZ=ON -DTRILOBITE_EVEX=$evex >/dev/null
cmake --build "$build" --parallel 2
UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 ASAN_OPTIONS=detect_leaks=0 "$build/fuzz" "${1:-200}"
TRILOBITE_THREADS=5 "$build/fuzz_pool" "$((${1:-200} * 50))"
