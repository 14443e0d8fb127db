"""Rows of benchmarks/gpu/measure.py's tables: what is in one, and how it is printed."""

import math
from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]
SHARES = ("of copy", "of bound")
"""Columns that are printed as percentages."""


def kernel_row(
    case: str, tokens: int, times: Mapping[str, float], *, ours: str, nbytes: float, bandwidth: float
) -> Row:
    """One kernel's time, what it is of the limit, and what others take.

    times: seconds by name, "3-bit" among them; the others' follow as multiples of it    ours: the name whose row it is
    nbytes: of the packed weights that `ours` reads    bandwidth: of the copy, bytes a second
    """
    took = times[ours]
    return {
        "case": case,
        "tokens": tokens,
        "us": took * 1e6,
        "GB/s": nbytes / took / 1e9,
        "of copy": nbytes / took / bandwidth,
        "x floor": took * bandwidth / nbytes,
        **{f"{name} / 3-bit": t / times["3-bit"] for name, t in times.items() if name != "3-bit"},
    }


def cells(row: Row) -> list[str]:
    """Numbers with few digits; shares as percentages; a dash for what was not measured."""
    return [_cell(key, value) for key, value in row.items()]


def _cell(key: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "–"
    return f"{value:.0%}" if key in SHARES else f"{value:.2f}"


def finite(value: Any) -> Any:
    """The same for JSON, which knows no NaN."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value
