"""Fine-tuning of what is not codes (QuIP# section 5 and Algorithm 5): sign vectors, norms, routers, a 16-bit head.

A block's codes are all found first. Then the vectors s of its transforms, as real numbers, its norms and its router are
trained so that the block gives what the original one gives for the same inputs. `full` goes on with the whole model,
against the original's distribution of the next token. In the paper's order (`paper-block`, `paper-full`) the matrices
of a block are quantized one after the other, and after each of them the block is trained, those that are left included.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trilobite.errors import CalibrationError
from trilobite.quantize.calibrate.inputs import TOGETHER, BlockInputs
from trilobite.quantize.calibrate.model import BlockModel, Exchange, as_it_is
from trilobite.quantize.calibrate.protocols import Buffer
from trilobite.quantize.calibrate.whole import Block, Whole
from trilobite.quantize.calibrate.windows import PAPER
from trilobite.quantize.finetune.part import Part
from trilobite.quantize.finetune.store import WHOLE, TunedStore, part_name
from trilobite.quantize.plan.plan import PlanLine
from trilobite.quantize.watcher import SILENT, Watcher
from trilobite.recipe import LatticeFormat

RATE, SIGNS_RATE = 5e-5, 5e-4
"""Adam's learning rates (section D): of norms, routers and a head, and of sign vectors."""
EPOCHS = 5
PATIENCE = 2
"""Epochs in a row without a lower loss on the windows set aside that end the training."""
BATCH = 8
"""Windows of a step within a block; of a step through the whole model it is one, as published."""
VALIDATION = 3
"""Every third window is set aside: the paper trains on 256 and validates on 128."""
TRAINING_BYTES = 24
"""Memory of a weight in training: codes decoded, both rotations, the parameter, and gradients."""

PROJECTIONS = ("gate", "up", "down")
"""Of experts, in the order in which they compute."""

