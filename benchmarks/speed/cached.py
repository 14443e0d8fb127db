"""One token by one core through a matrix that its caches hold: what arithmetic allows, by instruction set.

    python -m benchmarks.speed.cached --page docs/performance.md

A matrix of 4096 x 4096, of 4 to 9 MB, in a cache of the third level where there is one of that size, beside a probe that
reads the same bytes. Where memory gives a core more than this, arithmetic bounds a token. With TRILOBITE_LIBRARY another
build runs it, with `--tokens 4` some meet each decoded step. Medians. The last line is JSON.
"""

import statistics
import time

import torch

from benchmarks.lib.layers import fill
from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_machine, add_output, add_page, of_machine, parser, publish
from benchmarks.lib.tiers import in_turn
from trilobite.formats.affine import packed_shape
from trilobite.formats.weight import PackedWeight
from trilobite.huge_pages import ones
from trilobite.kernels import ops
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.layer import CpuSettings
from trilobite.recipe import Format

MARKER = "speed-cached"
FORMATS = tuple(Format(bits=bits, group=64) for bits in (2, 3, 4))
SHAPE = (4096, 4096)
REPEATS = 100


def matrix(fmt: Format) -> PackedWeight:
    """Random codes with ordinary scales."""
    shape = packed_shape(fmt, *SHAPE)
    packed = ones(torch.Size(shape).numel()).view(shape)
    fill(packed, fmt)
    return PackedWeight(shape=SHAPE, packed=packed)


def measure(weight: PackedWeight, mode: str, tokens: int, repeats: int) -> float:
    """GB/s of a product: bytes of the matrix, once for all tokens."""
    settings, seconds = CpuSettings(mode, 1), []
    x = torch.randn(tokens, SHAPE[1]).bfloat16()
    for _ in range(repeats):
        start = time.perf_counter()
        ops.linear(x, weight, settings=settings)
        seconds.append(time.perf_counter() - start)
    return weight.packed.nbytes / statistics.median(seconds) / 1e9


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=1)
    options.add_argument("--repeats", type=int, default=REPEATS)
    add_page(options, MARKER)
    add_machine(options)
    add_output(options)
    args = options.parse_args()
    torch.manual_seed(0)
    weights = [matrix(fmt) for fmt in FORMATS]
    probe = statistics.median(cpu.measure_read_bandwidth(w.packed, args.repeats, 1) for w in weights)
    print(f"one core reads {probe:.1f} GB/s of them", flush=True)
    rows, found = [], []
    for tier in in_turn():
        for mode in ("exact", "int8"):
            rates = [measure(w, mode, args.tokens, args.repeats) for w in weights]
            rows.append((tier, mode, *(f"{rate:.1f}" for rate in rates)))
            found += [
                {"tier": tier, "mode": mode, "format": str(fmt), "rate": rate}
                for fmt, rate in zip(FORMATS, rates, strict=True)
            ]
            print("  ".join(rows[-1]), flush=True)
    header = ("GB/s of a core", "activations", *map(str, FORMATS))
    publish(
        table(header, rows),
        {"probe": probe, "rows": found},
        page=args.page,
        marker=of_machine(MARKER, args.machine),
        output=args.output,
    )


if __name__ == "__main__":
    main()
