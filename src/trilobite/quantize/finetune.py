"""Fine-tuning of what is not codes (QuIP# section 5 and Algorithm 5): sign vectors, norms, routers, a 16-bit head.

A block's codes are all found first. Then the vectors s of its transforms, as real numbers, its norms and its router are
trained so that the block gives what the original one gives for the same inputs. `full` goes on with the whole model,
against the original's distribution of the next token. The forward pass computes with the values as they will be stored,
rounded to 16 bit; gradients pass the rounding unchanged. So the loss that decides is that of the packed model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trilobite.checkpoint.roles import Matrix
from trilobite.checkpoint.source import DTYPES
from trilobite.errors import CalibrationError
from trilobite.formats.incoherence import Spin
from trilobite.formats.weight import PackedWeight, decode_factor, dequantize, rotated, spins, unrotated
from trilobite.quantize.calibration_model import BlockModel
from trilobite.quantize.calibration_weights import Place
from trilobite.quantize.finetune_store import WHOLE, TunedStore, part_name
from trilobite.quantize.plan import PlanLine, Progress, packed_weight
from trilobite.quantize.stacked_experts import check_experts, expert_matrix, stacked_experts
from trilobite.recipe import LatticeFormat, Role

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

Buffer = Callable[[tuple[int, ...], torch.dtype], Tensor]
Tick = Callable[[int, int], None]


class _Round(torch.autograd.Function):
    """To 16 bit and back; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


@dataclass(frozen=True, kw_only=True)
class _Lattice:
    """A weight in a lattice format. base: decoded codes in rotated coordinates, where they are kept    plain: U V."""

    weight: PackedWeight
    transform: str
    names: tuple[str, str]
    base: Tensor | None
    plain: Tensor | None

    def matrix(self, s_in: Tensor, s_out: Tensor) -> Tensor:
        """W(s_in, s_out), [N, K] fp32, differentiable."""
        base = rotated(self.weight) if self.base is None else self.base
        spin_in, spin_out = (Spin(transform=self.transform, s=s) for s in (s_in, s_out))
        w = unrotated(base, spin_in, spin_out)
        return w if self.plain is None else w + self.plain


