"""Sensitivities on disk: what `trilobite sensitivity` writes and the planner reads."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilobite.errors import BudgetError
from trilobite.quantize.budget.units import Unit

KIND, VERSION = "trilobite sensitivity", 1


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Of one unit. error: normalized, mean of its matrices    kl: nats per token    value: of an error of 1."""

    unit: Unit
    error: float
    kl: float

    @property
    def value(self) -> float:
        """The divergence for each unit of error."""
        return self.kl / self.error if self.error else 0.0


def read_sensitivities(path: Path) -> dict[str, float]:
    """By "layer role: part". Raises BudgetError for a file that holds none."""
    try:
        data: Any = json.loads(path.read_bytes())
    except OSError as e:
        raise BudgetError(
            f"{path}: cannot be read ({e.strerror}); `trilobite sensitivity MODEL` writes one"
        ) from e
    except ValueError as e:
        raise BudgetError(f"{path}: not JSON; `trilobite sensitivity MODEL -o {path}` writes it anew") from e
    found: Any = data.get("sensitivities") if isinstance(data, dict) and data.get("kind") == KIND else None
    values = found.values() if isinstance(found, Mapping) and data.get("version") == VERSION else [None]
    if not all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in values):
        raise BudgetError(
            f"{path}: no sensitivities of version {VERSION}; `trilobite sensitivity MODEL -o {path}` writes it anew"
        )
    return {str(name): float(value) for name, value in found.items()}


def to_dict(found: Sequence[Sensitivity], **about: Any) -> dict[str, Any]:
    """Plain data for JSON: by "layer role: part"."""
    return {
        "kind": KIND,
        "version": VERSION,
        **about,
        "sensitivities": {
            f"{s.unit.layer} {s.unit.role.value}: {s.unit.part}".strip(): float(f"{s.value:.5g}")
            for s in found
        },
        "measured": [
            {
                "layer": s.unit.layer,
                "role": s.unit.role.value,
                "part": s.unit.part,
                "error": float(f"{s.error:.5g}"),
                "kl": float(f"{s.kl:.5g}"),
            }
            for s in found
        ],
    }
