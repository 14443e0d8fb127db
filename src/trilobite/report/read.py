"""What is known of a packed checkpoint, from the files of its folder alone."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilobite.checkpoint.evaluation import read_evaluations
from trilobite.checkpoint.packed import REPORT, TIMES, read_report
from trilobite.checkpoint.summary import bytes_on_disk
from trilobite.errors import CheckpointError, RecipeError
from trilobite.quantize.budget.account import PartAccount, by_part
from trilobite.quantize.plan.report import Account, Report, account, report

Row = Mapping[str, Any]
_NUMBERS = ("error", "proxy", "kurtosis", "residual_share", "own")
_WHOLE = ("bytes", "layer", "expert", "rank", "tokens", "iterations")
_EXPERT = re.compile(r"\.experts?\.\w*?\d+\.")
_LAYER = re.compile(r"(.*?)\.?\b\d+\.(.*)")
_CONTAINERS = ("model", "layers", "layer", "blocks", "block", "transformer", "language_model", "h")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, kw_only=True)
class Planner:
    """The account of a planned recipe. nbytes: what counts against the budget, of least to most that is possible."""

    goal: str
    nbytes: int
    least: int
    most: int
    loss: float
    parts: Sequence[PartAccount]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A packed checkpoint. head: trilobite.json without its tensors    rows: its tensors    seconds: of each, if kept.

    measured: what `eval --save` kept    planner: why it got what it got, where that was planned
    """

    path: Path
    name: str
    head: Mapping[str, Any]
    recipe: str
    rows: Sequence[Row]
    made: Report
    accounts: Sequence[Account]
    seconds: Mapping[str, float]
    measured: Sequence[Mapping[str, Any]]
    planner: "Planner | None" = None

    @property
    def quantized(self) -> list[Row]:
        """The rows of quantized matrices."""
        return [row for row in self.rows if "format" in row]


def read_packed(path: Path, nbytes: int | None = None) -> Packed:
    """Read a packed checkpoint's report, times and evaluations; weights stay unread.

    nbytes: of all its files, where others lie elsewhere
    Raises CheckpointError for a folder that is none or damaged, FormatVersionError for a version unknown.
    """
    found = read_report(path)
    try:
        rows = [_checked(row) for row in found["tensors"]]
        made = report(rows, bytes_on_disk=bytes_on_disk(path) if nbytes is None else nbytes)
        accounts = account(rows)
        head = {key: value for key, value in found.items() if key != "tensors"}
        recipe = printable(found["identity"]["recipe"]["name"])
        planner = _planner(found["identity"].get("planner"))
        head["source"], head["rank"] = printable(head["source"]), printable(head["rank"])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecipeError) as e:
        raise CheckpointError(
            f"{path / REPORT}: damaged ({type(e).__name__}: {e}); copy the file again"
        ) from e
    return Packed(
        path=path,
        name=printable(path.resolve().name),
        head=head,
        recipe=recipe,
        rows=rows,
        made=made,
        accounts=accounts,
        seconds=_seconds(path),
        measured=[_clean(entry) for entry in read_evaluations(path)],
        planner=planner,
    )


def _planner(account: Mapping[str, Any] | None) -> Planner | None:
    if account is None:
        return None
    return Planner(
        goal=printable(account["budget"]["goal"]),
        nbytes=int(account["bytes"]),
        least=int(account["least"]),
        most=int(account["most"]),
        loss=float(account["loss"]),
        parts=[
            replace(p, role=printable(p.role), part=printable(p.part), formats=printable(p.formats))
            for p in by_part(account)
        ],
    )


def printable(text: object) -> str:
    """A string whose control characters, and what is no text, are replaced. Raises TypeError for anything else."""
    if not isinstance(text, str):
        raise TypeError(f"expected a string, found {type(text).__name__}")
    return _UNPRINTABLE.sub("\ufffd", text)


def label(name: str) -> str:
    """What a matrix is called in every layer: `model.layers.0.mlp.experts.3.up_proj.weight` -> `mlp.experts.up_proj`."""
    short = _EXPERT.sub(".experts.", name.removesuffix(".weight"))
    found = _LAYER.fullmatch(short)
    if not found:
        return short
    where = [part for part in found[1].split(".") if part not in _CONTAINERS]
    return " ".join([".".join(where), found[2]]).strip()


def _checked(row: Row) -> Row:
    """A row of the types that it must have; its name printable."""
    clean = dict(row)
    for key in ("name", "role", "kept", "format", "method", "compensator", "note"):
        if key in row:
            clean[key] = printable(row[key])
    if not all(isinstance(n, int) and n >= 0 for n in row["shape"]):
        raise ValueError(f"shape {row['shape']!r}")
    for key in _WHOLE:
        if key in row and (type(row[key]) is not int or row[key] < 0):
            raise ValueError(f"{key} {row[key]!r}")
    for key, values in [*((k, [row[k]]) for k in _NUMBERS if k in row), ("errors", row.get("errors", []))]:
        if not all(type(v) in (int, float) and math.isfinite(v) for v in values):
            raise ValueError(f"{key} {row[key]!r}")
    return clean


def _seconds(path: Path) -> dict[str, float]:
    """Seconds by tensor; empty where they were not kept, or by a release with other files."""
    try:
        document = json.loads((path / TIMES).read_bytes())
        if document["version"] != 1:
            return {}
        return {printable(name): float(s) for name, s in document["seconds"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _clean(value: Any) -> Any:
    """What JSON holds, with strings that can be printed and without numbers that are not finite."""
    if isinstance(value, dict):
        return {printable(key): _clean(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_clean(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return printable(value) if isinstance(value, str) else value
