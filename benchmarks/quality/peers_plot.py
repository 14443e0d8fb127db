"""Ours and theirs, bits against KL divergence: a panel a model, without data of the user's above, with a text below.

    python -m benchmarks.quality.peers_plot [--page docs/results.md] [--figure docs/figures/peers.png]

Draws the tables that `benchmarks.quality.peers` left between its markers on the page, and so measures nothing itself.
Needs matplotlib (extra `plot`). Prints the KL of our rows over that of the best of theirs with at most .075 bits more.
The last line is JSON: by model and kind, our rows that one of theirs beats in bits and in KL.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.markdown import fragment, table
from benchmarks.lib.script import parser
from benchmarks.quality.pareto import ROOT, Point, front
from benchmarks.quality.peers import TITLES, read_tables

NEAR = 0.075 + 1e-9
"""Bits that one of theirs may have more than one of ours beside which it stands."""
Kinds = dict[str, list[Point]]
"""Rows by kind, ours in bold as on the page."""


def read(page: str) -> dict[str, Kinds]:
    """By model. Raises SystemExit for a page without any."""
    found: dict[str, Kinds] = {
        model: {
            kind: [Point(recipe=name, bits=float(bits), kl=float(kl)) for name, (bits, kl) in rows.items()]
            for kind, rows in read_tables(fragment(page, f"peers-{model}")).items()
        }
        for model in re.findall(r"<!-- begin peers-(tiny-\S+) -->", page)
    }
    if not found:
        raise SystemExit("error: the page has no table of benchmarks.quality.peers (peers-MODEL)")
    return found


def parted(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Ours and theirs."""
    ours = [p for p in points if p.recipe.startswith("**")]
    return ours, [p for p in points if p not in ours]


def beaten(points: Sequence[Point]) -> list[str]:
    """Those of ours on our front for which one of theirs has no more bits and no more KL."""
    ours, theirs = parted(points)
    return [
        p.recipe.strip("*") for p in front(ours) if any(t.bits <= p.bits and t.kl <= p.kl for t in theirs)
    ]


def ratios(points: Sequence[Point]) -> dict[str, str]:
    """By each of ours that has some of theirs near it or below: its KL over the least of theirs, and whose that is."""
    ours, theirs = parted(points)
    found = {}
    for p in ours:
        if near := [t for t in theirs if t.bits <= p.bits + NEAR]:
            best = min(near, key=lambda t: t.kl)
            found[p.recipe.strip("*")] = f"{p.kl / best.kl:.2f} ({best.recipe})"
    return found


def ratio_table(tables: dict[str, Kinds], kind: str) -> str:
    """A row for each of ours that has a ratio, a column for each model."""
    columns = {model: ratios(kinds[kind]) for model, kinds in tables.items() if kind in kinds}
    bits = {p.recipe.strip("*"): p.bits for kinds in tables.values() for p in kinds.get(kind, ())}
    names = sorted({name for column in columns.values() for name in column}, key=lambda name: bits[name])
    return table(
        (TITLES[kind], *columns),
        [(name, *(column.get(name, "") for column in columns.values())) for name in names],
    )


def draw(tables: dict[str, Kinds], path: Path) -> None:
    """KL is logarithmic; the rows of a front are named."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(TITLES), len(tables), figsize=(6 * len(tables), 5 * len(TITLES)), squeeze=False
    )
    for column, (model, kinds) in enumerate(tables.items()):
        for row, (kind, title) in enumerate(TITLES.items()):
            panel = axes[row][column]
            if kind not in kinds:
                panel.set_axis_off()
                continue
            for name, color, points in zip(
                ("ours", "others"), ("tab:blue", "tab:orange"), parted(kinds[kind]), strict=True
            ):
                best = front(points)
                panel.scatter([p.bits for p in points], [p.kl for p in points], s=14, color=color, alpha=0.5)
                panel.plot([p.bits for p in best], [p.kl for p in best], color=color, label=name)
                for p in best:
                    place = {"xytext": (2, 3), "textcoords": "offset points"}
                    panel.annotate(p.recipe.strip("*"), (p.bits, p.kl), fontsize=7, rotation=40, **place)
            panel.set(
                title=f"{model}\n{title}", xlabel="bits of a quantized weight, all counted", yscale="log"
            )
            panel.grid(alpha=0.3)
            panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main() -> None:
    """Read the page, draw, print what is beaten."""
    options = parser(__doc__)
    options.add_argument("--page", type=Path, default=ROOT / "docs/results.md")
    options.add_argument("--figure", type=Path, default=ROOT / "docs/figures/peers.png")
    arguments = options.parse_args()
    tables = read(arguments.page.read_text(encoding="utf-8"))
    draw(tables, arguments.figure)
    print(f"wrote {arguments.figure}")
    for kind in TITLES:
        print(f"\n{ratio_table(tables, kind)}")
    found = {
        model: {kind: beaten(points) for kind, points in kinds.items()} for model, kinds in tables.items()
    }
    print(json.dumps({"benchmark": "peers-plot", "beaten": found}))


if __name__ == "__main__":
    main()
