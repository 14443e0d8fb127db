"""A recipe that meets a budget: options of every unit, what they cost and lose, the best of them, and why."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from trilobite.checkpoint.roles import Matrix
from trilobite.checkpoint.source import Source
from trilobite.errors import BudgetError
from trilobite.quantize.budget.account import Found, account
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.budget.loss import EXPERTS, Importance, normalized_errors, of_columns
from trilobite.quantize.budget.overhead import file_overhead
from trilobite.quantize.budget.priors import prior
from trilobite.quantize.budget.rules import make_rules
from trilobite.quantize.budget.solve import Option, least_bytes, most_bytes, solve
from trilobite.quantize.budget.units import Unit, make_units
from trilobite.quantize.plan.plan import Plan, make_plan
from trilobite.quantize.threads import single_threaded_torch
from trilobite.quantize.watcher import SILENT, Watcher
from trilobite.recipe import BODY_ROLES, HEAD_RULE, AnyFormat, Recipe, Role, Rule, parse_format

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
"""What is tried: the formats on the convex hull of bytes against error that kernels run at full speed."""
LEAST = 1e-6
"""Of the largest sensitivity."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A checkpoint as the planner sees it. source: rescaled where the recipe says so    plans: one for each format."""

    source: Source
    matrices: Sequence[Matrix]
    unfit: Mapping[str, str]
    recipe: Recipe
    plans: tuple[Plan, ...]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The answer. account: why, as plain data, kept beside the recipe."""

    recipe: Recipe
    account: Mapping[str, Any]


def ask(source: Source, matrices: Sequence[Matrix], unfit: Mapping[str, str], recipe: Recipe) -> Question:
    """Plan every format for a checkpoint. recipe: all but the rules. Raises what `make_plan` raises."""
    plans = tuple(make_plan(source, matrices, _all_in(recipe, fmt), unfit=unfit) for fmt in FORMATS)
    return Question(source=source, matrices=matrices, unfit=unfit, recipe=recipe, plans=plans)


def _all_in(recipe: Recipe, fmt: AnyFormat) -> Recipe:
    """The recipe that gives the whole body one format."""
    return replace(recipe, rules=(*recipe.rules, Rule(roles=BODY_ROLES, format=fmt), HEAD_RULE))


def choose(
    question: Question,
    budget: Budget,
    importance: Importance | None,
    *,
    jobs: int = 1,
    watcher: Watcher = SILENT,
) -> Choice:
    """The recipe of least predicted loss within a budget.

    importance: None = all columns count alike
    Raises BudgetError with the least and the most that is possible, WeightError that names a matrix.
    """
    first = question.plans[0]
    # Matrices that formats share: those that stay in 16 bit are no choice.
    units = [
        unit
        for unit in make_units([line.matrix for line in first.lines], per_expert=budget.per_expert)
        if any(plan.lines[i].format for plan in question.plans for i in unit.matrices)
    ]
    errors = _errors(question, units, importance, jobs, watcher)
    sensitivities = _sensitivities(units, budget)
    options = [
        [
            Option(nbytes=sum(plan.lines[i].nbytes for i in unit.matrices), loss=a * error)
            for plan, error in zip(question.plans, of_unit, strict=True)
        ]
        for unit, a, of_unit in zip(units, sensitivities, errors, strict=True)
    ]
    beside = _beside(question, units, budget)
    bound = _bound(units, options, budget, beside)
    chosen = solve(options, bound)
    formats = [FORMATS[c] for c in chosen]
    rules = make_rules([line.matrix for line in first.lines], units, formats)
    recipe = replace(question.recipe, rules=(*question.recipe.rules, *rules, HEAD_RULE))
    _check(question, units, chosen, recipe)
    found = [
        Found(unit=unit, formats=FORMATS, options=of_unit, chosen=c, sensitivity=a, error=of_errors[c])
        for unit, of_unit, c, a, of_errors in zip(units, options, chosen, sensitivities, errors, strict=True)
    ]
    return Choice(recipe=recipe, account=account(budget, beside, found))


def _errors(
    question: Question, units: Sequence[Unit], importance: Importance | None, jobs: int, watcher: Watcher
) -> list[list[float]]:
    """By unit and format: the mean normalized error of the matrices that stand for the unit."""
    needed = sorted({i for unit in units for i in _standing(question, unit)})

    def measure(i: int) -> list[float]:
        lines = [plan.lines[i] for plan in question.plans]
        weighed = any(line.importance for line in lines)
        h = of_columns(importance, lines[0].matrix) if weighed else None
        return normalized_errors(question.source, lines, h)

    found: dict[int, list[float]] = {}
    with single_threaded_torch(), ThreadPoolExecutor(jobs, "plan") as pool:
        for i, errors in zip(needed, pool.map(measure, needed), strict=True):
            found[i] = errors
            watcher.progress("plan", len(found), len(needed))
    means = []
    for unit in units:
        rows = [found[i] for i in _standing(question, unit)]
        means.append([sum(column) / len(column) for column in zip(*rows, strict=True)])
    return means


def _standing(question: Question, unit: Unit) -> list[int]:
    """The matrices that stand for a unit: all, or of experts those of a few."""
    lines = question.plans[0].lines
    experts = sorted({lines[i].matrix.expert for i in unit.matrices} - {None})  # type: ignore[type-var]
    if len(experts) <= EXPERTS:
        return list(unit.matrices)
    few = {experts[(2 * e + 1) * len(experts) // (2 * EXPERTS)] for e in range(EXPERTS)}
    return [i for i in unit.matrices if lines[i].matrix.expert in few]


def _sensitivities(units: Sequence[Unit], budget: Budget) -> list[float]:
    """What a normalized error of 1 in a unit costs: as measured, or a prior. Experts share that of their layer."""
    layers: dict[str, dict[str, None]] = {}
    whole: dict[tuple[str, Role, str], int] = {}
    for unit in units:
        layers.setdefault(_stack(unit), {})[unit.layer] = None
        key = unit.layer, unit.role, unit.part
        whole[key] = whole.get(key, 0) + unit.weights
    found = []
    for unit in units:
        of_stack = list(layers[_stack(unit)])
        depth = of_stack.index(unit.layer) / max(1, len(of_stack) - 1)
        a = budget.sensitivities.get(f"{unit.layer} {unit.role.value}: {unit.part}".strip())
        a = prior(unit.role.value, unit.part, depth) / len(of_stack) if a is None else a
        found.append(a * unit.weights / whole[unit.layer, unit.role, unit.part])
    # Nothing costs nothing: what a text never reached gets what is left over.
    least = LEAST * max(found) or 1.0
    return [max(a, least) for a in found]


def _stack(unit: Unit) -> str:
    return unit.layer.rpartition(".")[0]


def _beside(question: Question, units: Sequence[Unit], budget: Budget) -> int:
    """Bytes that count against the budget whatever the units get."""
    if budget.bits is not None:
        return 0
    decided = {i for unit in units for i in unit.matrices}
    lines = question.plans[0].lines
    tensors = sum(line.nbytes for i, line in enumerate(lines) if i not in decided)
    return tensors + (budget.reserved if budget.fit else file_overhead(question.source, question.plans[0]))


def _bound(units: Sequence[Unit], options: Sequence[Sequence[Option]], budget: Budget, beside: int) -> int:
    """Bytes that the units may take. Raises BudgetError where there is no recipe for so many."""
    weights = sum(unit.weights for unit in units)
    least, most = least_bytes(options), most_bytes(options)
    bound = (
        int(budget.bits * weights / 8)
        if budget.bits is not None
        else (budget.size or budget.fit or 0) - beside
    )
    # Memory that is left over does no harm.
    if least <= bound and (bound <= most or budget.fit is not None):
        return bound
    raise BudgetError(budget.impossible(least + beside, most + beside, weights))


def _check(question: Question, units: Sequence[Unit], chosen: Sequence[int], recipe: Recipe) -> None:
    """The rules have to say what was chosen."""
    made = make_plan(question.source, question.matrices, recipe, unfit=question.unfit)
    for unit, c in zip(units, chosen, strict=True):
        for i in unit.matrices:
            line, meant = made.lines[i], question.plans[c].lines[i]
            assert (line.format, line.nbytes) == (meant.format, meant.nbytes), line.matrix.name
