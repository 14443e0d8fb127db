"""How much a model suffers from errors in each of its units: what `trilobite sensitivity` measures."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from trilobite.checkpoint.roles import identify, text_config
from trilobite.checkpoint.source import Source
from trilobite.errors import CalibrationError
from trilobite.formats.weight import dequantize
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.budget.loss import of_columns
from trilobite.quantize.budget.measured import to_dict
from trilobite.quantize.budget.sensitivity import Prober
from trilobite.quantize.budget.units import make_units
from trilobite.quantize.calibrate.model import BlockModel
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.quantize.columns.choose import with_column_scales
from trilobite.quantize.plan.plan import PlanLine, make_plan
from trilobite.quantize.run.calibrated import Calibrator, open_calibration
from trilobite.quantize.run.lines import quantize_line
from trilobite.quantize.run.options import Options
from trilobite.quantize.run.planned import frame
from trilobite.recipe import BODY_ROLES, Rule, parse_format

PROBE = parse_format("int3-g16-super")
"""What units are rounded to: errors as in use, small enough that their effects add up."""
TOKENS = 2048
"""What a divergence is measured on."""


def measure_sensitivity(
    source: Source,
    *,
    tokens: int = TOKENS,
    calibration: Calibration | None = None,
    keep_unmatched: bool = False,
    options: Options | None = None,
) -> dict[str, Any]:
    """Round one unit at a time, with column scales and importance as a planned recipe has them, and see what it costs.

    calibration: a text in the place of the one that comes along    returns: plain data, which `--sensitivity` reads
    Raises what `plan_within` raises, and CalibrationError for a model that reads pairs.
    """
    # Brings transformers along, which `trilobite --help` need not wait for.
    from trilobite.quantize.plan.expected import unfit_matrices

    options = options or Options()
    device = options.pick_device()
    jobs, watcher = options.threads(device), options.watcher
    if text_config(source).get("is_encoder_decoder"):
        raise CalibrationError(f"{source}: sensitivity is measured of decoder-only models; plan without it")
    matrices = identify(source, keep_unmatched=keep_unmatched)
    unfit = unfit_matrices(source, matrices, keep_unmatched=keep_unmatched)
    importance = "text" if calibration else "builtin"
    recipe = frame(source, matrices, Budget(bits=PROBE.bits, importance=importance), calibration)
    recipe = replace(recipe, rules=(Rule(roles=BODY_ROLES, format=PROBE),))
    source = with_column_scales(source, recipe, keep_unmatched=keep_unmatched)
    plan = make_plan(source, matrices, recipe, unfit=unfit)
    calibrator = open_calibration(source, recipe, calibration)
    assert isinstance(calibrator, Calibrator)
    assert calibrator.windows is not None
    model = calibrator.build(source, matrices, device)
    assert isinstance(model, BlockModel)
    with tempfile.TemporaryDirectory() as workspace:
        calibrator.measure(plan.lines, jobs=jobs, workspace=Path(workspace), watcher=watcher)

    def rounded(line: PlanLine, w: Tensor) -> Tensor:
        h = of_columns(calibrator.measured, line.matrix)
        n, k = line.matrix.shape
        return dequantize(quantize_line(w, line, recipe, h)[0])[:n, :k]

    ids = calibrator.windows.ids
    ids = ids[: max(1, tokens // ids.shape[1])]
    units = make_units([line.matrix for line in plan.lines], per_expert=False)
    units = [unit for unit in units if all(plan.lines[i].format for i in unit.matrices)]
    found = Prober(model, plan, calibrator.measured, ids, rounded).measure(units, watcher)
    return to_dict(found, source=source.path.name, format=str(PROBE), tokens=ids.numel())
