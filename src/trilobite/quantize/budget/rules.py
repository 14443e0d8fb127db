"""What was chosen as rules of a recipe: what most weights of a role get, and before it what differs."""

import glob
import re
from collections.abc import Mapping, Sequence

from trilobite.checkpoint.layers import layer_number
from trilobite.checkpoint.roles import Matrix
from trilobite.quantize.budget.candidates import Candidate
from trilobite.quantize.budget.units import EXPERT, Unit
from trilobite.recipe import BODY_ROLES, Role, Rule

_LAYER = re.compile(r"((?:^|\.)(?:layers?|blocks?|h)\.)\d+\.")


def make_rules(
    matrices: Sequence[Matrix], units: Sequence[Unit], chosen: Sequence[Candidate]
) -> tuple[Rule, ...]:
    """Rules that give the matrices of each unit its format."""
    exceptions: list[Rule] = []
    usual: dict[Candidate, list[Role]] = {}
    for role in BODY_ROLES:
        of_role = [(unit, fmt) for unit, fmt in zip(units, chosen, strict=True) if unit.role is role]
        if not of_role:
            continue
        weights: dict[Candidate, int] = {}
        for unit, fmt in of_role:
            weights[fmt] = weights.get(fmt, 0) + unit.weights
        default = max(weights, key=lambda fmt: weights[fmt])
        usual.setdefault(default, []).append(role)
        for pattern, layers in _by_pattern(matrices, of_role).items():
            exceptions += _exceptions(role, pattern, layers, default)
    return (*exceptions, *(fmt.rule(roles=tuple(roles)) for fmt, roles in usual.items()))


Layers = Mapping[int | None, Candidate]
"""What matrices of one name get in each layer, in the order of layers; None outside of layers."""


def _by_pattern(matrices: Sequence[Matrix], chosen: Sequence[tuple[Unit, Candidate]]) -> dict[str, Layers]:
    """What matrices get, by their names with a star for the layer, and for the expert where all are alike."""
    found: dict[str, dict[int | None, Candidate]] = {}
    for unit, fmt in chosen:
        for i in unit.matrices:
            name = matrices[i].name
            pattern = _LAYER.sub(r"\1*.", glob.escape(name), count=1)
            if unit.expert is None:
                pattern = EXPERT.sub(r"\1*.", pattern)
            found.setdefault(pattern, {})[layer_number(name)] = fmt
    return {pattern: dict(sorted(layers.items(), key=_order)) for pattern, layers in found.items()}


def _order(item: tuple[int | None, Candidate]) -> int:
    return -1 if item[0] is None else item[0]


def _exceptions(role: Role, pattern: str, layers: Layers, default: Candidate) -> list[Rule]:
    """Rules for the layers in which matrices of a name get something else than the default: a rule for each run."""
    if len(set(layers.values())) == 1:
        only = next(iter(layers.values()))
        return [] if only == default else [only.rule(roles=(role,), names=pattern)]
    runs: list[tuple[list[int], Candidate]] = []
    for layer, fmt in layers.items():
        assert layer is not None
        if runs and runs[-1][1] == fmt:
            runs[-1][0].append(layer)
        else:
            runs.append(([layer], fmt))
    return [
        fmt.rule(roles=(role,), names=pattern, layers=(run[0], run[-1]))
        for run, fmt in runs
        if fmt != default
    ]
