"""Why each unit got what it got, as plain data: kept in the checkpoint, shown by plan, compress and report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trilobite.quantize.budget.candidates import Candidate, Question
from trilobite.quantize.budget.solve import Options, hull
from trilobite.quantize.budget.units import Unit


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was found for a unit. options: of each candidate    chosen: its number    error: normalized, of that one."""

    unit: Unit
    options: Options
    chosen: int
    sensitivity: float
    error: float


def account(question: Question, found: Sequence[Found]) -> dict[str, Any]:
    """All of it."""
    rows = [_row(f, question.candidates) for f in found]
    return {
        "budget": question.budget.to_dict(),
        "bytes": question.beside + sum(row["bytes"] for row in rows),
        "least": question.beside + question.least,
        "most": question.beside + question.most,
        "loss": _short(sum(f.options[f.chosen].loss for f in found)),
        "choices": rows,
    }


def _row(f: Found, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """One unit, with the next step along the hull: what it would cost and save."""
    unit, now = f.unit, f.options[f.chosen]
    row: dict[str, Any] = {"layer": unit.layer, "role": unit.role.value, "part": unit.part}
    if unit.expert is not None:
        row["expert"] = unit.expert
    row |= {
        "format": str(candidates[f.chosen]),
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
            "format": str(candidates[better]),
            "bytes": more.nbytes - now.nbytes,
            "loss": _short(now.loss - more.loss),
        }
    return row


def _short(value: float) -> float:
    return float(f"{value:.5g}")


@dataclass(frozen=True, kw_only=True)
class PartAccount:
    """One part of all layers. formats: with the layers that have them    bits: of a weight    loss: predicted.

    more_bytes, less_loss: what a step more of all its units would cost and save; 0 where there is none
    """

    role: str
    part: str
    formats: str
    bits: float
    nbytes: int
    loss: float
    more_bytes: int
    less_loss: float


def by_part(account: Mapping[str, Any]) -> list[PartAccount]:
    """An account added up over layers and experts."""
    parts: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in account["choices"]:
        parts.setdefault((str(row["role"]), str(row["part"])), []).append(row)
    return [
        PartAccount(
            role=role,
            part=part,
            formats=_formats(rows),
            bits=8 * sum(row["bytes"] for row in rows) / sum(row["weights"] for row in rows),
            nbytes=sum(row["bytes"] for row in rows),
            loss=sum(row["loss"] for row in rows),
            more_bytes=sum(row["next"]["bytes"] for row in rows if "next" in row),
            less_loss=sum(row["next"]["loss"] for row in rows if "next" in row),
        )
        for (role, part), rows in parts.items()
    ]


def _formats(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats by the layers that have them, the most frequent first."""
    layers: dict[str, dict[str, None]] = {}
    for row in rows:
        layers.setdefault(row["format"], {})[row["layer"]] = None
    if len(layers) == 1:
        return next(iter(layers))
    order = sorted(layers, key=lambda fmt: -len(layers[fmt]))
    return "; ".join(f"{fmt} in {_runs(list(layers[fmt]))}" for fmt in order)


def _runs(layers: list[str]) -> str:
    """`["0", "1", "2", "5"]` -> `0-2, 5`."""
    runs: list[list[str]] = []
    for layer in layers:
        stack, _, index = layer.rpartition(".")
        before = f"{stack}.{int(index) - 1}".removeprefix(".") if index.isdigit() else None
        if runs and runs[-1][-1] == before:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
