"""From a budget to a recipe: what compress and plan do first where no recipe is named."""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trilobite.checkpoint.journal import IDENTITY, PARTIAL
from trilobite.checkpoint.packed import REPORT
from trilobite.checkpoint.roles import Matrix, identify, text_config
from trilobite.checkpoint.source import Source
from trilobite.errors import ArchitectureError
from trilobite.quantize.budget.candidates import Question, ask
from trilobite.quantize.budget.choose import choose, measure_errors
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.quantize.columns.choose import with_column_scales
from trilobite.quantize.columns.streams import find_streams
from trilobite.quantize.run.calibrated import Ground, open_calibration
from trilobite.quantize.run.options import Options
from trilobite.recipe import BODY_ROLES, CALIBRATED_METHODS, Recipe, Rule, recipe_from_dict

AFFORDABLE = 10**9
"""Weights of attention, MLPs and experts up to which the passes that GPTQ needs take minutes on two cores."""


def usual_method(source: Source, *, keep_unmatched: bool = False) -> str:
    """How codes are found where nobody says: by feeding errors back where its passes are affordable, else by search.

    Raises ArchitectureError for tensors that nobody knows, as `identify` does.
    """
    # Brings transformers along, which `trilobite --help` need not wait for.
    from trilobite.quantize.calibrate.model import BlockModel

    matrices = identify(source, keep_unmatched=keep_unmatched)
    weights = sum(math.prod(m.shape) for m in matrices if m.role in BODY_ROLES)
    if weights > AFFORDABLE or text_config(source).get("is_encoder_decoder"):
        return "search"
    try:
        BlockModel(source, matrices, torch.device("cpu"))
    except ArchitectureError:  # it cannot be run block by block
        return "search"
    return "gptq"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A recipe that was made for a budget.

    account: why, as plain data    calibrator: what measured importance, if anything did
    """

    recipe: Recipe
    account: Mapping[str, Any]
    calibrator: Ground | None = None


def plan_within(
    source: Source,
    budget: Budget,
    *,
    keep_unmatched: bool = False,
    calibration: Calibration | None = None,
    options: Options | None = None,
) -> Planned:
    """The recipe of least predicted loss within a budget; the same one every time.

    Reads some rows of the weights; where importance counts, runs the original model once, block by block.
    Raises BudgetError, and what `prepare` raises; nothing is written.
    """
    options = options or Options()
    question, calibrator = question_of(
        source, budget, keep_unmatched=keep_unmatched, calibration=calibration, options=options
    )
    importance = None if calibrator is None else calibrator.measured
    jobs = options.threads(options.pick_device())
    errors = measure_errors(question, importance, jobs=jobs, watcher=options.watcher)
    choice = choose(question, errors, importance)
    return Planned(recipe=choice.recipe, account=choice.account, calibrator=calibrator)


def question_of(
    source: Source,
    budget: Budget,
    *,
    keep_unmatched: bool,
    calibration: Calibration | None,
    options: Options,
) -> tuple[Question, Ground | None]:
    """What there is to choose from, and what measured the importance of columns, where that counts."""
    # Brings transformers along, which `trilobite --help` need not wait for.
    from trilobite.quantize.plan.expected import unfit_matrices

    device = options.pick_device()
    jobs, watcher = options.threads(device), options.watcher
    matrices = identify(source, keep_unmatched=keep_unmatched)
    unfit = unfit_matrices(source, matrices, keep_unmatched=keep_unmatched)
    recipe = frame(source, matrices, budget, calibration)
    source = with_column_scales(source, recipe, keep_unmatched=keep_unmatched)
    question = ask(source, matrices, unfit, recipe, budget)
    calibrator = None
    if recipe.importance != "none":
        calibrator = open_calibration(source, recipe, calibration, hessians=_rounds_by_hessians(budget))
        assert calibrator is not None
        if calibrator.build(source, matrices, device) and _rounds_by_hessians(budget):
            watcher.note(
                "errors are fed back (--method gptq): text passes through the original first; --method search makes no "
                "pass and loses more"
            )
        with tempfile.TemporaryDirectory() as workspace:
            calibrator.measure(question.plans[0].lines, jobs=jobs, workspace=Path(workspace), watcher=watcher)
    return question, calibrator


def frame(
    source: Source, matrices: Sequence[Matrix], budget: Budget, calibration: Calibration | None
) -> Recipe:
    """All of a recipe but what is to be found."""
    columns, importance = budget.columns, budget.importance
    known = bool(find_streams(source, matrices))
    if columns == "auto":
        columns = "sinkhorn" if known else "none"
    if importance == "auto" and calibration and calibration.brought:
        importance = "text"
    elif importance == "auto" and _rounds_by_hessians(budget):
        importance = "self"
    elif importance == "auto" and known and not budget.per_expert:  # which differ by how many tokens they see
        importance = "weights"
    elif importance == "auto":
        importance = "none" if text_config(source).get("is_encoder_decoder") else "builtin"
    keep = (Rule(roles=budget.keep),) if budget.keep else ()
    return Recipe(name=budget.name, rules=keep, columns=columns, importance=importance)


def _rounds_by_hessians(budget: Budget) -> bool:
    return budget.method in CALIBRATED_METHODS


def kept_plan(dst: Path, budget: Budget) -> Planned | None:
    """What an earlier run into `dst`, finished or not, planned for the same budget."""
    for path in (dst / REPORT, dst / PARTIAL / IDENTITY):
        try:
            found = json.loads(path.read_bytes())
            identity = found["identity"] if path.name == REPORT else found
            account = identity["planner"]
            if account["budget"] == budget.to_dict():
                return Planned(recipe=recipe_from_dict(identity["recipe"], budget.name), account=account)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None