class Part:
    """A block, or what is outside of the blocks, as a function of what is trained in it.

    trained: fp32 leaves by stored name    signs: the names among them that are vectors of transforms
    """

    def __init__(
        self,
        model: BlockModel,
        path: str,
        lines: Sequence[PlanLine],
        read: Callable[[PlanLine], Sequence[Tensor]],
        *,
        keep: bool = True,
    ) -> None:
        """path: a loaded block, or "" for the outside    read: what is stored of a line    keep: decoded codes."""
        self.model, self.path = model, path
        self.trained: dict[str, Tensor] = {}
        self.signs: set[str] = set()
        self._dtypes: dict[str, torch.dtype] = {}
        self._kept: dict[str, str] = {}
        self._packed: dict[Place, Tensor | _Lattice] = {}
        constants = model.parameters(path)
        roles = (Role.NORM, Role.ROUTER) if path else (Role.NORM, Role.HEAD)
        for line in lines:
            if line.format is not None:
                place = model.place(line.matrix)
                if place is not None and self._holds(place.module):
                    self._packed[place] = self._decoder(line, read(line), keep=keep)
            elif line.matrix.role in roles and (name := self._parameter(line.matrix)) in constants:
                self._kept[name] = line.matrix.name
                self._train(line.matrix.name, read(line)[0], DTYPES[line.stored[0].dtype])
        self._experts = self._complete(sorted({p.module for p in self._packed if p.expert is not None}))
        made = {f"{p.module}.weight" for p in self._packed if p.expert is None} | self._kept.keys()
        made |= {
            f"{path}.{name}" for path in self._experts for name in ("gate_up_proj", "up_proj", "down_proj")
        }
        self._constants = {name: t.float() for name, t in constants.items() if name not in made}

    def _holds(self, module: str) -> bool:
        index = self.model.block_of(Place(module=module))
        return (self.model.blocks[index] if index is not None else "") == self.path

    def _parameter(self, matrix: Matrix) -> str:
        return self.model.parameter(matrix) or ""

    def _train(self, name: str, value: Tensor, dtype: torch.dtype) -> None:
        self.trained[name] = value.to(self.model.device).float().clone().requires_grad_()
        self._dtypes[name] = dtype

    def _decoder(self, line: PlanLine, stored: Sequence[Tensor], *, keep: bool) -> Tensor | _Lattice:
        """A packed matrix: what is trained and what is not, or all of it where nothing is."""
        weight = packed_weight(line, stored, self.model.device)
        if not isinstance(line.format, LatticeFormat):
            return dequantize(weight)
        names = (f"{line.matrix.name}_signs_in", f"{line.matrix.name}_signs_out")
        for name, spin in zip(names, spins(weight), strict=True):
            self._train(name, spin.s, torch.float16)
            self.signs.add(name)
        n, k = weight.shape
        plain = None
        if weight.lra is not None and weight.lrb is not None:
            plain = decode_factor(weight.lra, n).T @ decode_factor(weight.lrb, k)
        return _Lattice(
            weight=weight,
            transform=line.format.transform,
            names=names,
            base=rotated(weight) if keep else None,
            plain=plain,
        )

    def _complete(self, modules: Sequence[str]) -> dict[str, dict[tuple[int, str], Tensor | _Lattice]]:
        """All matrices of the modules of experts that hold a packed one."""
        found = {}
        for path in modules:
            experts: Any = self.model.module(path)
            check_experts(experts, path)
            matrices = {}
            for e in range(len(experts.down_proj)):
                for projection in ("gate", "up", "down") if experts.has_gate else ("up", "down"):
                    place = Place(module=path, expert=e, projection=projection)
                    own = self._packed.get(place)
                    if own is None:
                        own = expert_matrix(experts, e, projection).detach().float().clone()
                    matrices[e, projection] = own
            found[path] = matrices
        return found

    def parameters(self) -> dict[str, Tensor]:
        """All parameters by name, fp32, with the values that will be stored."""
        now = {name: _round(x, self._dtypes[name]) for name, x in self.trained.items()}

        def matrix(source: Tensor | _Lattice) -> Tensor:
            return source if isinstance(source, Tensor) else source.matrix(*(now[n] for n in source.names))

        found = self._constants | {name: now[stored] for name, stored in self._kept.items()}
        for place, source in self._packed.items():
            if place.expert is None:
                found[f"{place.module}.weight"] = matrix(source)
        for path, of_path in self._experts.items():
            stacked = stacked_experts(self.model.module(path), {k: matrix(v) for k, v in of_path.items()})
            found |= {f"{path}.{name}": tensor for name, tensor in stacked.items()}
        return found

    def __call__(self, hidden: Tensor) -> Tensor:
        """The block on a batch. hidden: [B, T, H]    returns: [B, T, H] fp32."""
        return self.model.apply(self.path, hidden, self.parameters())

    def values(self) -> dict[str, Tensor]:
        """What is trained, by stored name, as stored."""
        found = {}
        for name, x in self.trained.items():
            value = x.detach().to(self._dtypes[name]).cpu()
            found[name] = value.view(torch.uint8) if name in self.signs else value
        return found


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    rounded: Tensor = _Round.apply(x, dtype)  # type: ignore[no-untyped-call]
    return rounded


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
    ids = {id(x) for x in signs}
    others = [x for x in leaves if id(x) not in ids]
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

    mode: block or full    lines: of the plan    read: what is stored of a line, tuned where it is    memory: bytes
    """

    mode: str
    lines: Sequence[PlanLine]
    read: Callable[[PlanLine], Sequence[Tensor]]
    store: TunedStore
    seed: int
    memory: int
    progress: Progress | None = None
    on_note: Callable[[str], None] | None = None

    def sizes(self, windows: int) -> set[int]:
        """How many windows a batch of any course may have. Raises CalibrationError when there are too few."""
        return make_course(windows, BATCH, 0).sizes | {len(b) for b in _slices(windows)} | {1}

    def wants(self, block: int) -> bool:
        """Whether a block is still to be trained."""
        return not self.store.has(part_name(block))

    @torch.no_grad()
    def put(self, model: BlockModel, block: str) -> None:
        """Give a loaded block the tuned values of what is kept in 16 bit."""
        own = model.parameters(block)
        for line in self.lines:
            if line.format is None and line.matrix.name in self.store:
                name = model.parameter(line.matrix)
                if name in own:
                    own[name].copy_(self.store[line.matrix.name])

    def tune_block(self, model: BlockModel, index: int, hidden: Tensor, buffer: Buffer) -> None:
        """Train a block, loaded with its original weights, on what enters it. hidden: [S, T, H]."""
        path = model.blocks[index]
        targets = buffer(tuple(hidden.shape), torch.float32)
        added = 0.0
        originals = {name: p.float() for name, p in model.parameters(path).items()}
        for rows in _slices(len(hidden)):
            with torch.no_grad():
                x = hidden[rows].to(model.device)
                y = model.apply(path, x, originals)
                added += float((y - x.float()).square().sum(dtype=torch.float64))
            targets[rows] = y.to(targets.device)
        del originals
        part = Part(model, path, self.lines, self.read)
        scale = added / hidden.numel() or 1.0

        def loss(rows: Tensor) -> Tensor:
            wanted = targets[rows].to(model.device)
            return (part(hidden[rows].to(model.device)) - wanted).square().mean() / scale

        def tick(done: int, total: int) -> None:
            if self.progress:
                self.progress("fine-tune", index * total + done, len(model.blocks) * total)

        record = train([part], loss, make_course(len(hidden), BATCH, self.seed + index), tick)
        self.store.put(part_name(index), part.values(), record)
        self._note(f"block {index}: relative squared error", record)

    def tune_all(self, model: BlockModel, ids: Tensor, buffer: Buffer) -> None:
        """Train the whole model on the original's next-token distributions. ids: [S, T]."""
        if self.mode != "full" or self.store.has(WHOLE):
            return
        weights = sum(torch.Size(line.matrix.shape).numel() for line in self.lines if line.format)
        fits = TRAINING_BYTES * weights <= self.memory
        model.load("")
        model.load(model.blocks[0])
        for size in sorted(self.sizes(len(ids))):
            model.record(ids[:size])
        parts, final = self._model(model, ids, buffer, keep=fits)
        originals = {name: p.float() for name, p in model.parameters("").items()}
        outside = Part(model, "", self.lines, self.read)

        def loss(rows: Tensor) -> Tensor:
            of_rows = ids[rows]
            hidden = model.embed(of_rows)
            for part in parts:
                hidden = (
                    part(hidden)
                    if fits
                    else checkpoint(part, hidden, use_reentrant=False, preserve_rng_state=False)
                )
            with torch.no_grad():
                wanted = model.logits(of_rows, final[rows].to(model.device), originals).log_softmax(-1)
            found = model.logits(of_rows, hidden, outside.parameters()).log_softmax(-1)
            return (wanted.exp() * (wanted - found)).sum(-1).mean()

        def tick(done: int, total: int) -> None:
            if self.progress:
                self.progress("fine-tune all", done, total)

        record = train([*parts, outside], loss, make_course(len(ids), 1, self.seed), tick)
        values: Mapping[str, Tensor] = {k: v for part in (*parts, outside) for k, v in part.values().items()}
        self.store.put(WHOLE, values, record)
        model.drop("")
        self._note("whole model: KL divergence", record)

    @torch.no_grad()
    def _model(
        self, model: BlockModel, ids: Tensor, buffer: Buffer, *, keep: bool
    ) -> tuple[list[Part], Tensor]:
        """All blocks as they are packed, and what leaves the last block of the original model, [S, T, H] fp32."""
        width = model.embed(ids[:1]).shape[-1]
        final = buffer((*ids.shape, width), torch.float32)
        for rows in _slices(len(ids)):
            final[rows] = model.embed(ids[rows]).float().to(final.device)
        parts = []
        for path in model.blocks:
            model.load(path)
            originals = {name: p.float() for name, p in model.parameters(path).items()}
            for rows in _slices(len(ids)):
                final[rows] = model.apply(path, final[rows].to(model.device), originals).to(final.device)
            del originals
            parts.append(Part(model, path, self.lines, self.read, keep=keep))
            model.drop(path)
        return parts, final

    def _note(self, what: str, record: Mapping[str, Any]) -> None:
        if self.on_note:
            self.on_note(
                f"fine-tune, {what} {record['before']:.4g} -> {record['after']:.4g}, best after epoch "
                f"{record['epochs']}"
            )


def _slices(windows: int) -> list[Tensor]:
    """Windows that pass a block at a time, in order."""
    return list(torch.split(torch.arange(windows), BATCH))
