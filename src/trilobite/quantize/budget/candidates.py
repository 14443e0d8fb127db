"""What every unit may get, what that takes, and whether a budget can be met: all that is known without weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trilobite.checkpoint.roles import Matrix
from trilobite.checkpoint.source import Source
from trilobite.errors import BudgetError
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.budget.overhead import file_overhead
from trilobite.quantize.budget.units import Unit, make_units
from trilobite.quantize.plan.plan import Plan, make_plan
from trilobite.recipe import BODY_ROLES, HEAD_RULE, AnyFormat, Recipe, Rule, parse_format


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to store a matrix. rank: as in a rule, "" = no compensator."""

    format: AnyFormat
    rank: str = ""

    def __str__(self) -> str:
        """For people."""
        return f"{self.format}, rank {self.rank}" if self.rank else str(self.format)

    def rule(self, **where: object) -> Rule:
        """The rule that gives it to some matrices."""
        return replace(Rule(format=self.format, rank=self.rank or None), **where)  # type: ignore[arg-type]


FORMATS: tuple[AnyFormat, ...] = tuple(
    parse_format(name)
    for name in (
        "int2-g32-super",
        "int2-g16-super",
        "int3-g32-super",
        "int3-g16-super",
        "int4-g32-super",
        "int4-g16-super",
        "int8-g128",
    )
)
"""Those on the convex hull of bytes against error that kernels run at full speed."""
LATTICES = tuple(parse_format(f"e8p-{bits}") for bits in (2, 3, 4))
"""Slower, and better for their bytes: where asked for. The first also for budgets that the others do not meet."""
SMALLEST = parse_format("e8p-1")
"""Where there is no room beside the first of these: some parts give, so that others can take."""
ROOM = 1.05
"""Bytes of a budget over the least without `SMALLEST` from which on that loses more than it gains (docs/results.md)."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A checkpoint and a budget as the planner sees them.

    source: rescaled where the recipe says so    recipe: all but the rules for the body    plans: one for each candidate
    beside: bytes that count whatever the units get    bound: bytes that the units may take, of least to most
    """

    source: Source
    matrices: Sequence[Matrix]
    unfit: Mapping[str, str]
    recipe: Recipe
    budget: Budget
    candidates: tuple[Candidate, ...]
    plans: tuple[Plan, ...]
    units: tuple[Unit, ...]
    beside: int
    bound: int
    least: int
    most: int

    def nbytes(self, unit: Unit, candidate: int) -> int:
        """What a unit takes."""
        return _nbytes(self.plans[candidate], unit)


def _least(plans: Sequence[Plan], units: Sequence[Unit]) -> int:
    """Bytes of the body where every unit takes as few as it can."""
    return sum(min(_nbytes(plan, unit) for plan in plans) for unit in units)


def _nbytes(plan: Plan, unit: Unit) -> int:
    return sum(plan.lines[i].nbytes for i in unit.matrices)


def ask(
    source: Source, matrices: Sequence[Matrix], unfit: Mapping[str, str], recipe: Recipe, budget: Budget
) -> Question:
    """Plan every candidate for a checkpoint.

    Raises BudgetError with the least and the most that is possible, and what `make_plan` raises.
    """
    candidates = [Candidate(format=fmt, rank=rank) for rank in ("", *budget.ranks) for fmt in FORMATS]

    def planned(candidate: Candidate) -> Plan:
        rules = (*recipe.rules, candidate.rule(roles=BODY_ROLES), HEAD_RULE)
        return make_plan(source, matrices, replace(recipe, rules=rules), unfit=unfit)

    plans = [planned(c) for c in candidates]
    lines = plans[0].lines
    # What stays in 16 bit whatever is asked for is no choice.
    units = [
        unit
        for unit in make_units([line.matrix for line in lines], per_expert=budget.per_expert)
        if any(plan.lines[i].format for plan in plans for i in unit.matrices)
    ]
    beside = _beside(source, plans[0], units, budget)
    weights = sum(unit.weights for unit in units)
    bound = int(budget.bits * weights / 8) if budget.bits is not None else budget.nbytes - beside
    lattices = LATTICES if budget.lattice else LATTICES[:1] if bound < _least(plans, units) else ()
    candidates += [Candidate(format=fmt) for fmt in lattices]
    plans += [planned(c) for c in candidates[len(plans) :]]
    if lattices and bound < ROOM * _least(plans, units):
        candidates.append(Candidate(format=SMALLEST))
        plans.append(planned(candidates[-1]))
    least = _least(plans, units)
    most = sum(max(_nbytes(plan, unit) for plan in plans) for unit in units)
    # Memory that is left over does no harm.
    if bound < least or (bound > most and budget.fit is None):
        raise BudgetError(budget.impossible(least + beside, most + beside, weights))
    return Question(
        source=source,
        matrices=matrices,
        unfit=unfit,
        recipe=recipe,
        budget=budget,
        candidates=tuple(candidates),
        plans=tuple(plans),
        units=tuple(units),
        beside=beside,
        bound=bound,
        least=least,
        most=most,
    )


def _beside(source: Source, plan: Plan, units: Sequence[Unit], budget: Budget) -> int:
    """Bytes that count against the budget whatever the units get."""
    if budget.bits is not None:
        return 0
    decided = {i for unit in units for i in unit.matrices}
    tensors = sum(line.nbytes for i, line in enumerate(plan.lines) if i not in decided)
    return tensors + (budget.reserved if budget.fit else file_overhead(source, plan))
