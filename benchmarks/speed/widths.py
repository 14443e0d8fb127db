"""One token through matrices of one size and of ever wider rows: what the length of a stream is worth.

    python -m benchmarks.speed.widths --page docs/performance.md

INT3 in groups of 64, of a gigabyte each, more than caches hold; a probe of the same memory before each. With
TRILOBITE_LIBRARY another build runs it. Medians. The last line is JSON.
"""

import statistics
import time
from typing import Any

import torch

from benchmarks.lib.layers import fill
from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_machine, add_output, add_page, of_machine, parser, publish
from trilobite.formats.affine import packed_shape
from trilobite.formats.weight import PackedWeight
from trilobite.huge_pages import ones
from trilobite.kernels import ops
from trilobite.kernels.cpu import engine as cpu
from trilobite.recipe import Format

MARKER = "speed-widths"
FORMAT = Format(bits=3, group=64)
BYTES = 1 << 30
WIDTHS = (512, 768, 1408, 2048, 4096)
REPEATS = 7


def measure(width: int) -> dict[str, Any]:
    """GB/s of a product and of the probe."""
    rows = BYTES // torch.Size(packed_shape(FORMAT, 64, width)).numel() * 64
    shape = packed_shape(FORMAT, rows, width)
    memory = ones(torch.Size(shape).numel())
    fill(memory.view(shape), FORMAT)
    weight = PackedWeight(shape=(rows, width), packed=memory.view(shape))
    x = torch.randn(1, width).bfloat16()
    ops.linear(x, weight)
    probe, seconds = cpu.measure_read_bandwidth(memory, 2), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        ops.linear(x, weight)
        seconds.append(time.perf_counter() - start)
    return {"width": width, "rate": memory.numel() / statistics.median(seconds) / 1e9, "probe": probe}


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    add_page(options, MARKER)
    add_machine(options)
    add_output(options)
    args = options.parse_args()
    found = [measure(width) for width in WIDTHS]
    rows = [
        (str(r["width"]), f"{r['rate']:.1f}", f"{r['probe']:.1f}", f"{r['rate'] / r['probe']:.0%}")
        for r in found
    ]
    publish(
        table(("columns", "GB/s", "probe GB/s", "share"), rows),
        {"tier": cpu.info()["tier"], "rows": found},
        page=args.page,
        marker=of_machine(MARKER, args.machine),
        output=args.output,
    )


if __name__ == "__main__":
    main()
