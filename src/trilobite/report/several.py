"""The sections that set checkpoints side by side: bytes against what they cost, and in what they differ."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trilobite.checkpoint.evaluation import facts, measures
from trilobite.report import figures
from trilobite.report.html import Html, join, paragraph, section, table
from trilobite.report.read import Packed
from trilobite.report.single import number
from trilobite.report.svg import inline

MOST_MEASURES = 3
COLOUR, BASE = "#d9822b", "#3b82c4"


class Axis(NamedTuple):
    """A number of a measurement as a plot shows it. key: its name    best: the function that picks the better of two."""

    key: str
    title: str
    best: Callable[[Iterable[float]], float] = min


AXES = (
    (Axis("perplexity", "perplexity"), Axis("kl", "KL to the original, nats")),
    (Axis("bleu", "BLEU", max), Axis("chrf", "chrF", max)),
)
"""Two plots side by side: of a text that was read, of sentences that were translated."""
Point = tuple[int, float, str]
"""Bytes, value, name of the checkpoint."""


def sections(several: Sequence[Packed]) -> Html:
    """Pareto plots and the table of differences."""
    return join(
        [
            section("Bytes and what they cost", *_pareto(several)),
            section("Differences", _differences(several), _roles(several)),
        ]
    )


def _pareto(several: Sequence[Packed]) -> Iterator[Html]:
    shared = [(pair, on, found) for pair in AXES for on, found in _measured(several, pair[0].key).items()]
    shared = sorted((m for m in shared if len(m[2]) > 1), key=lambda m: -len(m[2]))
    if not shared:
        yield paragraph(
            "Not recorded: no two of these were measured on the same windows of the same text. "
            "`trilobite eval PACKED --text FILE --reference ORIGINAL --save` of each keeps it."
        )
    for i, (pair, on, found) in enumerate(shared[:MOST_MEASURES]):
        figure = figures.new_figure(10, 3.8)
        for axes, axis in zip(figure.subplots(1, 2), pair, strict=True):
            points = [
                (p.made.bytes_on_disk or 0, e[axis.key], p.name)
                for p, e in found
                if isinstance(e.get(axis.key), float)
            ]
            _front(axes, points, axis.best)
            axes.set(xlabel="MB on disk", ylabel=axis.title)
            base = [b for _, e in found if isinstance(b := e.get(f"reference_{axis.key}"), float)]
            if base:
                axes.axhline(base[0], color=BASE, linestyle="--", linewidth=1)
                axes.annotate(
                    "original", (1, base[0]), xycoords=("axes fraction", "data"), color=BASE, ha="right"
                )
        yield inline(figure, f"pareto{i}", f"{on}; the line joins what no other beats in both.")


def _measured(several: Sequence[Packed], key: str) -> dict[str, list[tuple[Packed, Mapping[str, Any]]]]:
    """By what was measured, and how: the checkpoints, and the numbers that have this key; only these compare."""
    by_measure: dict[str, list[tuple[Packed, Mapping[str, Any]]]] = {}
    for packed in several:
        for entry in packed.measured:
            for on, numbers in measures(entry):
                if isinstance(numbers.get(key), float):
                    by_measure.setdefault(on, []).append((packed, numbers))
    return by_measure


def _front(axes: Any, points: Sequence[Point], best: Callable[[Iterable[float]], float] = min) -> None:
    """Points with their names, and a line through those that no other beats in both."""
    if not points:
        axes.set_axis_off()
        axes.set_title("not recorded")
        return

    def beaten(point: Point) -> bool:
        others = (q for q in points if q[:2] != point[:2] and q[0] <= point[0])
        return any(best((q[1], point[1])) == q[1] for q in others)

    front = sorted(p for p in points if not beaten(p))
    axes.plot([p[0] / 1e6 for p in front], [p[1] for p in front], color=COLOUR, alpha=0.5)
    axes.scatter([p[0] / 1e6 for p in points], [p[1] for p in points], color=COLOUR)
    for nbytes, value, name in points:
        axes.annotate(
            name, (nbytes / 1e6, value), xytext=(4, 4), textcoords="offset points", fontsize="small"
        )
    axes.margins(x=0.15, y=0.12)
    axes.grid(alpha=0.15)


def _differences(several: Sequence[Packed]) -> Html:
    rows: dict[str, list[str]] = {
        "source": [p.head["source"] for p in several],
        "recipe": [p.recipe for p in several],
        "ranks": [p.head["rank"] for p in several],
        "format version": [str(p.head["format_version"]) for p in several],
        "bytes": [f"{p.made.bytes_on_disk:,}" for p in several],
        "bits per weight": [number(p.made.bits_per_weight, 3) for p in several],
        "seconds of work": [number(sum(p.seconds.values()), 1) if p.seconds else "" for p in several],
    }
    for column, packed in enumerate(several):
        for fact in (fact for entry in packed.measured for fact in facts(entry)):
            values = rows.setdefault(f"{fact.what}: {fact.on}", [""] * len(several))
            values[column] = number(fact.value, 5) or "not finite"
    differing = [(name, *values) for name, values in rows.items() if len(set(values)) > 1]
    return table(("", *(p.name for p in several)), differing)


def _roles(several: Sequence[Packed]) -> Html:
    """By role: format, bits and error in each."""
    by_role = [{r.role: r for r in p.made.roles} for p in several]
    rows = []
    for role in dict.fromkeys(name for roles in by_role for name in roles):
        cells = []
        for roles in by_role:
            found = roles.get(role)
            if found is None:
                cells.append("")
                continue
            error = f", error {found.error:.4f}" if found.error is not None else ""
            rank = f", rank {found.rank:.1f}" if found.rank else ""
            cells.append(f"{', '.join(found.formats)}: {found.bits_per_weight:.3f} bits{rank}{error}")
        if len(set(cells)) > 1:
            rows.append((role, *cells))
    return table(("role", *(p.name for p in several)), rows, left=1 + len(several))
