"""Why each unit got what it got, as plain data: kept in the checkpoint, shown by plan, compress and report."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.budget.solve import Options, hull, least_bytes, most_bytes
from trilobite.quantize.budget.units import Unit
from trilobite.recipe import AnyFormat


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was found for a unit. options: of each format    chosen: its number    error: normalized, in that format."""

    unit: Unit
    formats: Sequence[AnyFormat]
    options: Options
    chosen: int
    sensitivity: float
    error: float


def account(budget: Budget, beside: int, found: Sequence[Found]) -> dict[str, Any]:
    """All of it. beside: bytes that count whatever the units get."""
    rows = [_row(f) for f in found]
    options = [f.options for f in found]
    return {
        "budget": budget.to_dict(),
        "bytes": beside + sum(row["bytes"] for row in rows),
        "least": beside + least_bytes(options),
        "most": beside + most_bytes(options),
        "loss": _short(sum(f.options[f.chosen].loss for f in found)),
        "choices": rows,
    }


def _row(f: Found) -> dict[str, Any]:
    """One unit, with the next step along the hull: what it would cost and save."""
    unit, now = f.unit, f.options[f.chosen]
    row: dict[str, Any] = {"layer": unit.layer, "role": unit.role.value, "part": unit.part}
    if unit.expert is not None:
        row["expert"] = unit.expert
    row |= {
        "format": str(f.formats[f.chosen]),
        "weights": unit.weights,
        "bytes": now.nbytes,
        "sensitivity": _short(f.sensitivity),
        "error": _short(f.error),
        "loss": _short(now.loss),
    }
    better = next((i for i in hull(f.options) if f.options[i].loss < now.loss), None)
    if better is not None:
        more = f.options[better]
        row["next"] = {
            "format": str(f.formats[better]),
            "bytes": more.nbytes - now.nbytes,
            "loss": _short(now.loss - more.loss),
        }
    return row


def _short(value: float) -> float:
    return float(f"{value:.5g}")
