"""How much a model suffers from errors in its matrices, where nobody measured it: by role, part and depth.

`priors.json` holds what `benchmarks/quality/sensitivity.py` found on the reference models: for each role and part the KL
divergence for a normalized error of 1 in one layer's matrices, at six depths from the first layer to the last.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("priors.json")


@cache
def priors() -> Mapping[str, Sequence[float]]:
    """By "role: part", and by "role" for parts that no reference model has: sensitivities at depths evenly spread."""
    table: dict[str, list[float]] = json.loads(TABLE.read_text())["sensitivities"]
    return table


def prior(role: str, part: str, depth: float) -> float:
    """The sensitivity of one layer's matrices. depth: 0 = the first layer, 1 = the last; geometric in between."""
    table = priors()
    values = table.get(f"{role}: {part}") or table[role]
    place = depth * (len(values) - 1)
    low = min(int(place), len(values) - 2)
    between = place - low
    return math.exp((1 - between) * math.log(values[low]) + between * math.log(values[low + 1]))
