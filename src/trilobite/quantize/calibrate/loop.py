"""Block by block through the original model: collect the Hessians of a block, hand them out, go on to the next.

Everything is the same whatever the number of threads: each forward pass and each sum runs on one thread, and sums are
taken in the order of the windows.

In memory at a time: the weights of one block; activations of all windows (twice where there are experts: what enters
the block, and what enters its experts), in a mapped file beyond the bound; the Hessians of the block's linears; and of
as many experts as fit the bound, each of which is handed out and forgotten before the next. The tokens of an expert are
taken from what entered the experts' module, and sent through its gate and up projections once more.
"""

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trilobite.pool import ThreadPool
from trilobite.quantize.calibrate.buffer import make_buffer
from trilobite.quantize.calibrate.inputs import BlockInputs
from trilobite.quantize.calibrate.model import BlockModel
from trilobite.quantize.calibrate.protocols import Receiver, Records, Trainer
from trilobite.quantize.calibrate.routed import Routed
from trilobite.quantize.calibrate.stacked_experts import check_experts
from trilobite.quantize.calibrate.watch import Watch, same_inputs
from trilobite.quantize.calibrate.whole import Whole, WholeWindows
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.quantize.methods.hessian import DiagonalSum, HessianSum, hessian_note, own_part, shrink
from trilobite.quantize.naming import naming
from trilobite.quantize.plan.plan import PlanLine
from trilobite.quantize.threads import Piece, results, single_threaded_torch, thread_pool
from trilobite.quantize.watcher import SILENT, Watcher

PASS_TOKENS = 4096
"""Tokens of one forward pass."""

Seen = dict[str, Tensor]
"""What entered linears, [T, K]."""
RoutedTokens = dict[str, tuple[Tensor, Tensor]]
"""What entered modules of experts, [T, H], and the experts of each token, [T, A]."""
Pieces = tuple[Iterable[Piece[Records]], Callable[[], int]]
"""Lines to be packed or kept, Hessian by Hessian, and how many Hessians may be in work at a time."""


