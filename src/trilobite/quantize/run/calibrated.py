"""Lines that need a Hessian: what to run the model on, where Hessians are kept, what trains the blocks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trilobite.checkpoint.roles import Matrix
from trilobite.checkpoint.source import Source
from trilobite.errors import CalibrationError, RecipeError
from trilobite.quantize.calibrate.builtin import builtin_calibration
from trilobite.quantize.calibrate.diagonals import Diagonals
from trilobite.quantize.calibrate.encoder_decoder import EncoderDecoder
from trilobite.quantize.calibrate.loop import Loop
from trilobite.quantize.calibrate.model import BlockModel
from trilobite.quantize.calibrate.pair_loop import PairLoop
from trilobite.quantize.calibrate.pairs import draw
from trilobite.quantize.calibrate.protocols import Receiver, Trainer
from trilobite.quantize.calibrate.sampled import PASSES, sample_windows, sampled_calibration
from trilobite.quantize.calibrate.store import HessianStore
from trilobite.quantize.calibrate.windows import FINETUNES, PAPER, PROPAGATIONS, Calibration, Windows
from trilobite.quantize.finetune.train import BATCH, Tuner, make_course
from trilobite.quantize.methods.hessian import DiagonalSum, HessianSum
from trilobite.quantize.plan.plan import PlanLine
from trilobite.quantize.run.guessed import Guessed
from trilobite.quantize.run.work import Work
from trilobite.quantize.watcher import SILENT, Watcher
from trilobite.recipe import LatticeFormat, Recipe, needs_calibration


class Calibrator:
    """One calibration of one checkpoint.

    windows: what the model runs on; None where it need not, with a finished folder of Hessians and no fine-tuning, and
    until it has written them itself
    store: the folder of Hessians, where one is asked for    identity: what interrupted runs must have in common
    measured: what `measure` found
    """

    def __init__(self, source: Source, calibration: Calibration) -> None:
        """Draw the windows, open the folder of Hessians. Raises CalibrationError; writes nothing."""
        _check(calibration)
        self.calibration = calibration
        self.windows: Windows | None = draw(source, calibration) if calibration.text else None
        self.store: HessianStore | None = None
        wanted = None if self.windows is None else self.windows.identity
        if calibration.sampled:
            wanted = {
                "importance": "self",
                "samples": calibration.samples,
                "context": calibration.context,
                "seed": calibration.seed,
                "passes": PASSES,
            }
        if folder := calibration.save or calibration.hessians:
            self.store = HessianStore(folder, source=source.fingerprint(), calibration=wanted)
            wanted = self.store.calibration
        assert wanted is not None
        self.identity: dict[str, Any] = dict(wanted)
        if calibration.finetune:
            assert self.windows is not None
            make_course(len(self.windows.ids), BATCH, 0)
            self.identity["finetune"] = calibration.finetune
        elif calibration.hessians:
            self.windows = None
        self._model: BlockModel | None = None
        self.measured: Diagonals | HessianStore | None = None

    def build(self, source: Source, matrices: Sequence[Matrix], device: torch.device) -> BlockModel | None:
        """Build the model, where one has to run. Raises ArchitectureError when it cannot be run block by block."""
        if self.windows is not None or self.calibration.sampled:
            kind = EncoderDecoder if self.windows and self.windows.pairs else BlockModel
            self._model = kind(source, matrices, device)
        return self._model

    def measure(
        self, lines: Sequence[PlanLine], *, jobs: int, workspace: Path, watcher: Watcher = SILENT
    ) -> None:
        """Find the importance that lines need, in the original model, before it is known what becomes of them."""
        calibrated = [line for line in lines if line.calibrated]
        if self.store is not None:
            self.collect(calibrated, jobs=jobs, workspace=workspace, watcher=watcher)
            self.measured = self.store
        else:
            self.measured = Diagonals()
            self._loop(self.measured, jobs, workspace, watcher, kind=DiagonalSum).walk(calibrated)

    def pack(self, work: Work, todo: Sequence[PlanLine]) -> None:
        """Pack lines that need Hessians, from the folder of them or as the model's run finds them; then train."""
        folder, watcher = work.writer.work, work.options.watcher
        calibrated = [line for line in work.plan.lines if line.calibrated]
        if self.store is not None:
            self.collect(calibrated, jobs=work.jobs, workspace=folder, watcher=watcher)
        if known := self.store or self.measured:
            # What was measured are diagonals, unless they come from a folder.
            served = [line for line in todo if self.store or line.importance]
            work.run(served, known)
            todo = [line for line in todo if not (self.store or line.importance)]
        trainer = self._trainer(work)
        if todo or trainer:
            kind = DiagonalSum if all(line.importance for line in calibrated) else HessianSum
            self._loop(work, work.jobs, folder, watcher, trainer, kind).walk(todo)

    def collect(
        self, lines: Sequence[PlanLine], *, jobs: int, workspace: Path, watcher: Watcher = SILENT
    ) -> None:
        """Fill the folder of Hessians with what it lacks for these lines; one that is only taken from stays as it is."""
        store = self.store
        assert store is not None
        names = [line.matrix.name for line in lines]
        if not self.calibration.save or not store.missing(names):
            return
        with store.writing():
            missing = store.missing(names)
            loop = self._loop(store, jobs, workspace, watcher)
            loop.walk([line for line in lines if line.matrix.name in missing])

    def _loop(
        self,
        receiver: Receiver,
        jobs: int,
        workspace: Path,
        watcher: Watcher,
        trainer: Trainer | None = None,
        kind: type[HessianSum] = HessianSum,
    ) -> Loop:
        assert self._model is not None
        if self.windows is None:
            assert self.calibration.sampled
            ids = sample_windows(self._model, self.calibration, jobs=jobs, watcher=watcher)
            self.windows = Windows(ids=ids, identity=self.identity)
        common: Any = {
            "ids": self.windows.ids,
            "calibration": self.calibration,
            "receiver": receiver,
            "jobs": jobs,
            "workspace": workspace,
            "watcher": watcher,
            "trainer": trainer,
            "kind": kind,
        }
        if isinstance(self._model, EncoderDecoder):
            return PairLoop(model=self._model, pairs=self.windows.pairs, **common)
        return Loop(model=self._model, **common)

    def _trainer(self, work: Work) -> Trainer | None:
        """What trains the quantized blocks, where that is asked for."""
        if not self.calibration.finetune:
            return None
        return Tuner(
            mode=self.calibration.finetune,
            lines=work.plan.lines,
            read=work.stored,
            exponent=work.exponent,
            quantize=lambda line, w: work.again(line, w, self.store),
            store=work.tuned,
            seed=self.calibration.seed,
            memory=self.calibration.memory,
            watcher=work.options.watcher,
        )