Tick = Callable[[int, int], None]
Quantize = Callable[[PlanLine, Tensor], Sequence[Tensor]]
"""A matrix [N, K] -> what is stored of its line."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """What to train on. train, valid: indices of windows    batch: windows of a step    seed: of their order."""

    train: Tensor
    valid: Tensor
    batch: int
    seed: int

    @property
    def sizes(self) -> set[int]:
        """How many windows a batch may have."""
        return {len(b) for rows in (self.train, self.valid) for b in torch.split(rows, self.batch)}


def make_course(windows: int, batch: int, seed: int) -> Course:
    """Set every third window aside. Raises CalibrationError when there are fewer than three."""
    if windows < VALIDATION:
        raise CalibrationError(
            f"fine-tuning on {windows} windows: expected at least {VALIDATION}, two to train on and one to validate; "
            "give a longer text, more --samples, or a smaller --context"
        )
    rows = torch.arange(windows)
    aside = rows % VALIDATION == VALIDATION - 1
    return Course(train=rows[~aside], valid=rows[aside], batch=batch, seed=seed)


def train(
    parts: Sequence[Part], loss: Callable[[Tensor], Tensor], course: Course, tick: Tick
) -> dict[str, Any]:
    """Adam on what the parts train; they end with the values of least loss on the windows set aside.

    loss: the mean over some windows, given their indices    returns: that loss before and after, the epochs it took
    """
    leaves = [x for part in parts for x in part.trained.values()]
    signs = [x for part in parts for name, x in part.trained.items() if name in part.signs]
    others = [x for part in parts for name, x in part.trained.items() if name not in part.signs]
    adam = torch.optim.Adam([{"params": signs, "lr": SIGNS_RATE}, {"params": others, "lr": RATE}])
    order = torch.Generator().manual_seed(course.seed)
    steps = -(-len(course.train) // course.batch)

    @torch.no_grad()
    def validate() -> float:
        batches = torch.split(course.valid, course.batch)
        return sum(float(loss(rows)) * len(rows) for rows in batches) / len(course.valid)

    best = before = validate()
    kept, epochs, worse = [x.detach().clone() for x in leaves], 0, 0
    for epoch in range(EPOCHS):
        shuffled = course.train[torch.randperm(len(course.train), generator=order)]
        for step, rows in enumerate(torch.split(shuffled, course.batch)):
            adam.zero_grad()
            loss(rows).backward()  # type: ignore[no-untyped-call]
            adam.step()
            tick(epoch * steps + step + 1, EPOCHS * steps)
        now = validate()
        if now < best:
            best, epochs, worse = now, epoch + 1, 0
            kept = [x.detach().clone() for x in leaves]
        else:
            worse += 1
            if worse == PATIENCE:
                break
    with torch.no_grad():
        for x, value in zip(leaves, kept, strict=True):
            x.copy_(value)
    tick(EPOCHS * steps, EPOCHS * steps)
    return {"before": float(f"{before:.6g}"), "after": float(f"{best:.6g}"), "epochs": epochs}


@dataclass(frozen=True, kw_only=True)
class Tuner:
    """Trains the parts of one model, and keeps what it finds.

    mode: block or full, both also in the paper's order    lines: of the plan    memory: bytes
    read, exponent: what is stored of a line, tuned where it is    quantize: again, in the paper's order, trained weights
    """

    mode: str
    lines: Sequence[PlanLine]
    read: Callable[[PlanLine], Sequence[Tensor]]
    exponent: Callable[[PlanLine], int]
    quantize: Quantize
    store: TunedStore
    seed: int
    memory: int
    watcher: Watcher = SILENT
    least: ClassVar[int] = VALIDATION

    def sizes(self, windows: int) -> set[int]:
        """How many windows a batch of any course may have. Raises CalibrationError when there are too few."""
        passed = {len(rows) for rows in torch.split(torch.arange(windows), TOGETHER)}
        return make_course(windows, BATCH, 0).sizes | passed | {1}

    def wants(self, block: int) -> bool:
        """Whether a block is still to be trained."""
        return not self.store.has(part_name(block))

    def tune_block(self, model: BlockModel, index: int, inputs: BlockInputs, buffer: Buffer) -> None:
        """Train a block, loaded with its original weights, on what enters it."""
        path = model.blocks[index]
        targets = buffer(tuple(inputs.hidden.shape), torch.float32)
        added, numel = 0.0, 0
        weights = _originals(model, path)
        for rows in inputs.slices():
            with torch.no_grad():
                x = inputs.hidden[inputs.place(rows)].to(model.device)
                y = model.apply(path, x, weights, inputs.first(rows))
                change = inputs.real(rows, y - x.float())
                added += float(change.square().sum(dtype=torch.float64))
                numel += change.numel()
            targets[inputs.place(rows)] = y.to(targets.device)
        del weights
        steps = self._steps(model, index)
        originals = {line.matrix.name for lines in steps for line in lines}
        part = self._part(model, path, originals=originals)
        scale = added / numel or 1.0

        def loss(rows: Tensor) -> Tensor:
            place = inputs.place(rows)
            wanted = targets[place].to(model.device)
            made = part(inputs.hidden[place].to(model.device), inputs.first(rows))
            return inputs.real(rows, made - wanted).square().mean() / scale

        course = make_course(len(inputs), inputs.together or BATCH, self.seed + index)
        for step, lines in enumerate(steps):
            for line in lines:
                part.quantize(line, self.quantize(line, part.trained[line.matrix.name].detach()))

            def tick(done: int, total: int, before: int = index * len(steps) + step) -> None:
                self.watcher.progress(
                    "fine-tune", before * total + done, len(model.blocks) * len(steps) * total
                )

            record = train([part], loss, course, tick)
        self.store.put(part_name(index), part.values(), record)
        self._note(f"block {index}: relative squared error", record)

    def _steps(self, model: BlockModel, index: int) -> list[list[PlanLine]]:
        """What is quantized before each training of a block: nothing, or in the paper's order a linear, or a projection
        of all experts, after the other as the block computes with them.
        """
        steps: dict[tuple[int, int], list[PlanLine]] = {}
        if self.mode.startswith(PAPER):
            order = {name: i for i, (name, _) in enumerate(model.model.named_modules())}
            for line in self.lines:
                place = model.place(line.matrix) if isinstance(line.format, LatticeFormat) else None
                if place is not None and model.block_of(place) == index:
                    projection = PROJECTIONS.index(place.projection) if place.projection else 0
                    steps.setdefault((order[place.module], projection), []).append(line)
        return [lines for _, lines in sorted(steps.items())] or [[]]

    def wants_all(self) -> bool:
        """Whether the whole model is still to be trained."""
        return self.mode.endswith("full") and not self.store.has(WHOLE)

    def tune_all(self, model: BlockModel, whole: Whole, buffer: Buffer) -> None:
        """Train the whole model on the original's next-token distributions."""
        weights = sum(torch.Size(line.matrix.shape).numel() for line in self.lines if line.format)
        fits = TRAINING_BYTES * weights <= self.memory
        originals, outside = _originals(model, ""), self._part(model, "")
        parts: list[Part] = []
        with torch.no_grad():
            packed = [partial(self._original, model, path, parts, keep=fits) for path in model.blocks]
            final = whole.outputs(packed, originals, buffer)
        blocks: list[Any] = parts if fits else [partial(_again, part) for part in parts]

        def loss(rows: Tensor) -> Tensor:
            ours = outside.parameters()
            hidden = whole.output(rows, blocks, ours)
            with torch.no_grad():
                last = final.hidden[final.place(rows)].to(model.device)
                wanted = whole.logits(rows, last, originals).log_softmax(-1)
            made = whole.logits(rows, hidden, ours).log_softmax(-1)
            return (wanted.exp() * (wanted - made)).sum(-1).mean()

        def tick(done: int, total: int) -> None:
            self.watcher.progress("fine-tune all", done, total)

        record = train([*parts, outside], loss, make_course(len(whole), 1, self.seed), tick)
        values: Mapping[str, Tensor] = {k: v for part in (*parts, outside) for k, v in part.values().items()}
        self.store.put(WHOLE, values, record)
        self._note("whole model: KL divergence", record)

    @contextmanager
    def _original(self, model: BlockModel, path: str, parts: list[Part], *, keep: bool) -> Iterator[Block]:
        """A block of the original model, loaded for a while in which the packed one joins the parts."""
        model.load(path)
        weights = _originals(model, path)
        parts.append(self._part(model, path, keep=keep))

        def run(hidden: Tensor, first: int = 0, exchange: Exchange = as_it_is) -> Tensor:
            return model.apply(path, hidden, weights, first, exchange)

        yield run
        model.drop(path)

    def _part(self, model: BlockModel, path: str, **settings: Any) -> Part:
        return Part(model, path, self.lines, self.read, exponent=self.exponent, **settings)

    def _note(self, what: str, record: Mapping[str, Any]) -> None:
        self.watcher.note(
            f"fine-tune, {what} {record['before']:.4g} -> {record['after']:.4g}, best after epoch {record['epochs']}"
        )


def _originals(model: BlockModel, path: str) -> dict[str, Tensor]:
    """The parameters of a loaded block as `BlockModel.apply` takes them, in fp32."""
    return {name: p.float() for name, p in model.parameters(path).items()}


def _again(part: Part, *inputs: Any) -> Tensor:
    """A block that is run once more for its gradient."""
    made: Tensor = checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)
    return made
