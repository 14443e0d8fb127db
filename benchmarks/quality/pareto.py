"""What a byte buys: bits of a quantized weight against KL divergence, for every recipe that docs/results.md measures.

    python -m benchmarks.quality.pareto [--page docs/results.md] [--figure docs/figures/pareto.png]

Draws the tables that `benchmarks.quality.recipes` left between its markers on the page, and so measures nothing itself:
one panel a model, data-free and calibrated recipes apart, the front of each as a line. Needs matplotlib (extra
`plot`). The last line is JSON: the recipes on each front.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.markdown import cells, fragment
from benchmarks.lib.script import parser

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"quality": "without data", "calibrated": "calibrated on a text"}
"""What marks the tables, and what is said of their recipes."""
WIDEST = 5.0
"""Bits from which nothing is drawn: 8 bits cost nothing that could be seen beside the others."""
FREE_OF_DATA = re.compile(r"^(rtn|hqq|search|int\d|16 bit)|free|^milo-\S+ \((hqq|search)\)")
"""Rows of the calibrated tables that stand there for comparison; those with 16 in their names have no body of bits."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A recipe. bits: of a quantized weight, the column `body`    kl: nats per token."""

    recipe: str
    bits: float
    kl: float


def read(page: str, kind: str) -> Iterator[tuple[str, list[Point]]]:
    """(model, its points) for every table of a kind. Raises SystemExit for a page without any."""
    models = re.findall(rf"<!-- begin {kind}-(tiny-\S+) -->", page)
    if not models:
        raise SystemExit(f"error: the page has no table of benchmarks.quality.recipes ({kind}-MODEL)")
    for model in models:
        header, *rows = cells(fragment(page, f"{kind}-{model}"))
        columns = [header.index(name) for name in ("recipe", "body", "KL")]
        yield (
            model,
            [
                Point(recipe=name, bits=float(bits), kl=float(kl))
                for name, bits, kl in ([row[i] for i in columns] for row in rows)
                if "16" not in name and (kind == "quality" or not FREE_OF_DATA.search(name))
            ],
        )


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in bits and in KL."""
    best: list[Point] = []
    for p in sorted(points, key=lambda p: (p.bits, p.kl)):
        if not best or p.kl < best[-1].kl:
            best.append(p)
    return best


def draw(tables: dict[str, dict[str, list[Point]]], path: Path) -> None:
    """One panel a model; KL is logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(tables), figsize=(6 * len(tables), 5), squeeze=False)
    for panel, (model, kinds) in zip(axes[0], tables.items(), strict=True):
        for color, (kind, points) in zip(("tab:blue", "tab:orange"), kinds.items(), strict=False):
            points = [p for p in points if p.bits < WIDEST]
            panel.scatter([p.bits for p in points], [p.kl for p in points], s=14, color=color, alpha=0.5)
            best = front(points)
            panel.plot([p.bits for p in best], [p.kl for p in best], color=color, label=KINDS[kind])
            for p in best:
                panel.annotate(
                    p.recipe,
                    (p.bits, p.kl),
                    fontsize=7,
                    rotation=40,
                    xytext=(2, 3),
                    textcoords="offset points",
                )
        panel.set(
            title=model, xlabel="bits of a quantized weight, all counted", yscale="log", xlim=(1.9, WIDEST)
        )
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("KL divergence from 16 bit, nats per token")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Read the page, draw, print the fronts."""
    options = parser(__doc__)
    options.add_argument("--page", type=Path, default=ROOT / "docs/results.md")
    options.add_argument("--figure", type=Path, default=ROOT / "docs/figures/pareto.png")
    arguments = options.parse_args()
    page = arguments.page.read_text(encoding="utf-8")
    tables: dict[str, dict[str, list[Point]]] = {}
    for kind in KINDS:
        for model, points in read(page, kind):
            tables.setdefault(model, {})[kind] = points
    draw(tables, arguments.figure)
    fronts: dict[str, Any] = {
        model: {kind: [p.recipe for p in front(points)] for kind, points in kinds.items()}
        for model, kinds in tables.items()
    }
    print(f"wrote {arguments.figure}")
    print(json.dumps({"benchmark": "pareto", "fronts": fronts}))


if __name__ == "__main__":
    main()