@dataclass(kw_only=True)
class Loop:
    """A walk through the blocks of a model.

    ids: [S, T] int64    jobs: threads    workspace: a folder for activations that do not fit in memory
    trainer: trains each block once its lines are packed, and at last the whole model
    kind: what is summed up: Hessians, or their diagonals alone
    """

    model: BlockModel
    ids: Tensor
    calibration: Calibration
    receiver: Receiver
    jobs: int
    workspace: Path
    watcher: Watcher = SILENT
    trainer: Trainer | None = None
    kind: type[HessianSum] = HessianSum

    _pool: ThreadPool = field(init=False)
    _hidden: Tensor = field(init=False)  # what enters the block, replaced by what leaves it: [S, T, H]
    _passed: int = field(init=False, default=0)
    _passes: int = field(init=False, default=0)

    def walk(self, lines: Sequence[PlanLine]) -> None:
        """Hand out the Hessians of lines, in the order of blocks, and train what is not trained yet."""
        with single_threaded_torch():
            by_block, outside = self._sorted(lines)
            self.watcher.note(self._estimate())
            count = len(self.model.blocks)
            untrained = {i for i in range(count) if self.trainer and self.trainer.wants(i)}
            last = count - 1 if outside else max({*by_block, *untrained}, default=-1)
            if last >= 0:
                self._blocks(by_block, outside, untrained, last)
            if self.trainer and self.trainer.wants_all():
                self.model.load("")
                self.model.load(self.model.blocks[0])
                self.trainer.tune_all(self.model, self._whole(), self.buffer)
                self.model.drop("")

    def _sorted(self, lines: Sequence[PlanLine]) -> tuple[dict[int, list[PlanLine]], list[PlanLine]]:
        """Lines by block, and those outside of the blocks. What the model never runs is told at once."""
        by_block: dict[int, list[PlanLine]] = {}
        outside: list[PlanLine] = []
        unseen: list[PlanLine] = []
        for line in lines:
            place = self.model.place(line.matrix)
            block = None if place is None else self.model.block_of(place)
            if place is None:
                unseen.append(line)
            elif block is None:
                outside.append(line)
            else:
                by_block.setdefault(block, []).append(line)
        if unseen:
            self.receiver.unseen(unseen)
        return by_block, outside

    def _blocks(
        self,
        by_block: Mapping[int, Sequence[PlanLine]],
        outside: Sequence[PlanLine],
        untrained: Collection[int],
        last: int,
    ) -> None:
        """Blocks up to the last one that has something to do, then what is outside of them."""
        model, original = self.model, self.calibration.propagate == "original"
        # One pass both watches a block and moves on, unless the outputs of another block are wanted: of the packed
        # one, whose codes need the Hessians first, or unless training needs the inputs once more.
        advance = original and self.trainer is None
        with thread_pool(max(self.jobs, self._slots()), "calibrate") as self._pool:
            self._passed, self._passes = 0, (last + 1) * (1 if advance else 2) * len(self._batches())
            self._moved(0)
            for i, block in enumerate(model.blocks[: last + 1]):
                if any(block == stack[0] for stack in model.stacks):
                    self._hidden = self._entered(i)
                model.load(block)
                lines = by_block.get(i, [])
                if advance or lines:
                    self._hand_out(i, lines, self._hessians(block, lines, advance=advance))
                if self.trainer and i in untrained:
                    self.trainer.tune_block(model, i, self._inputs(), self.buffer)
                if not advance and (i < last or outside):
                    if not original:
                        self.receiver.put(model, i)
                    self._propagate(block)
                model.drop(block)
                _trim()
            if outside:
                self._hand_out(None, outside, self._head_hessian(outside))

    def _hand_out(self, block: int | None, lines: Sequence[PlanLine], hessians: Iterable[Pieces]) -> None:
        """Let the receiver take the Hessians of a block as they are found."""
        with self.receiver.block(block, lines) if lines else nullcontext():
            for pieces, jobs in hessians:
                for records in results(self._pool, pieces, jobs=jobs):
                    for line, record in records:
                        self.receiver.done(line, record)

    def _hessians(self, block: str, lines: Sequence[PlanLine], *, advance: bool) -> Iterator[Pieces]:
        """The Hessians of a block's lines. advance: also replace the activations by the block's outputs."""
        linears: dict[str, list[PlanLine]] = {}
        experts: dict[str, dict[int, list[PlanLine]]] = {}
        for line in lines:
            place = self.model.place(line.matrix)
            assert place is not None
            if place.expert is None:
                linears.setdefault(place.module, []).append(line)
            else:
                check_experts(self.model.module(place.module), place.module)
                experts.setdefault(place.module, {}).setdefault(place.expert, []).append(line)
        routed = {path: Routed(self.model, path, self._room, self.kind) for path in experts}
        with Watch(self.model, list(linears), list(experts)) as watch:
            sums, leaders = self._watched(block, watch, routed, advance=advance)
        yield self._of_linears(linears, sums, leaders), self._slots
        del sums  # before the experts' Hessians come
        for path, of_path in experts.items():
            module = routed[path]
            module.finish(of_path)
            pieces = (
                Piece(call=partial(self._of_expert, module, e, of_e)) for e, of_e in sorted(of_path.items())
            )
            yield pieces, partial(self._parallel, module)

    def _watched(
        self, block: str, watch: Watch, routed: Mapping[str, Routed], *, advance: bool
    ) -> tuple[dict[str, HessianSum], dict[str, str]]:
        """Run the block on all windows; returns the sums by first linear, and the first linear of each linear."""
        sums: dict[str, HessianSum] = {}
        leaders: dict[str, str] = {}

        def run(rows: slice) -> tuple[Seen, RoutedTokens]:
            watch.begin()
            out = self._run(block, rows)
            inputs = watch.inputs()
            if not leaders:
                leaders.update(same_inputs(inputs))
            if advance:
                self._hidden[self._place(rows)] = out
            kept = {name: x for name, x in inputs.items() if leaders.get(name, name) == name}
            seen = self._real(rows, kept, watch.routed())
            watch.begin()
            return seen

        # The first batch runs alone: it tells which linears share an input, before others are summed.
        for batches in self._side_by_side(first=1):
            seen = list(self._pool.map(run, batches))
            for name in seen[0][0]:
                sums.setdefault(name, self.kind())
            # A thread for each sum, never two for one: fp32 sums depend on their order.
            list(self._pool.map(partial(_add_all, seen), sums.items()))
            for _, to_experts in seen:
                for path, (states, index) in to_experts.items():
                    routed[path].put(states, index)
            self._moved(len(batches))
        return sums, leaders

    def _of_linears(
        self,
        linears: Mapping[str, list[PlanLine]],
        sums: Mapping[str, HessianSum],
        leaders: Mapping[str, str],
    ) -> Iterator[Piece[Records]]:
        """One piece for the lines that share an input. A linear that never ran counts as having seen nothing."""
        shared: dict[str, list[PlanLine]] = {}
        for path, lines in linears.items():
            shared.setdefault(leaders.get(path, path), []).extend(lines)
        for path, lines in shared.items():
            k = lines[0].matrix.shape[1]
            seen = sums.get(path)
            tokens = seen.tokens if seen else 0
            part = own_part(tokens, k, self.kind)
            with naming(lines[0].matrix.name):
                hessian = shrink(seen.mean() if seen else None, None, part, k, self.kind)
            yield Piece(call=partial(self.receiver.take, lines, hessian, hessian_note(tokens, part)))

    def _slots(self) -> int:
        """Hessians in work at a time."""
        return self.receiver.slots(self.jobs)

    def _parallel(self, module: Routed) -> int:
        """Experts in work at a time, whose Hessians are large together."""
        return module.parallel(self._slots(), self.receiver.copies, self.calibration.memory)

    def _of_expert(self, module: Routed, expert: int, lines: Sequence[PlanLine]) -> Records:
        """Called by threads: experts are as many as the layer has, and a Hessian of each would not fit."""
        records: Records = []
        for of_side, hessian, note in module.hessians(expert, lines):
            records += self.receiver.take(of_side, hessian, note)
        return records

    def _head_hessian(self, lines: Sequence[PlanLine]) -> Iterator[Pieces]:
        """The Hessian of what is outside of the blocks: the output head."""
        model = self.model
        model.load("")
        total = self.kind()
        for rows in self._batches():
            total.add(self._head_input(rows))
        with naming(lines[0].matrix.name):
            hessian = total.mean()
        yield (
            [Piece(call=partial(self.receiver.take, lines, hessian, hessian_note(total.tokens, 1)))],
            self._slots,
        )
        model.drop("")

    def _head_input(self, rows: slice) -> Tensor:
        """What enters the head for a batch, [tokens, H]."""
        hidden = self._hidden[rows].to(self.model.device)
        return self.model.head_input(self.ids[rows], hidden).flatten(0, -2)

    def _propagate(self, block: str) -> None:
        """Replace the activations by the block's outputs."""

        def run(rows: slice) -> None:
            self._hidden[self._place(rows)] = self._run(block, rows)

        for batches in self._side_by_side():
            list(self._pool.map(run, batches))
            self._moved(len(batches))

    def _run(self, block: str, rows: slice) -> Tensor:
        hidden = self._hidden[self._place(rows)].to(self.model.device)
        return self.model.run(block, hidden, rows.start).to(self._hidden.device)

    def _place(self, rows: slice) -> tuple[slice, slice]:
        """Where the windows of a batch lie in `_hidden`, padding left out."""
        return rows, slice(None)

    def _inputs(self) -> BlockInputs:
        """What enters the block, to be trained on."""
        return BlockInputs(self._hidden)

    def _real(self, rows: slice, inputs: Seen, routed: RoutedTokens) -> tuple[Seen, RoutedTokens]:
        """What entered the linears and the experts of a block, without padding."""
        return inputs, routed

    def _entered(self, index: int) -> Tensor:
        """What enters a stack's first block, [S, T, H]; the model learns what blocks are called with besides."""
        model = self.model
        model.load("")
        model.load(model.blocks[0])
        model.check_arguments(self.ids)
        sizes = {rows.stop - rows.start for rows in self._batches()}
        for windows in sorted(sizes | (self.trainer.sizes(len(self.ids)) if self.trainer else set())):
            model.learn_arguments(self.ids[:windows])
        first = model.embed(self.ids[:1])
        hidden = self.buffer((*self.ids.shape, first.shape[-1]), first.dtype)
        for rows in self._batches():
            hidden[rows] = model.embed(self.ids[rows]).to(hidden.device)
        model.drop("")
        return hidden

    def _whole(self) -> Whole:
        """What the whole model is trained on."""
        assert self.trainer is not None
        return WholeWindows(self.model, self.ids, self.trainer.sizes(len(self.ids)))

    def _batches(self) -> list[slice]:
        """The windows of each forward pass, in order."""
        windows = len(self.ids)
        size = min(windows, max(1, PASS_TOKENS // self._length))
        return [slice(first, min(windows, first + size)) for first in range(0, windows, size)]

    @property
    def _length(self) -> int:
        """Tokens of the longest window."""
        return self.ids.shape[1]

    def _side_by_side(self, first: int | None = None) -> Iterator[list[slice]]:
        """Batches that run at the same time, one a thread; the first group may be smaller."""
        batches, size = self._batches(), first or self.jobs
        while batches:
            yield batches[:size]
            batches, size = batches[size:], self.jobs

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Activations of all windows. Raises DestinationError when the disk cannot hold what memory cannot."""
        return make_buffer(shape, dtype, within=self.calibration.memory // 4, folder=self.workspace)

    def _room(self, width: int, dtype: torch.dtype) -> Tensor:
        """For what enters a module of experts."""
        return self.buffer((len(self.ids) * self._length, width), dtype)

    def _moved(self, batches: int) -> None:
        self._passed += batches
        self.watcher.progress("calibrate", self._passed, self._passes)

    def _estimate(self) -> str:
        """What the run will hold, for the user to see before it starts."""
        config = self.model.model.config.get_text_config()
        width = int(config.hidden_size)
        activations = len(self.ids) * self._length * width * self.model.dtype.itemsize
        block = max(
            sum(p.numel() * p.element_size() for p in self.model.module(name).parameters())
            for name in self.model.blocks
        )
        where = "on disk" if activations > self.calibration.memory // 4 else "in memory"
        full = f", Hessians within {self.calibration.memory / 2e9:.2f} GB where one expert's fit"
        return (
            f"calibration: {len(self.ids)} windows of {self._length} tokens; {len(self.model.blocks)} blocks of up to "
            f"{block / 1e9:.2f} GB, activations of {2 * activations / 1e9:.2f} GB {where}"
            f"{'' if self.kind is DiagonalSum else full}"
        )


def _add_all(seen: Sequence[tuple[Mapping[str, Tensor], Any]], item: tuple[str, HessianSum]) -> None:
    """Add one linear's inputs of several batches, in their order."""
    name, total = item
    for inputs, _ in seen:
        total.add(inputs[name])


def _trim() -> None:
    """Give freed memory back to the system: glibc keeps the pieces that threads freed, and they add up."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
