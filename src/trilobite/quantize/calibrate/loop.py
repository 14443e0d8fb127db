"""Block by block through the original model: collect the Hessians of a block, hand them out, go on to the next.

Everything is the same whatever the number of threads: each forward pass and each sum runs on one thread, and sums are
taken in the order of the windows.

In memory at a time: the weights of one block; activations of all windows (twice where there are experts: what enters
the block, and what enters its experts), in a mapped file beyond the bound; the Hessians of the block's linears; and of
as many experts as fit the bound, each of which is handed out and forgotten before the next. The tokens of an expert are
taken from what entered the experts' module, and sent through its gate and up projections once more.
"""

import ctypes
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trilobite.errors import DestinationError
from trilobite.quantize.calibrate.model import BlockModel
from trilobite.quantize.calibrate.receiver import Packed, Receiver, Records
from trilobite.quantize.calibrate.routed import Routed
from trilobite.quantize.calibrate.stacked_experts import check_experts
from trilobite.quantize.calibrate.watch import Watch, same_inputs
from trilobite.quantize.calibrate.weights import Place
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.quantize.finetune.train import Tuner
from trilobite.quantize.methods.hessian import HessianSum, hessian_note, share, shrink
from trilobite.quantize.plan.plan import PlanLine, Progress
from trilobite.quantize.threads import Piece, results, thread_pool

