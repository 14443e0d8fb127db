"""The figures of one checkpoint, each drawn from its rows. All are made inside of `svg.drawing()`."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trilobite.report.read import Packed, Row, label
from trilobite.report.svg import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from trilobite.checkpoint.summary import RoleSummary
    from trilobite.quantize.plan.statistics import RoleSample
    from trilobite.recipe import Role

ROLE_COLOURS = {
    "attention": "#3b82c4",
    "expert": "#d9822b",
    "shared_expert": "#2a9d6f",
    "dense_mlp": "#8a63d2",
    "head": "#c4453c",
    "embedding": "#7f8c8d",
    "router": "#b8a12e",
    "norm": "#aab2b9",
}
Layer = tuple[str, int]
"""Stack, "" where there is but one, and number."""
STACKS = ("encoder", "decoder")
MOST_TICKS = 16

Value = Callable[[Row], float | None]


def new_figure(width: float, height: float) -> "Figure":
    """A figure of so many inches, laid out by itself."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def bytes_by_role(axes: "Axes", packed: Packed) -> None:
    """A bar for every role: its bytes, with bits per weight."""
    roles = list(reversed(packed.made.roles))
    axes.barh(
        [r.role for r in roles],
        [r.bytes / 1e6 for r in roles],
        color=[ROLE_COLOURS.get(r.role, "#888888") for r in roles],
    )
    for i, role in enumerate(roles):
        axes.annotate(
            f" {role.bits_per_weight:.2f} bits", (role.bytes / 1e6, i), va="center", fontsize="small"
        )
    axes.margins(x=0.18)
    axes.set(xlabel="MB", title="bytes by role")


def bits_by_part(axes: "Axes", packed: Packed) -> None:
    """Bits per weight of what is quantized, by what they are for."""
    from trilobite.quantize.plan.report import PARTS

    accounts = list(reversed(packed.accounts))
    names = [f"{a.role} {a.format}" for a in accounts]
    left = [0.0] * len(accounts)
    for part, colour in zip(PARTS, ("#3b82c4", "#2a9d6f", "#b8a12e", "#d9822b", "#aab2b9"), strict=True):
        bits = [a.bits[part] for a in accounts]
        if any(bits):
            axes.barh(names, bits, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, bits, strict=True)]
    axes.set(xlabel="bits per weight", title="what the bits are for")
    axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=5)


def layer_map(axes: "Axes", rows: Sequence[Row], value: Value, title: str) -> None:
    """Layer by matrix; experts count by their mean."""
    cells: dict[tuple[Layer, str], list[float]] = {}
    for row in rows:
        found = value(row)
        if "layer" in row and found is not None:
            cells.setdefault((_layer(row), label(row["name"])), []).append(found)
    columns = list(dict.fromkeys(name for _, name in cells))
    layers = sorted({layer for layer, _ in cells}, key=_order)
    grid = [[_mean(cells.get((layer, c), [])) for c in columns] for layer in layers]
    _heat(axes, grid, title)
    _ticks(axes.xaxis, [".".join(c.split(".")[-2:]) for c in columns], most=len(columns))
    axes.tick_params(axis="x", labelrotation=55)
    for tick in axes.get_xticklabels():
        tick.set_horizontalalignment("right")
        tick.set_rotation_mode("anchor")
    _ticks(axes.yaxis, [f"{stack} {number}".strip() for stack, number in layers])
    axes.set_ylabel("layer")


def expert_map(axes: "Axes", rows: Sequence[Row], value: Value, title: str) -> None:
    """Layer by expert: the mean of its matrices."""
    cells: dict[tuple[Layer, int], list[float]] = {}
    for row in rows:
        found = value(row)
        if "layer" in row and "expert" in row and found is not None:
            cells.setdefault((_layer(row), row["expert"]), []).append(found)
    layers, experts = sorted({k[0] for k in cells}, key=_order), range(1 + max(k[1] for k in cells))
    grid = [[_mean(cells.get((layer, e), [])) for e in experts] for layer in layers]
    _heat(axes, grid, title)
    _ticks(axes.xaxis, list(experts))
    _ticks(axes.yaxis, [f"{stack} {number}".strip() for stack, number in layers])
    axes.set(xlabel="expert", ylabel="layer")


