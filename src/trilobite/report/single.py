"""The sections about one checkpoint."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from trilobite.checkpoint.evaluation import facts
from trilobite.quantize.plan.report import PARTS, SLOWEST, slowest
from trilobite.quantize.plan.statistics import SIDE
from trilobite.report import figures
from trilobite.report.html import Html, element, join, paragraph, section, table
from trilobite.report.read import Packed, Row
from trilobite.report.remedies import worst
from trilobite.report.svg import inline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABSENT = "not recorded"


def sections(packed: Packed, *, prefix: str = "a") -> Html:
    """All sections. prefix: of the ids of figures."""

    def figure(name: str, caption: str, draw: Callable[[], "Figure"]) -> Html:
        return inline(draw(), f"{prefix}-{name}", caption)

    return join(
        [
            section("What was done", *_done(packed, figure)),
            *_planned(packed),
            section("Where the error is", *_errors(packed, figure)),
            section("Why it is there", *_reasons(packed, figure)),
            section("What would mend the worst", _worst(packed)),
            section("How MiLo's rounds went", _convergence(packed, figure)),
            section("Calibration", _calibration(packed, figure)),
            section("What it took", _times(packed)),
            section("What was measured", *_measured(packed)),
        ]
    )


def heading(packed: Packed) -> Html:
    """What this checkpoint is, in two lines."""
    head, made = packed.head, packed.made
    ranks = f", ranks {head['rank']}" if head["rank"] else ""
    return join(
        [
            paragraph(
                f"{head['source']} packed with ",
                element("code", packed.recipe),
                f"{ranks}, format {head['format_version']}",
            ),
            paragraph(
                element("strong", f"{made.parameters:,}"),
                " parameters in ",
                element("strong", f"{(made.bytes_on_disk or 0) / 1e6:,.2f} MB"),
                f": {made.bits_per_weight:.3f} bits per weight counting every file of the folder, "
                f"{made.tensor_bytes * 8 / max(1, made.parameters):.3f} in tensors.",
            ),
        ]
    )


Draw = Callable[[str, str, Callable[[], "Figure"]], Html]


def _done(packed: Packed, figure: Draw) -> Iterator[Html]:
    methods: dict[str, set[str]] = {}
    for row in packed.quantized:
        methods.setdefault(row["role"], set()).add(row["method"])
    yield table(
        ("role", "format", "method", "tensors", "parameters", "bytes", "bits/weight", "rank", "error"),
        [
            (
                r.role,
                ", ".join(f"{name} ×{n}" if len(r.formats) > 1 else name for name, n in r.formats.items()),
                ", ".join(sorted(methods.get(r.role, ()))),
                f"{r.tensors:,}",
                f"{r.parameters:,}",
                f"{r.bytes:,}",
                f"{r.bits_per_weight:.3f}",
                f"{r.rank:.1f}" if r.rank else "",
                number(r.error),
            )
            for r in packed.made.roles
        ],
        left=3,
    )
    yield paragraph(
        "Error is |W − W_q| / |W| in the Frobenius norm, the mean over a role's matrices; bits count scales, "
        "offsets and compensators."
    )

    def draw() -> "Figure":
        made = figures.new_figure(10, 1.6 + 0.32 * max(len(packed.made.roles), len(packed.accounts)))
        left, right = made.subplots(1, 2)
        figures.bytes_by_role(left, packed)
        figures.bits_by_part(right, packed)
        return made

    yield figure("bytes", "Bytes of each role, and what the bits of quantized matrices are for.", draw)
    parts = [part for part in PARTS if any(a.bits[part] for a in packed.accounts)]
    yield table(
        ("bits per weight", "format", *parts, "total"),
        [
            (a.role, a.format, *(number(a.bits[p]) if a.bits[p] else "" for p in parts), number(a.total))
            for a in packed.accounts
        ],
        left=2,
    )
    yield table(
        ("kept in 16 bit", "because", "tensors", "parameters"),
        [(role, why, f"{tensors:,}", f"{numel:,}") for role, why, tensors, numel in packed.made.kept],
        left=2,
    )


def _planned(packed: Packed) -> Iterator[Html]:
    """Why each part got what it got; nothing where a recipe was given."""
    planner = packed.planner
    if planner is None:
        return
    body = table(
        (
            "role",
            "part",
            "format",
            "bits/weight",
            "bytes",
            "predicted loss",
            "a step more costs",
            "and saves",
        ),
        [
            (
                p.role,
                p.part,
                p.formats,
                f"{p.bits:.3f}",
                f"{p.nbytes:,}",
                number(p.loss),
                f"{p.more_bytes:,}" if p.more_bytes else "",
                number(p.less_loss) if p.more_bytes else "",
            )
            for p in planner.parts
        ],
        left=3,
    )
    note = paragraph(
        "Asked for ",
        element("code", planner.goal),
        f": {planner.nbytes:,} bytes that count, of {planner.least:,} to {planner.most:,} that are possible, with a "
        f"predicted loss of {number(planner.loss)}. Loss is the sensitivity of a part, in KL divergence, times its "
        "normalized error, as measured on a sample of rows; a byte goes where it saves most.",
    )
    yield section("Why each part got what it got", body, note)


def _errors(packed: Packed, figure: Draw) -> Iterator[Html]:
    rows = [row for row in packed.quantized if "error" in row and "layer" in row]
    if not rows:
        yield paragraph(f"Errors of layers: {ABSENT}.")
        return
    height = figures.map_height(rows)

    def draw() -> "Figure":
        made = figures.new_figure(10 if len(maps) > 1 else 6, height)
        for axes, (title, value) in zip(made.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
            figures.layer_map(axes, rows, value, title)
        return made

    maps = [("error", _of("error")), *_given(rows)]
    yield figure("layers", f"{_list([m[0] for m in maps])} of every matrix; experts by their mean.", draw)
    if any("expert" in row for row in rows):

        def experts() -> "Figure":
            made = figures.new_figure(10, height)
            figures.expert_map(made.subplots(), rows, _of("error"), "error")
            return made

        yield figure("experts", "Error of every expert, the mean of its matrices.", experts)


def _given(rows: Sequence[Row]) -> list[tuple[str, figures.Value]]:
    """What matrices were given unlike others: ranks and bits, where they differ."""
    return [
        (name, value)
        for name, value in (("rank", _of("rank")), ("bits per weight", _bits))
        if len({value(row) for row in rows}) > 1
    ]


def _reasons(packed: Packed, figure: Draw) -> Iterator[Html]:
    rows = [row for row in packed.quantized if "kurtosis" in row and "error" in row]
    roles = list(dict.fromkeys(row["role"] for row in packed.quantized))
    by_role = []
    for role in roles:
        of_role = [row for row in rows if row["role"] == role]
        values = [row["kurtosis"] for row in of_role]
        shares = [100 * row["residual_share"] for row in of_role if "residual_share" in row]
        share = f"{statistics.median(shares):.0f} %" if shares else ABSENT
        by_role.append((role, *_spread(values), share))
    yield table(("role", "kurtosis, least", "median", "most", "residual rank, median"), by_role)
    yield paragraph(
        "Excess kurtosis is 0 for a normal distribution and more for outliers, which scales must stretch to. The "
        "residual rank counts singular values of what INT3 rounding loses that are below half of the largest, here as a "
        f"share of min(N, K), of {SIDE} rows or columns: few mean a flat residual, of which a low rank takes little.",
    )
    if rows:

        def draw() -> "Figure":
            made = figures.new_figure(10, 3.6)
            left, right = made.subplots(1, 2)
            ranked = any(row["rank"] for row in rows)
            given, what = (_of("rank"), "rank") if ranked else (_bits, "bits per weight")
            figures.why(left, rows, given, what)
            layered = [row for row in rows if "layer" in row]
            if layered:
                figures.layer_map(right, layered, _of("kurtosis"), "excess kurtosis")
            return made

        yield figure("why", "Kurtosis and error of every matrix, and what it was given.", draw)


def _spread(values: Sequence[float]) -> tuple[str, str, str]:
    """Least, median and most."""
    if not values:
        return ABSENT, "", ""
    return number(min(values), 2), number(statistics.median(values), 2), number(max(values), 2)


def _worst(packed: Packed) -> Html:
    found = worst(packed.rows)
    if not found:
        return paragraph(f"Errors: {ABSENT}.")
    rows = [
        (
            element("code", w.row["name"]),
            join(w.remedies, "; "),
            w.row["format"],
            w.row["rank"] or "",
            number(w.row["error"]),
            number(w.typical),
            number(w.row.get("kurtosis"), 2),
        )
        for w in found
    ]
    columns = ("matrix", "what would mend it", "format", "rank", "error", "typical", "kurtosis")
    body = table(columns, rows, left=2)
    note = "Typical is the median of the same role in the same format. A rule of a recipe changes single matrices: "
    example = f"{{names: '{found[0].row['name']}', format: int4-g64}}"
    return join([body, paragraph(note, element("code", example), ".")])


def _convergence(packed: Packed, figure: Draw) -> Html:
    rows = [row for row in packed.quantized if row.get("errors")]
    if not rows:
        compensated = any(row.get("iterations") for row in packed.quantized)
        return paragraph(f"Rounds: {ABSENT}." if compensated else "No matrix was compensated in rounds.")

    def draw() -> "Figure":
        made = figures.new_figure(7, 3.2)
        figures.convergence(made.subplots(), rows)
        return made

    caption = (
        "Error after every round, compensators not yet rounded: medians, and where four of five matrices lie."
    )
    return figure("rounds", caption, draw)


def _calibration(packed: Packed, figure: Draw) -> Html:
    rows = [row for row in packed.quantized if "tokens" in row]
    if not rows:
        return paragraph("None: no method of this recipe works on activations.")
    routed = [row for row in rows if "expert" in row and "layer" in row]
    few = sum(1 for row in rows if float(row.get("own", 1.0 if row["tokens"] else 0.0)) < 1)
    parts = [
        paragraph(
            f"{len(rows)} matrices were calibrated, on {min(r['tokens'] for r in rows):,} to "
            f"{max(r['tokens'] for r in rows):,} tokens; for {few} of them the Hessians of other experts, or none, "
            "stood in for a part of their own."
        )
    ]
    if routed:

        def draw() -> "Figure":
            made = figures.new_figure(10, figures.map_height(routed))
            figures.expert_map(made.subplots(), routed, _of("tokens"), "calibration tokens")
            return made

        parts.append(figure("tokens", "Tokens that calibrated every expert.", draw))
    return join(parts)


def _times(packed: Packed) -> Html:
    if not packed.seconds:
        return paragraph(f"Seconds of each tensor: {ABSENT}.")
    by_role: dict[str, float] = {}
    for row in packed.rows:
        by_role[row["role"]] = by_role.get(row["role"], 0.0) + packed.seconds.get(row["name"], 0.0)
    records = {name: {"seconds": seconds} for name, seconds in packed.seconds.items()}
    total = sum(by_role.values())
    return join(
        [
            paragraph(f"{total:,.1f} s of work in all, side by side on the cores that there were."),
            table(("role", "seconds"), [(role, f"{s:,.2f}") for role, s in by_role.items()]),
            table(
                (f"slowest {SLOWEST} tensors", "seconds"),
                [(element("code", name), f"{s:,.2f}") for name, s in slowest(records)],
            ),
        ]
    )


def _measured(packed: Packed) -> Iterator[Html]:
    if not packed.measured:
        yield paragraph(
            f"Nothing yet: {ABSENT}. ", element("code", "trilobite eval PACKED --save"), " keeps it."
        )
        return
    yield table(
        ("on", "what", "value", "±"),
        [
            (fact.on, fact.what, number(fact.value, 5) or "not finite", number(fact.error))
            for entry in packed.measured
            for fact in facts(entry)
        ],
        left=2,
    )


def number(value: object, digits: int = 4) -> str:
    """A number, or nothing."""
    return f"{value:.{digits}f}" if isinstance(value, int | float) else ""


def _of(key: str) -> figures.Value:
    return lambda row: row.get(key)


def _bits(row: Row) -> float:
    n, k = row["shape"]
    return 8 * int(row["bytes"]) / max(1, int(n) * int(k))


def _list(names: Sequence[str]) -> str:
    text = ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]
    return text[0].upper() + text[1:]
