"""A recipe that meets a budget: options of every unit, what they cost and lose, the best of them, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trilobite.pool import ThreadPool
from trilobite.quantize.budget.account import Found, account
from trilobite.quantize.budget.candidates import Question
from trilobite.quantize.budget.loss import EXPERTS, Importance, normalized_errors, of_columns
from trilobite.quantize.budget.priors import prior
from trilobite.quantize.budget.rules import make_rules
from trilobite.quantize.budget.solve import Option, solve
from trilobite.quantize.budget.units import Unit
from trilobite.quantize.plan.plan import make_plan
from trilobite.quantize.threads import single_threaded_torch
from trilobite.quantize.watcher import SILENT, Watcher
from trilobite.recipe import CALIBRATED_METHODS, HEAD_RULE, LatticeFormat, Recipe, Role, Rule

LEAST = 1e-6
"""Of the largest sensitivity."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The answer. account: why, as plain data, kept beside the recipe."""

    recipe: Recipe
    account: Mapping[str, Any]


def choose(question: Question, errors: Sequence[Sequence[float]], importance: Importance | None) -> Choice:
    """The recipe of least predicted loss within the budget.

    errors: of `measure_errors`    importance: what they were weighed by, which knows how many tokens experts saw
    """
    units, candidates = question.units, question.candidates
    sensitivities = _sensitivities(question, importance)
    options = [
        [Option(nbytes=question.nbytes(unit, c), loss=a * of_unit[c]) for c in range(len(candidates))]
        for unit, a, of_unit in zip(units, sensitivities, errors, strict=True)
    ]
    chosen = solve(options, question.bound)
    matrices = [line.matrix for line in question.plans[0].lines]
    rules = make_rules(matrices, units, [candidates[c] for c in chosen])
    rules = tuple(_found_by(question.budget.method, rule) for rule in rules)
    recipe = replace(question.recipe, rules=(*question.recipe.rules, *rules, HEAD_RULE))
    _check(question, chosen, recipe)
    found = [
        Found(unit=unit, options=of_unit, chosen=c, sensitivity=a, error=of_errors[c])
        for unit, of_unit, c, a, of_errors in zip(units, options, chosen, sensitivities, errors, strict=True)
    ]
    return Choice(recipe=recipe, account=account(question, found))


def _found_by(method: str, rule: Rule) -> Rule:
    """The rule with this method, or with what finds lattice codes by the same Hessian."""
    lattice = isinstance(rule.format, LatticeFormat) and method in CALIBRATED_METHODS
    return replace(rule, method="ldlq" if lattice else method)


def measure_errors(
    question: Question, importance: Importance | None, *, jobs: int = 1, watcher: Watcher = SILENT
) -> list[list[float]]:
    """By unit and candidate: the mean normalized error of the matrices that stand for the unit.

    importance: None = all columns count alike    Raises WeightError that names a matrix.
    """
    needed = sorted({i for unit in question.units for i in _standing(question, unit)})

    def measure(i: int) -> list[float]:
        lines = [plan.lines[i] for plan in question.plans]
        weighed = any(line.importance for line in lines)
        h = of_columns(importance, lines[0].matrix) if weighed else None
        return normalized_errors(question.source, lines, h)

    found: dict[int, list[float]] = {}
    with single_threaded_torch(), ThreadPool(jobs, "plan") as pool:
        for i, errors in zip(needed, pool.map(measure, needed), strict=True):
            found[i] = errors
            watcher.progress("plan", len(found), len(needed))
    means = []
    for unit in question.units:
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


def _sensitivities(question: Question, importance: Importance | None) -> list[float]:
    """What a normalized error of 1 in a unit costs: as measured, or a prior.

    Experts that differ share that of their layer, by the tokens that each saw, where it is known.
    """
    budget = question.budget
    layers: dict[str, dict[str, None]] = {}
    whole: dict[tuple[str, Role, str], float] = {}
    used = [_use(question, unit, importance) for unit in question.units]
    for unit, use in zip(question.units, used, strict=True):
        layers.setdefault(_stack(unit), {})[unit.layer] = None
        key = unit.layer, unit.role, unit.part
        whole[key] = whole.get(key, 0) + use
    found = []
    for unit, use in zip(question.units, used, strict=True):
        of_stack = list(layers[_stack(unit)])
        depth = of_stack.index(unit.layer) / max(1, len(of_stack) - 1)
        a = budget.sensitivities.get(f"{unit.layer} {unit.role.value}: {unit.part}".strip())
        a = prior(unit.role.value, unit.part, depth) / len(of_stack) if a is None else a
        found.append(a * use / whole[unit.layer, unit.role, unit.part])
    # Nothing costs nothing: what a text never reached gets what is left over.
    least = LEAST * max(found) or 1.0
    return [max(a, least) for a in found]


def _use(question: Question, unit: Unit, importance: Importance | None) -> float:
    """How much a unit counts among those of its layer that do the same."""
    line = question.plans[0].lines[unit.matrices[0]]
    if unit.expert is None or importance is None or not line.importance:
        return unit.weights
    return float(importance.get(line.matrix.name, line.matrix.shape[1])[1].get("tokens", 0)) + 1


def _stack(unit: Unit) -> str:
    return unit.layer.rpartition(".")[0]


def _check(question: Question, chosen: Sequence[int], recipe: Recipe) -> None:
    """The rules have to say what was chosen."""
    made = make_plan(question.source, question.matrices, recipe, unfit=question.unfit)
    for unit, c in zip(question.units, chosen, strict=True):
        for i in unit.matrices:
            line, meant = made.lines[i], question.plans[c].lines[i]
            assert (line.format, line.rank) == (meant.format, meant.rank), line.matrix.name
