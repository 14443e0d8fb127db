"""What does each codebook lose on a Gaussian source? Mean squared error per weight, next to the bound of Shannon.

    python -m benchmarks.quality.codebooks [--vectors 200000] [--page docs/results.md]

Incoherence processing makes weights look like such a source, so this is QuIP#'s Figure 3 for what is built here. For
every lattice format: the error at the scale of formats/lattice.py, at the best scale of a sweep, and for comparison
that of integers in groups of 64, whose scales count as bits. No code of b bits a weight has a lower error than 2^(-2b).

Prints the bound first, then a markdown table, then one line of JSON.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_page, parser, publish
from trilobite.formats.lattice import DIM, RHO, nearest
from trilobite.quantize.methods.registry import METHODS
from trilobite.recipe import Format, LatticeFormat, parse_format

LATTICES = ("e8p-1", "e8p-2", "grid-2", "e8p-3", "grid-3", "e8p-4", "grid-4")
INTEGERS = [f"int{bits}-{tail}" for bits in (2, 3, 4) for tail in ("g64", "g128")]
RHOS = [0.80 + 0.02 * i for i in range(16)]
RATIOS = {3: [1.7 + 0.05 * i for i in range(12)], 4: [2.8 + 0.1 * i for i in range(16)]}
PUBLISHED = {"e8p-2": 0.0909, "e8p-3": 0.0291, "int2-g64": 0.105, "int3-g64": 0.0274}
"""Section F.5 of QuIP# at its scales, and earlier measurements of `search` (tests/quantize/methods/test_methods.py)."""


def error(x: Tensor, fmt: LatticeFormat, rho: float, ratio: float) -> float:
    """Mean squared error on vectors x [M, 8] of unit variance."""
    found = nearest(x * rho, fmt, ratio)[1]
    return float((found / rho - x).square().mean(dtype=torch.float64))


def measure_lattice(x: Tensor, name: str) -> dict[str, Any]:
    """The error at the scales in use and at the best ones of a sweep over a part of the vectors."""
    fmt = LatticeFormat.parse(name)
    rho, ratio = RHO[fmt.codebook, fmt.bits]
    part = x[: len(x) // 10]
    grids = [rho * r for r in RHOS]
    ratios = RATIOS[fmt.bits] if fmt.two_stages else [ratio]
    best = min((error(part, fmt, r, q), r, q) for r in grids for q in ratios)
    return {
        "format": name,
        "bits": float(fmt.bits),
        "mse": error(x, fmt, rho, ratio),
        "scale": [round(rho, 3), round(ratio, 3)] if fmt.two_stages else [round(rho, 3)],
        "best": error(x, fmt, *best[1:]),
        "best_scale": [round(v, 3) for v in (best[1:] if fmt.two_stages else best[1:2])],
    }


def measure_integers(x: Tensor, name: str) -> dict[str, Any]:
    """`search` on a matrix of the same numbers; two fp16 numbers a group count."""
    fmt = parse_format(name)
    assert isinstance(fmt, Format)
    relative = METHODS["search"](x.reshape(-1, 1024), fmt).error
    mse = relative**2 * float(x.square().mean(dtype=torch.float64))
    return {"format": f"{name}, search", "bits": fmt.bits + 32 / fmt.group, "mse": mse}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table, from the fewest bits to the most."""
    lines = []
    for row in sorted(rows, key=lambda r: (r["bits"], r["mse"])):
        bound = 2.0 ** (-2 * row["bits"])
        best, scale = row.get("best"), " / ".join(map(str, row.get("best_scale", [])))
        lines.append(
            (
                row["format"],
                f"{row['bits']:.2f}",
                f"{row['mse']:.4f}",
                " / ".join(map(str, row.get("scale", []))),
                "" if best is None else f"{best:.4f}",
                scale,
                f"{bound:.4f}",
                f"{min(row['mse'], best or 9) / bound:.2f}",
            )
        )
    header = (
        "format",
        "bits/weight",
        "MSE",
        "scale",
        "MSE, best scale",
        "best scale",
        "bound 2^-2b",
        "best/bound",
    )
    return table(header, lines)


def main() -> None:
    """Measure, print, and put the table on its page."""
    options = parser(__doc__)
    options.add_argument("--vectors", type=int, default=200_064, help="vectors of eight weights")
    add_page(options, "codebooks")
    arguments = options.parse_args()
    count = max(1280, arguments.vectors // 128 * 128)
    print(
        "bound: no code of b bits has a lower error than 2^-2b: "
        + ", ".join(f"{2 ** (-2 * b):.4f}" for b in (1, 2, 3, 4))
        + " for 1 to 4"
    )
    x = torch.randn(count, DIM, generator=torch.Generator().manual_seed(0))
    rows = [measure_lattice(x, name) for name in LATTICES] + [measure_integers(x, name) for name in INTEGERS]
    summary = {"benchmark": "codebooks", "vectors": count, "rows": rows}
    title = f"{count:,} vectors of eight numbers:"
    publish(markdown(rows), summary, page=arguments.page, marker="codebooks", title=title)


if __name__ == "__main__":
    main()
