"""Recipes that differ in the ranks of their compensators, some of them of equal bytes."""

from pathlib import Path
from typing import Any

from benchmarks.lib.recipes import slug
from trilobite.checkpoint.roles import identify
from trilobite.checkpoint.source import open_source
from trilobite.quantize.plan.plan import Plan
from trilobite.quantize.run.compress import prepare
from trilobite.recipe import BODY_ROLES, Format, Recipe, Role, Rule

INT3 = Format(bits=3, group=64)


def compensated(name: str, rank: str, **options: Any) -> Recipe:
    """INT3 g64 with a rank policy that no cap lowers; everything else in 16 bit, as in the paper."""
    method = options.pop("method", "search")
    rules = (Rule(roles=BODY_ROLES, format=INT3, method=method),)
    return Recipe(name=slug(name), rules=rules, rank=rank, cap=False, **options)


def compensator_bytes(plan: Plan) -> int:
    """Bytes of all compensators of a plan."""
    return sum(t.nbytes for line in plan.lines for t in line.stored if t.name.endswith(("_lra", "_lrb")))


def once(name: str, rank: str) -> Recipe:
    """The same with HQQ inside and one iteration, as the paper compares policies."""
    return compensated(f"{name} x1", rank, method="hqq", iterations=1)


def equal_memory(model: Path, dense: int) -> dict[str, Recipe]:
    """Dense, uniform and sparse ranks of (almost) equal bytes.

    One rank more on every expert is a large step on a small model, so the first layers may have one more.
    """
    source = open_source(str(model))
    title = f"dense-{dense}"
    recipes = {title: once(title, title)}
    budget = compensator_bytes(prepare(source, recipes[title]))
    layers = 1 + max(m.layer for m in identify(source) if m.layer is not None)
    for name, roles in (("uniform", BODY_ROLES), ("sparse", (Role.EXPERT,))):

        def layered(steps: int, name: str = name, roles: tuple[Role, ...] = roles) -> Recipe:
            return _layered(name, roles, steps, layers)

        low, high = 0, layers * dense
        while low < high:  # the largest number of steps that fits
            middle = (low + high + 1) // 2
            if compensator_bytes(prepare(source, layered(middle))) <= budget:
                low = middle
            else:
                high = middle - 1
        recipes[f"{name}-{low / layers:.3g}"] = layered(low)
    return recipes


def _layered(name: str, roles: tuple[Role, ...], steps: int, layers: int) -> Recipe:
    """Rank steps // layers for these roles, and one more in the first steps % layers layers."""
    rank, more = divmod(steps, layers)
    rules = [Rule(roles=BODY_ROLES, format=INT3, method="hqq")]
    rules.insert(0, Rule(roles=roles, format=INT3, method="hqq", rank=str(rank)))
    if more:
        first = Rule(roles=roles, layers=(0, more - 1), format=INT3, method="hqq", rank=str(rank + 1))
        rules.insert(0, first)
    return Recipe(name=f"{name}-{steps}-of-{layers}-x1", rules=tuple(rules), cap=False, iterations=1)
