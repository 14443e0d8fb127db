"""The worst matrices of a checkpoint, and what would mend each: rules of a recipe, with what they cost."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trilobite.formats.padding import filled_up
from trilobite.formats.weight import low_rank_bytes
from trilobite.quantize.plan.ranks import weight_bytes
from trilobite.recipe import Format, Role, parse_format
from trilobite.report.read import Row

WORST = 10
FEW = 0.5
"""Share of its own Hessian below which a matrix is quantized for other experts' inputs more than for its own."""
HEAVY = 1.0
"""Excess kurtosis from which outliers are the likely reason of an error (MiLo, table 2: -0.9 to 1.6)."""
WIDER = {2: 3, 3: 4, 4: 8}


@dataclass(frozen=True, kw_only=True)
class Worst:
    """A matrix of large error. typical: median error of its role in its format    remedies: best first."""

    row: Row
    typical: float
    remedies: tuple[str, ...]


def worst(rows: Sequence[Row]) -> list[Worst]:
    """The quantized matrices of largest error, worst first. rows: of trilobite.json."""
    known = [row for row in rows if "format" in row and "error" in row]
    groups: dict[tuple[str, str], list[float]] = {}
    for row in known:
        groups.setdefault((row["role"], row["format"]), []).append(row["error"])
    chosen = sorted(known, key=lambda row: -row["error"])[:WORST]
    return [
        Worst(
            row=row,
            typical=statistics.median(groups[row["role"], row["format"]]),
            remedies=remedies(row),
        )
        for row in chosen
    ]


def remedies(row: Row) -> tuple[str, ...]:
    """What would lower the error of one matrix, cheapest first: free, then by bits per weight."""
    fmt, method, rank = parse_format(row["format"]), row.get("method", ""), row.get("rank", 0)
    n, k = filled_up((row["shape"][0], row["shape"][1]), fmt, expert=row["role"] == Role.EXPERT.value)
    free, paid = [], []
    if "tokens" in row and float(row.get("own", 1.0 if row["tokens"] else 0.0)) < FEW:
        free.append(f"its expert saw {row['tokens']} calibration tokens: more or other text, --samples")
    if method in ("rtn", "hqq", "hqq-paper"):
        free.append("--method search: the same bytes")
    if rank and row.get("kurtosis", 0.0) > HEAVY:
        free.append("a kurtosis-r rank: as many bytes in all, more of them for outliers like these")
    if fmt.bits < 8:
        more = max(16, 2 * rank)
        cost = (low_rank_bytes(row.get("compensator", "int3"), more, n, k) - _now(row)) * 8 / (n * k)
        if more < n * k // (n + k):
            paid.append((cost, f"rank {more}: {_signed(cost)} bits per weight"))
    if isinstance(fmt, Format):
        if fmt.group == 0 or fmt.group > 32:
            finer = replace(fmt, group=64 if fmt.group == 0 or fmt.group > 64 else 32)
            if k % finer.group == 0:
                cost = (weight_bytes(finer, n, k) - weight_bytes(fmt, n, k)) * 8 / (n * k)
                paid.append((cost, f"{finer}: {_signed(cost)} bits per weight"))
        if fmt.bits in WIDER:
            wider = fmt.with_bits(WIDER[fmt.bits])
            cost = (weight_bytes(wider, n, k) - weight_bytes(fmt, n, k)) * 8 / (n * k)
            gain = 2 ** (wider.bits - fmt.bits)
            paid.append((cost, f"{wider}: {_signed(cost)} bits per weight, the error about 1/{gain}"))
    return (*free, *(text for _, text in sorted(paid)))[:3]


def _now(row: Row) -> int:
    """Bytes of the compensator that there is."""
    n, k = row["shape"]
    return low_rank_bytes(row["compensator"], row["rank"], n, k) if row.get("rank") else 0


def _signed(bits: float) -> str:
    return f"{bits:+.3f}" if math.isfinite(bits) else ""
