"""What a user asks the planner for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trilobite.errors import BudgetError
from trilobite.recipe import COLUMNS, IMPORTANCES, Role

GIB = 2**30
METHODS = ("search", "gptq")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A bound on what a packed checkpoint takes; exactly one of the first three.

    bits: mean bits of a weight of the body (attention, MLPs, experts), scales and padding included
    size: bytes of all files    fit: bytes of memory, of which `reserved` are for other things than weights
    per_expert: experts of a layer may differ    ranks: of compensators to try, as in a rule
    lattice: e8p-2, e8p-3 and e8p-4 are to be tried even where the formats of integers meet the bound
    method: how codes are found, `search` or `gptq`; lattice codes by `ldlq` beside the latter
    keep: roles that stay in 16 bit
    columns, importance: as in a recipe, or "auto": the best that the architecture allows without passes of its own
    sensitivities: by "layer role: part", measured; priors where it says nothing
    """

    bits: float | None = None
    size: int | None = None
    fit: int | None = None
    reserved: int = 0
    per_expert: bool = False
    ranks: tuple[str, ...] = ()
    lattice: bool = False
    method: str = "search"
    keep: tuple[Role, ...] = ()
    columns: str = "auto"
    importance: str = "auto"
    sensitivities: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise BudgetError unless one bound is given, and a method, column scales and importance that there are."""
        given = [name for name in ("bits", "size", "fit") if getattr(self, name) is not None]
        if len(given) != 1:
            raise BudgetError(f"{len(given)} budgets are given; expected one: bits, size or fit")
        if self.method not in METHODS:
            raise BudgetError(f"method {self.method!r}: a budget goes with {' or '.join(METHODS)}")
        for name, value, known in (
            ("columns", self.columns, COLUMNS),
            ("importance", self.importance, IMPORTANCES),
        ):
            if value not in ("auto", *known):
                raise BudgetError(f"{name} {value!r}; expected auto, or one of {', '.join(known)}")

    @property
    def name(self) -> str:
        """What the recipe is called: `bits-3.5`, `size-18GB`, `fit-16GiB`, `bits-3.5+gptq`."""
        return self._bound if self.method == "search" else f"{self._bound}+{self.method}"

    @property
    def _bound(self) -> str:
        if self.bits is not None:
            return f"bits-{self.bits:g}"
        if self.size is not None:
            return f"size-{self.size / 1e9:.6g}GB"
        assert self.fit is not None
        return f"fit-{self.fit / GIB:.6g}GiB"

    @property
    def nbytes(self) -> int:
        """Of files or memory."""
        return self.size or self.fit or 0

    def impossible(self, least: int, most: int, weights: int) -> str:
        """What to say where no recipe comes to this budget.

        least, most: bytes that can be had    weights: of the body
        """
        if self.bits is not None:
            low, high = math.ceil(800 * least / weights) / 100, math.floor(800 * most / weights) / 100
            return f"{self.bits:g} bits: the least that is possible is {low:.2f}, the most {high:.2f}"
        if self.size is not None:
            asked, remedy = _gigabytes(self.size), ""
            least_text, most_text = _gigabytes(least), _gigabytes(most)
        else:
            assert self.fit is not None
            asked, remedy = _gibibytes(self.fit), f", with {_gibibytes(self.reserved)} for all but weights"
            least_text, most_text = _gibibytes(least), _gibibytes(most)
        return f"{asked}: the least that is possible is {least_text}, the most {most_text}{remedy}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what two runs must have in common."""
        return {
            "goal": self.name,
            "bits": self.bits,
            "size": self.size,
            "fit": self.fit,
            "reserved": self.reserved,
            "per_expert": self.per_expert,
            "ranks": list(self.ranks),
            "lattice": self.lattice,
            "method": self.method,
            "keep": [role.value for role in self.keep],
            "columns": self.columns,
            "importance": self.importance,
            "sensitivities": dict(sorted(self.sensitivities.items())),
        }


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.4g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.4g} MB"


def _gibibytes(nbytes: int) -> str:
    return f"{nbytes / GIB:.4g} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.4g} MiB"