def why(axes: "Axes", rows: Sequence[Row], given: Value, what: str) -> None:
    """Kurtosis against error: a point for every matrix, larger where it was given more (rank or bits)."""
    known = [r for r in rows if "kurtosis" in r and "error" in r]
    most = max((given(r) or 0.0 for r in known), default=0.0) or 1.0
    for role in dict.fromkeys(r["role"] for r in known):
        of_role = [r for r in known if r["role"] == role]
        axes.scatter(
            [r["kurtosis"] for r in of_role],
            [r["error"] for r in of_role],
            s=[8 + 60 * (given(r) or 0.0) / most for r in of_role],
            color=ROLE_COLOURS.get(role, "#888888"),
            alpha=0.55,
            linewidths=0,
            label=role,
        )
    if max((r["kurtosis"] for r in known), default=0.0) > 20:
        axes.set_xscale("symlog")
    axes.set(xlabel="excess kurtosis", ylabel="error", title=f"error and outliers; size: {what}")
    axes.grid(alpha=0.15)
    axes.legend(fontsize="small")


def convergence(axes: "Axes", rows: Sequence[Row]) -> None:
    """Error after each round of MiLo: the median of a role, and where four of five matrices lie."""
    for role in dict.fromkeys(r["role"] for r in rows):
        curves = [r["errors"] for r in rows if r["role"] == role]
        length = max(map(len, curves))
        # Who stopped early stays where it was.
        filled = [[*curve, *[curve[-1]] * (length - len(curve))] for curve in curves]
        columns = [sorted(column) for column in zip(*filled, strict=True)]
        rounds, colour = range(1, length + 1), ROLE_COLOURS.get(role, "#888888")
        axes.plot(rounds, [statistics.median(c) for c in columns], color=colour, marker=".", label=role)
        low, high = ([c[round(share * (len(c) - 1))] for c in columns] for share in (0.1, 0.9))
        axes.fill_between(rounds, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.set(xlabel="round", ylabel="error", title="MiLo's rounds")
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.15)
    axes.legend(fontsize="small")


def overview(packed: Packed) -> "Figure":
    """What `inspect --plot` draws: bytes by role, and the error layer by matrix."""
    figure = new_figure(10, map_height(packed.quantized) + 0.6)
    left, right = figure.subplots(1, 2)
    bytes_by_role(left, packed)
    if any("error" in row and "layer" in row for row in packed.quantized):
        layer_map(right, packed.quantized, lambda row: row.get("error"), "error")
    else:
        right.set_axis_off()
    figure.suptitle(f"{packed.name}: {packed.head['source']} with {packed.recipe}", fontsize="medium")
    return figure


def original(title: str, rows: "Sequence[RoleSummary]", sampled: "Mapping[Role, RoleSample]") -> "Figure":
    """What `inspect --plot` draws of an original: bytes by role; kurtosis and residual rank of the samples."""
    figure = new_figure(10, 3.2)
    left, middle, right = figure.subplots(1, 3)
    names = [row.role.value for row in reversed(rows)]
    colours = [ROLE_COLOURS.get(name, "#888888") for name in names]
    left.barh(names, [row.bytes / 1e6 for row in reversed(rows)], color=colours)
    left.set(xlabel="MB", title="bytes by role")
    roles = [role.value for role in sampled]
    colours = [ROLE_COLOURS.get(name, "#888888") for name in roles]
    middle.bar(roles, [s.kurtosis for s in sampled.values()], color=colours)
    middle.set_title("excess kurtosis")
    right.bar(roles, [100 * s.share for s in sampled.values()], color=colours)
    right.set_title("residual rank, % of min(N, K)")
    figure.suptitle(title, fontsize="medium")
    return figure


def map_height(rows: Sequence[Row]) -> float:
    """Inches of a heat map, by its layers."""
    layers = len({_layer(row) for row in rows if "layer" in row})
    return min(9.0, 2.2 + 0.16 * layers)


def _heat(axes: "Axes", grid: list[list[float]], title: str) -> None:
    image = axes.imshow(grid, aspect="auto", interpolation="nearest")
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.8)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize="small", color=INK)
    axes.set_title(title)
    for side in axes.spines.values():
        side.set_visible(False)


def _layer(row: Row) -> Layer:
    """Encoder and decoder both count from 0."""
    return row["stack"] if row.get("stack") in STACKS else "", row["layer"]


def _order(layer: Layer) -> tuple[bool, int]:
    """The encoder comes first."""
    return layer[0] == STACKS[1], layer[1]


def _ticks(axis: Any, names: Sequence[object], most: int = MOST_TICKS) -> None:
    """Names at their places, as many as can be read."""
    step = -(-len(names) // most) if most else 1
    places = list(range(0, len(names), max(1, step)))
    axis.set_ticks(places, [str(names[i]) for i in places], fontsize="small")


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
