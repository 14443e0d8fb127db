"""Lines that need a Hessian: packed as the model's run block by block finds it, and tuned where that is asked for."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trilobite.formats.weight import dequantize
from trilobite.quantize.calibrate.loop import Run
from trilobite.quantize.calibrate.receiver import Record, Records
from trilobite.quantize.finetune.store import TunedStore
from trilobite.quantize.finetune.train import Tuner
from trilobite.quantize.plan.plan import PlanLine, packed_weight
from trilobite.quantize.run.calibrator import Calibrator
from trilobite.quantize.run.lines import Work
from trilobite.quantize.threads import single_threaded_torch


@dataclass(frozen=True, kw_only=True)
class Packer:
    """Receives Hessians, turns them into packed matrices on disk, and reads these back for the next block."""

    work: Work
    tuned: TunedStore

    def block(self, index: int | None, lines: Sequence[PlanLine]) -> AbstractContextManager[None]:
        """Lines are written one by one."""
        return nullcontext()

    def take(self, lines: Sequence[PlanLine], hessian: Tensor, note: Mapping[str, Any]) -> Records:
        """Quantize and write the lines that share a Hessian."""
        return [(line, self.work.finish(line, (hessian, note))) for line in lines]

    def done(self, line: PlanLine, record: Record) -> None:
        """Tell who looks on."""
        self.work.tell(line, record, fresh=True)

    def finished(self) -> list[PlanLine]:
        """The quantized lines that are on disk."""
        return [x for x in self.work.plan.lines if x.format and x.matrix.name in self.work.writer.done]

    def decoded(self, line: PlanLine) -> Tensor:
        """A matrix as the packed model will compute with it, [N, K] fp32."""
        return dequantize(packed_weight(line, self.stored(line), self.work.device))

    def stored(self, line: PlanLine) -> list[Tensor]:
        """The tensors of a finished line, tuned where they are."""
        found = self.work.writer.read(self.work.units[line.matrix.name])
        return [self.tuned.get(t.name, data) for t, data in zip(line.stored, found, strict=True)]


def run_calibrated(work: Work, todo: Sequence[PlanLine], calibrator: Calibrator, tuned: TunedStore) -> None:
    """Pack the lines `todo`, all of which need Hessians: from a folder of them, or as the model's run finds them.

    tuned: receives what fine-tuning finds
    """
    options = work.options
    run = Run(
        jobs=work.jobs,
        workspace=work.writer.work,
        progress=options.progress,
        on_note=options.on_note,
    )
    packer = Packer(work=work, tuned=tuned)
    tuner = _tuner(packer, calibrator)
    if calibrator.store is not None:
        with single_threaded_torch():
            calibrator.collect([line for line in work.plan.lines if line.calibrated], run)
        work.run(todo, calibrator.store)
        todo = []
    if todo or tuner:
        with single_threaded_torch():
            calibrator.distribute(todo, run, packer, tuner)


def _tuner(packer: Packer, calibrator: Calibrator) -> Tuner | None:
    """What trains the quantized blocks, where that is asked for."""
    calibration, options = calibrator.calibration, packer.work.options
    if not calibration.finetune:
        return None
    return Tuner(
        mode=calibration.finetune,
        lines=packer.work.plan.lines,
        read=packer.stored,
        store=packer.tuned,
        seed=calibration.seed,
        memory=calibration.memory,
        progress=options.progress,
        on_note=options.on_note,
    )