BATCH = 4096
"""Tokens of one forward pass."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """How to run the model. jobs: threads    workspace: a folder for activations that do not fit in memory."""

    jobs: int
    workspace: Path
    progress: Progress | None = None
    on_note: Callable[[str], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What a walk through the blocks needs.

    ids: [S, T] int64    places: of the lines that need a Hessian    packed: where quantized blocks are propagated
    tuner: trains each block once its lines are quantized, and at last the whole model
    """

    model: BlockModel
    ids: Tensor
    calibration: Calibration
    places: Mapping[str, Place]
    run: Run
    receiver: Receiver
    packed: Packed | None = None
    tuner: Tuner | None = None

    def walk(self, todo: Sequence[PlanLine]) -> None:
        """Hand out the Hessians of the lines `todo`, in the order of blocks, and tune what is not tuned yet."""
        by_block: dict[int, list[PlanLine]] = {}
        outside: list[PlanLine] = []
        for line in todo:
            block = self.model.block_of(self.places[line.matrix.name])
            (outside if block is None else by_block.setdefault(block, [])).append(line)
        tuner, count = self.tuner, len(self.model.blocks)
        untuned = set() if tuner is None else {i for i in range(count) if tuner.wants(i)}
        last = count - 1 if outside else max({*by_block, *untuned}, default=-1)
        if last >= 0:
            self._blocks(by_block, outside, untuned, last)
        if tuner is not None:
            tuner.tune_all(self.model, self.ids, self.buffer)

    def _blocks(
        self,
        by_block: Mapping[int, Sequence[PlanLine]],
        outside: Sequence[PlanLine],
        untuned: Collection[int],
        last: int,
    ) -> None:
        """Blocks up to the last one that has something to do, then what is outside of them."""
        model, original = self.model, self.calibration.propagate == "original"
        advance = original and self.tuner is None  # the inputs of a block that is tuned are needed once more
        with thread_pool(self.run.jobs, "calibrate") as pool:
            step = _Step(self, pool, self._activations(), total=(last + 1) * (1 if advance else 2))
            for i in range(last + 1):
                model.load(model.blocks[i])
                if advance or i in by_block:
                    with self._around(i, by_block.get(i, [])):
                        step.collect(model.blocks[i], by_block.get(i, []), advance=advance)
                if self.tuner and i in untuned:
                    self.tuner.tune_block(model, i, step.hidden, self.buffer)
                if not advance and (i < last or outside):
                    if not original:
                        self._put_packed(i)
                    step.propagate(model.blocks[i])
                model.drop(model.blocks[i])
                _trim()
            if outside:
                with self._around(None, outside):
                    step.collect_head(outside)

    def _put_packed(self, block: int) -> None:
        """Replace a loaded block's weights by those that are packed."""
        model, packed = self.model, self.packed
        assert packed is not None
        for line in packed.finished():
            place = model.place(line.matrix)
            if place is not None and model.block_of(place) == block:
                model.put(place, packed.decoded(line))
        if self.tuner:
            self.tuner.put(model, model.blocks[block])

    def _around(self, block: int | None, lines: Sequence[PlanLine]) -> AbstractContextManager[None]:
        return self.receiver.block(block, lines) if lines else nullcontext()

    def _activations(self) -> Tensor:
        """What enters the first block, [S, T, H]."""
        model = self.model
        model.load("")
        model.load(model.blocks[0])
        model.check_arguments(self.ids)
        size = self.batch
        model.record(self.ids[:size])
        if rest := len(self.ids) % size:
            model.record(self.ids[-rest:])
        if self.tuner:
            for windows in sorted(self.tuner.sizes(len(self.ids))):
                model.record(self.ids[:windows])
        first = model.embed(self.ids[:1])
        hidden = self.buffer((*self.ids.shape, first.shape[-1]), first.dtype)
        for rows in self.batches():
            hidden[rows] = model.embed(self.ids[rows]).to(hidden.device)
        model.drop("")
        return hidden

    @property
    def batch(self) -> int:
        """Windows of one forward pass."""
        return min(len(self.ids), max(1, BATCH // self.ids.shape[1]))

    def batches(self) -> Iterator[slice]:
        """The windows, in order."""
        for first in range(0, len(self.ids), self.batch):
            yield slice(first, min(len(self.ids), first + self.batch))

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Activations of all windows: in memory, or in a mapped file that has no name any more.

        Raises DestinationError when the disk cannot hold it.
        """
        size, folder = torch.Size(shape).numel(), self.run.workspace
        if size * dtype.itemsize <= self.calibration.memory // 4:
            return torch.empty(shape, dtype=dtype)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="activations-") as file:
            try:
                if hasattr(os, "posix_fallocate"):  # a full disk under a mapping would kill the process later
                    os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
                return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
            except (OSError, RuntimeError) as e:
                raise DestinationError(
                    f"{folder}: activations of {size * dtype.itemsize / 1e9:.2f} GB do not fit on this disk; "
                    "free some space, or give more --memory, and run the same command again: it continues"
                ) from e

    def routed(self, width: int, dtype: torch.dtype) -> Tensor:
        """Room for what enters a module of experts."""
        return self.buffer((self.ids.numel(), width), dtype)

    def estimate(self) -> str:
        """What the run will hold, for the user to see before it starts."""
        config = self.model.model.config.get_text_config()
        width = int(config.hidden_size)
        activations = self.ids.numel() * width * self.model.dtype.itemsize
        block = max(
            sum(p.numel() * p.element_size() for p in self.model.module(name).parameters())
            for name in self.model.blocks
        )
        where = "on disk" if activations > self.calibration.memory // 4 else "in memory"
        return (
            f"calibration: {len(self.ids)} windows of {self.ids.shape[1]} tokens; {len(self.model.blocks)} blocks of up "
            f"to {block / 1e9:.2f} GB, activations of {2 * activations / 1e9:.2f} GB {where}, Hessians within "
            f"{self.calibration.memory / 2e9:.2f} GB where one expert's fit"
        )


class _Step:
    """Works on one block after the other. hidden: what enters the block, replaced by what leaves it."""

    def __init__(self, loop: Loop, pool: ThreadPoolExecutor, hidden: Tensor, *, total: int) -> None:
        self.loop, self.pool, self.hidden = loop, pool, hidden
        self.batches = list(loop.batches())
        self.passed, self.total = 0, total * len(self.batches)

    def propagate(self, block: str) -> None:
        """Replace the activations by the block's outputs."""

        def run(rows: slice) -> None:
            self.hidden[rows] = self._run(block, rows)

        for group in self._groups():
            list(self.pool.map(run, group))
            self._moved(len(group))

    def collect(self, block: str, lines: Sequence[PlanLine], *, advance: bool) -> None:
        """Hand out the Hessians of a block's lines. advance: also replace the activations by the block's outputs."""
        linears: dict[str, list[PlanLine]] = {}
        experts: dict[str, dict[int, list[PlanLine]]] = {}
        for line in lines:
            place = self.loop.places[line.matrix.name]
            if place.expert is None:
                linears.setdefault(place.module, []).append(line)
            else:
                check_experts(self.loop.model.module(place.module), place.module)
                experts.setdefault(place.module, {}).setdefault(place.expert, []).append(line)
        routed = {
            path: Routed(self.loop.model, path, self.loop.receiver, self.loop.routed) for path in experts
        }
        with Watch(self.loop.model, list(linears), list(experts)) as watch:
            sums, leaders = self._watched(block, watch, routed, advance=advance)
        self._hand_out(self._linear_work(linears, sums, leaders), self.loop.run.jobs)
        del sums
        for path, of_path in experts.items():
            routed[path].finish(of_path)
            work = (partial(routed[path].work, e, of_e) for e, of_e in sorted(of_path.items()))
            self._hand_out(work, routed[path].parallel(self.loop.run.jobs, self.loop.calibration.memory))

    def collect_head(self, lines: Sequence[PlanLine]) -> None:
        """Hand out the Hessian of what is outside of the blocks: the output head."""
        model = self.loop.model
        model.load("")
        total = HessianSum()
        for rows in self.batches:
            hidden = self.hidden[rows].to(model.device)
            total.add(model.head_input(self.loop.ids[rows], hidden).flatten(0, -2))
        work = partial(self.loop.receiver.take, list(lines), total.mean(), hessian_note(total.tokens, 1))
        self._hand_out([work], 1)
        model.drop("")

    def _watched(
        self, block: str, watch: Watch, routed: Mapping[str, Routed], *, advance: bool
    ) -> tuple[dict[str, HessianSum], dict[str, str]]:
        """Run the block on all windows; returns the sums by first linear, and the first linear of each linear."""
        sums: dict[str, HessianSum] = {}
        leaders: dict[str, str] = {}

        def run(rows: slice) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
            watch.begin()
            out = self._run(block, rows)
            inputs = watch.inputs()
            if not leaders:
                leaders.update(same_inputs(inputs))
            if advance:
                self.hidden[rows] = out
            found = {name: x for name, x in inputs.items() if leaders.get(name, name) == name}, watch.routed()
            watch.begin()
            return found

        for group in self._groups(first=1):
            found = list(self.pool.map(run, group))
            for name in found[0][0]:
                sums.setdefault(name, HessianSum())
            list(self.pool.map(partial(_add_all, found), sums.items()))
            for rows, (_, seen) in zip(group, found, strict=True):
                for path, (states, index) in seen.items():
                    routed[path].put(rows.start * self.loop.ids.shape[1], states, index)
            self._moved(len(group))
        return sums, leaders

    def _run(self, block: str, rows: slice) -> Tensor:
        model = self.loop.model
        return model.run(block, self.hidden[rows].to(model.device)).to(self.hidden.device)

    def _groups(self, first: int | None = None) -> Iterator[list[slice]]:
        """Batches that run at the same time; the first group may be smaller."""
        at, size = 0, first or self.loop.run.jobs
        while at < len(self.batches):
            yield self.batches[at : at + size]
            at, size = at + size, self.loop.run.jobs

    def _linear_work(
        self,
        linears: Mapping[str, list[PlanLine]],
        sums: Mapping[str, HessianSum],
        leaders: Mapping[str, str],
    ) -> Iterator[Callable[[], Records]]:
        """One piece of work for the lines that share an input. A linear that never ran counts as having seen nothing."""
        shared: dict[str, list[PlanLine]] = {}
        for path, lines in linears.items():
            shared.setdefault(leaders.get(path, path), []).extend(lines)
        for path, lines in shared.items():
            k = lines[0].matrix.shape[1]
            seen = sums.get(path)
            tokens = seen.tokens if seen else 0
            part = share(tokens, k)
            h = shrink(seen.mean() if seen else None, None, part, k)
            yield partial(self.loop.receiver.take, lines, h, hessian_note(tokens, part))

    def _hand_out(self, work: Iterable[Callable[[], Records]], jobs: int) -> None:
        """Do pieces of work, at most `jobs` at a time."""
        pieces = (Piece(call=call) for call in work)
        for records in results(self.pool, pieces, jobs=jobs):
            for line, record in records:
                self.loop.receiver.done(line, record)

    def _moved(self, batches: int) -> None:
        self.passed += batches
        if self.loop.run.progress:
            self.loop.run.progress("calibrate", self.passed, self.total)


def _add_all(found: Sequence[tuple[Mapping[str, Tensor], Any]], item: tuple[str, HessianSum]) -> None:
    """Add one linear's inputs of several batches, in their order."""
    name, total = item
    for inputs, _ in found:
        total.add(inputs[name])


def _trim() -> None:
    """Give freed memory back to the system: glibc keeps the pieces that threads freed, and they add up."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
