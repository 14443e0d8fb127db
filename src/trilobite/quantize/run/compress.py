"""From a checkpoint to a packed one: plan, quantize and write, few matrices in memory, resumable at any moment."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trilobite.checkpoint.journal import PARTIAL, as_json
from trilobite.checkpoint.layout import Unit
from trilobite.checkpoint.packed import REPORT, TIMES, PackedWriter
from trilobite.checkpoint.remote.store import is_url
from trilobite.checkpoint.remote.upload import Upload
from trilobite.checkpoint.roles import identify
from trilobite.checkpoint.source import Source, open_source
from trilobite.formats.bitpack import ROWS
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.quantize.columns.choose import with_column_scales
from trilobite.quantize.finetune.store import TunedStore
from trilobite.quantize.plan.plan import Plan, PlanLine, make_plan
from trilobite.quantize.run.card import CARD, is_ours, model_card
from trilobite.quantize.run.executor import Executor, Spread, Threads
from trilobite.quantize.run.identity import finished_ranks, keep_ranks, kept_ranks, run_identity
from trilobite.quantize.run.metadata import packed_config, packed_report, times_json
from trilobite.quantize.run.options import Options
from trilobite.quantize.run.planned import kept_plan, plan_within
from trilobite.quantize.run.work import Work
from trilobite.quantize.watcher import SILENT, Watcher
from trilobite.recipe import Recipe, load_recipe, needs_calibration

if TYPE_CHECKING:
    from trilobite.quantize.run.calibrated import Ground


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was made. records: by tensor name: error, seconds (0 for kept tensors)    seconds, fresh: of this run."""

    plan: Plan
    records: Mapping[str, Mapping[str, Any]]
    seconds: float
    fresh: int


def prepare(
    source: Source,
    recipe: Recipe,
    *,
    frequency: Mapping[str, Sequence[int]] | None = None,
    known_ranks: Mapping[str, int] | None = None,
    keep_unmatched: bool = False,
    tuned: bool = False,
    watcher: Watcher = SILENT,
) -> Plan:
    """Identify every tensor and resolve the recipe: what `trilobite plan` prints.

    tuned: leave room for fine-tuned sign vectors
    Raises ArchitectureError, CheckpointError, RecipeError or ShapeError; nothing is written.
    """
    # Brings transformers along, which `trilobite --help` need not wait for.
    from trilobite.quantize.plan.expected import unfit_matrices

    matrices = identify(source, extra_rules=recipe.roles, keep_unmatched=keep_unmatched)
    return make_plan(
        source,
        matrices,
        recipe,
        unfit=unfit_matrices(source, matrices, keep_unmatched=keep_unmatched),
        frequency=frequency,
        known_ranks=known_ranks,
        tuned=tuned,
        watcher=watcher,
    )