Ground = Calibrator | Guessed
"""Where Hessians or importance come from."""


def open_calibration(
    source: Source, recipe: Recipe, calibration: Calibration | None, *, hessians: bool = False
) -> Ground | None:
    """The calibration that a recipe needs, or None for one that needs none.

    hessians: they are needed, though the rules that need them are not known yet
    Raises RecipeError when a calibration is needed and absent or the other way round, CalibrationError for a bad one.
    """
    tunes = calibration is not None and calibration.finetune
    if tunes and not any(isinstance(rule.format, LatticeFormat) for rule in recipe.rules):
        raise RecipeError(
            f"recipe {recipe.name}: fine-tuning trains the sign vectors of lattice formats and it has none; choose "
            "quip2, quip3 or quip4, or drop --finetune"
        )
    if recipe.importance not in ("none", "text"):
        return _of_our_own(source, recipe, calibration, hessians=hessians or needs_calibration(recipe))
    if not needs_calibration(recipe) and not tunes:
        if calibration is None:
            return None
        raise RecipeError(
            f"recipe {recipe.name}: needs no calibration; drop --calibration, or choose what uses one "
            "(--importance text, --method gptq)"
        )
    if calibration is None or not calibration.brought:
        raise RecipeError(
            f"recipe {recipe.name}: needs a text to calibrate on; pass --calibration FILE, or --hessians FOLDER"
        )
    in_order = calibration.finetune.startswith(PAPER) and needs_calibration(recipe)
    if in_order and not (calibration.save or calibration.hessians):
        raise CalibrationError(
            f"finetune {calibration.finetune}: matrices are quantized one after the other by Hessians that are known "
            "before; add --propagate original --save-hessians FOLDER"
        )
    return Calibrator(source, calibration)


def _of_our_own(source: Source, recipe: Recipe, calibration: Calibration | None, *, hessians: bool) -> Ground:
    """What needs no text of the user's. Raises RecipeError where one is given, or needed.

    calibration: where to keep Hessians, if anything
    """
    if calibration is not None:
        _check(calibration)
    save = None if calibration is None else calibration.save
    if calibration is not None and (calibration.brought or not save):
        raise RecipeError(
            f"recipe {recipe.name}: importance {recipe.importance} takes no text of yours; choose importance text with "
            "--calibration FILE, or drop --calibration"
        )
    if recipe.importance == "weights" and hessians:
        raise RecipeError(
            f"recipe {recipe.name}: importance weights runs nothing, and its method needs Hessians; choose importance "
            "self, or importance text with --calibration FILE"
        )
    if save and not hessians:
        raise RecipeError(
            f"recipe {recipe.name}: rounds nothing by Hessians, so that there are none to keep; add --method gptq, or "
            "drop --save-hessians"
        )
    if recipe.importance == "weights":
        return Guessed()
    own = (
        builtin_calibration(source)
        if recipe.importance == "builtin"
        else sampled_calibration(source, hessians=hessians)
    )
    if calibration is not None:
        own = replace(own, save=save, memory=calibration.memory)
    return Calibrator(source, own)


def _check(calibration: Calibration) -> None:
    if calibration.propagate not in PROPAGATIONS:
        raise CalibrationError(
            f"propagate {calibration.propagate!r}: expected one of {', '.join(PROPAGATIONS)}"
        )
    if calibration.finetune and calibration.finetune not in FINETUNES:
        raise CalibrationError(f"finetune {calibration.finetune!r}: expected one of {', '.join(FINETUNES)}")
    if calibration.finetune and not calibration.text:
        raise CalibrationError(
            "fine-tuning runs the model on a text, which --hessians do not hold; give --calibration TEXT as well"
        )
    if calibration.save and calibration.hessians:
        raise CalibrationError(
            "Hessians are either collected (--save-hessians) or taken (--hessians); drop one"
        )
    if calibration.save and calibration.propagate != "original":
        raise CalibrationError(
            "Hessians behind quantized blocks belong to one recipe and are not kept; add --propagate original to "
            "--save-hessians"
        )
