"""What is decided about as one: the matrices of a layer that engines multiply together, for all experts alike."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trilobite.checkpoint.layers import layer_key
from trilobite.checkpoint.roles import Matrix
from trilobite.recipe import BODY_ROLES, Role

ATTENTION, MLP = "q, k, v", "gate, up"
TIED = {"q": ATTENTION, "k": ATTENTION, "v": ATTENTION, "gate": MLP, "up": MLP, "gate_up": MLP}
"""Projections that read the same vector, which engines join to one matrix: they share a format."""
EXPERT = re.compile(r"(\.experts\.(?:expert_)?)\d+\.")
"""Where the number of an expert stands in the name of a matrix."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Matrices that get the same format.

    layer: as files and reports call it, "" outside of layers    part: which projections    expert: None = all of them
    matrices: their numbers in the plan    weights: of all of them
    """

    role: Role
    layer: str
    part: str
    expert: int | None
    matrices: tuple[int, ...]
    weights: int


def make_units(matrices: Sequence[Matrix], *, per_expert: bool) -> list[Unit]:
    """The matrices of the body, in the order of their first ones."""
    found: dict[tuple[str, str, int | None], list[int]] = {}
    for i, m in enumerate(matrices):
        if m.role in BODY_ROLES and m.quantizable:
            found.setdefault((_module(m), part_of(m), m.expert if per_expert else None), []).append(i)
    units = []
    for (_, part, expert), numbers in found.items():
        first = matrices[numbers[0]]
        units.append(
            Unit(
                role=first.role,
                layer=layer_key(first.name) or "",
                part=part,
                expert=expert,
                matrices=tuple(numbers),
                weights=sum(matrices[i].shape[0] * matrices[i].shape[1] for i in numbers),
            )
        )
    return units


def part_of(m: Matrix) -> str:
    """Which projections of its module a matrix is decided with."""
    leaf = m.name.removesuffix(".weight").rpartition(".")[2]
    return TIED.get(m.projection or "", m.projection or leaf)


def _module(m: Matrix) -> str:
    """The module that a matrix is in; one for all experts of a layer."""
    name = EXPERT.sub(r"\1", m.name)
    return name.removesuffix(".weight").rpartition(".")[0]