def compress(
    src: str | Path,
    dst: str | Path,
    recipe: str | Recipe | Budget,
    *,
    frequency: Mapping[str, Sequence[int]] | None = None,
    keep_unmatched: bool = False,
    calibration: Calibration | None = None,
    options: Options | None = None,
) -> Result:
    """Compress the checkpoint `src` (folder, hub id or URL) into the folder `dst`, or to the URL `dst`.

    recipe: what `load_recipe` gives, the name or file that it takes, or a budget to make one for
    calibration: what recipes with a calibrated method (gptq) or importance measure activations on; others take none.
    Killed at any moment, the same call continues and ends with the same bytes. Raises TrilobiteError subclasses;
    KeyboardInterrupt leaves a resumable state.
    """
    src, dst, options = str(src), str(dst), options or Options()
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    device = options.pick_device()
    if options.workers:  # theirs is another working directory
        src = str(Path(src).absolute()) if Path(src).exists() else src
    tuned = calibration is not None and bool(calibration.finetune)
    started = time.monotonic()
    source, planned = open_source(src, remote=True), None
    upload = Upload(dst, options.scratch, late=tuned) if is_url(dst) else None
    folder = upload.folder if upload else Path(dst).absolute() if options.workers else Path(dst)
    options.watcher.progress("read", 0, 1)
    if isinstance(recipe, Budget):
        if calibration is not None:  # quantized blocks are not known before the recipe is
            calibration = replace(calibration, propagate="original")
        planned = kept_plan(folder, recipe) or plan_within(
            source, recipe, keep_unmatched=keep_unmatched, calibration=calibration, options=options
        )
        recipe = planned.recipe
    source = with_column_scales(source, recipe, keep_unmatched=keep_unmatched)
    calibrator = planned.calibrator if planned else None
    calibrator = calibrator or _open_calibration(source, recipe, calibration)
    identity = run_identity(
        source,
        recipe,
        device,
        frequency=frequency,
        calibration=calibrator.identity if calibrator else None,
        planner=planned.account if planned else None,
    )
    finished = (folder / "config.json").exists()
    plan = prepare(
        source,
        recipe,
        frequency=frequency,
        known_ranks=finished_ranks(folder, identity, dst) if finished else kept_ranks(folder, identity),
        keep_unmatched=keep_unmatched,
        tuned=tuned,
        watcher=options.watcher,
    )
    if options.on_plan:
        options.on_plan(plan)
    if finished:
        # An earlier run was killed while it cleaned up.
        shutil.rmtree(folder / PARTIAL, ignore_errors=True)
        if upload:
            upload.finish()
        return Result(plan=plan, records={}, seconds=time.monotonic() - started, fresh=0)
    # Before anything is written: not every model can be run block by block.
    if calibrator and not calibrator.measured:
        calibrator.build(source, [line.matrix for line in plan.lines], device)
    units = [_unit(line) for line in plan.lines]
    with PackedWriter(folder, units, identity, upload=upload) as writer:
        keep_ranks(writer, plan)
        with _executor(source, plan, writer, device, options) as executor:
            work = Work(
                source=source,
                plan=plan,
                writer=writer,
                executor=executor,
                options=options,
                device=device,
                tuned=TunedStore(writer.work, writer.note),
            )
            fresh = _pack(work, calibrator)
        _finish(work, src, identity)
    return Result(plan=plan, records=writer.done, seconds=time.monotonic() - started, fresh=fresh)


@contextmanager
def _executor(
    source: Source, plan: Plan, writer: PackedWriter, device: torch.device, options: Options
) -> Iterator[Executor]:
    """Workers where there are any, else threads."""
    if options.workers is None:
        yield Threads(source, plan, writer, device, options.threads(device))
        return
    with options.workers as workers:
        yield Spread(workers, source, plan, writer)


def _finish(work: Work, src: str, identity: Mapping[str, Any]) -> None:
    """All tensors are written: add what stands beside them."""
    source, writer = work.source, work.writer
    source.check_unchanged()
    config = packed_config(source, work.plan.recipe.name, writer.done)
    companions = {path.name: path.read_bytes() for path in source.companions()}
    files = {"config.json": as_json(config), **companions}
    report = packed_report(source, src, work.plan, identity, writer.done, work.tuned.records, files)
    notes = {REPORT: report, TIMES: times_json(writer.done)}
    if is_ours(writer.dst / CARD):
        notes[CARD] = model_card(json.loads(report), config)
    writer.finish(config=config, notes=notes, companions=companions)


def _open_calibration(source: Source, recipe: Recipe, calibration: Calibration | None) -> "Ground | None":
    if calibration is None and recipe.importance == "none" and not needs_calibration(recipe):
        return None
    # Brings transformers along, which other recipes need not wait for.
    from trilobite.quantize.run.calibrated import open_calibration

    return open_calibration(source, recipe, calibration)


def _unit(line: PlanLine) -> Unit:
    m = line.matrix
    rows = line.packed_shape[0] if line.format else 0
    return Unit(
        name=m.name,
        tensors=line.stored,
        block=m.name if m.expert is None else f"{m.layer_key}.experts",
        rows=rows if rows % ROWS else None,
    )


def _pack(work: Work, calibrator: "Ground | None") -> int:
    """Pack all lines that no earlier run packed; returns how many there were."""
    lines, done = work.plan.lines, work.writer.done
    todo = [line for line in lines if line.matrix.name not in done]
    for line in lines:
        if line.matrix.name in done:
            work.done(line, done[line.matrix.name], fresh=False)
    work.run([line for line in todo if not line.calibrated])
    if calibrator:
        calibrator.pack(work, [line for line in todo if line.calibrated])
        work.writer.rewrite(work.tuned)
    return len(todo)
