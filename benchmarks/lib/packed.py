"""Compressed models in a work folder, which later runs use again, and what they are made with."""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.lib.script import TRAINING_TEXT
from trilobite.checkpoint.roles import identify
from trilobite.checkpoint.source import open_source
from trilobite.errors import DestinationError
from trilobite.evaluate.frequency import expert_frequency, load_frequency, save_frequency
from trilobite.evaluate.perplexity import tokenize_file, windows
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.quantize.plan.plan import Plan
from trilobite.quantize.run.calibrated import Calibrator
from trilobite.quantize.run.compress import compress, prepare
from trilobite.quantize.run.options import Options
from trilobite.recipe import BODY_ROLES, PRESETS, Recipe, needs_calibration
from trilobite.runtime.load import load, load_tokenizer

FREQUENCY_TOKENS = 65_536
Frequency = dict[str, list[int]]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One compressed model on disk.

    bits: per parameter, every byte counted    body: per quantized weight of attention, MLPs and experts
    """

    name: str
    path: Path
    bytes: int
    bits: float
    body: float
    seconds: float
    plan: Plan


def hessians(model: Path, work: Path, calibration: Calibration) -> tuple[Calibration, float]:
    """The Hessians of the original model, collected once for all recipes, and the seconds that took."""
    folder = work / model.name / "hessians"
    clock = folder.with_name("hessians.seconds")
    source = open_source(str(model))
    lines = [line for line in prepare(source, PRESETS["gptq3"]).lines if line.method == "gptq"]
    started = time.monotonic()
    calibrator = Calibrator(source, replace(calibration, propagate="original", save=folder))
    assert calibrator.store is not None
    if calibrator.store.missing([line.matrix.name for line in lines]):
        calibrator.build(source, identify(source), torch.device("cpu"))
        calibrator.collect(lines, jobs=os.cpu_count() or 1, workspace=work)
        clock.write_text(f"{time.monotonic() - started:.3f}\n")
    return Calibration(hessians=folder), float(clock.read_text())


def pack(
    model: Path,
    recipe: Recipe | Budget,
    work: Path,
    *,
    frequency: Frequency | None,
    calibration: Calibration | None = None,
    fresh: bool = False,
    name: str = "",
) -> Packed:
    """Compress into the work folder, or use what an earlier run left there. name: of its folder there."""
    name = name or recipe.name
    folder = work / model.name / name
    clock = folder.with_name(f"{folder.name}.seconds")
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    run = partial(
        compress,
        str(model),
        folder,
        recipe,
        frequency=frequency,
        calibration=calibration if isinstance(recipe, Budget) or needs_calibration(recipe) else None,
        options=Options(device="cpu"),
    )
    try:
        result = run()
    except DestinationError:  # of an older version, or another recipe of this name: the folder is ours
        shutil.rmtree(folder)
        result = run()
    if result.fresh:
        clock.write_text(f"{result.seconds:.3f}\n")
    lines = [line for line in result.plan.lines if line.format and line.matrix.role in BODY_ROLES]
    size = bytes_on_disk(folder)
    return Packed(
        name=name,
        path=folder,
        bytes=size,
        bits=8 * size / parameters(result.plan),
        body=8 * sum(line.nbytes for line in lines) / sum(numel(line.matrix.shape) for line in lines),
        seconds=float(clock.read_text()),
        plan=result.plan,
    )


def bytes_on_disk(folder: Path) -> int:
    """Every file: weights, headers, index, config, report, tokenizer."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def parameters(plan: Plan) -> int:
    """Parameters of the whole model."""
    return sum(numel(line.matrix.shape) for line in plan.lines)


def numel(shape: Sequence[int]) -> int:
    """Elements of a tensor of this shape."""
    return torch.Size(shape).numel()


def frequencies(model: Path, work: Path) -> Frequency:
    """How often each expert is used on training text, not the measured one; kept in the work folder."""
    path = work / model.name / "frequency.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        excerpt = path.with_name("frequency.txt")
        excerpt.write_text(
            TRAINING_TEXT.read_text(encoding="utf-8")[: FREQUENCY_TOKENS * 6], encoding="utf-8"
        )
        ids = windows(tokenize_file(load_tokenizer(str(model)), excerpt)[:FREQUENCY_TOKENS], 256)
        counts = expert_frequency(load(str(model), dtype=torch.float32), ids, batch=16)
        save_frequency(path, counts, model_name=model.name, text=TRAINING_TEXT.name, tokens=ids.numel())
    return load_frequency(path)
