"""The cases of benchmarks/gpu/measure.py: layers of experts, linear layers, decoding steps of a whole model.

Weights are random, and made when a case first needs them: a part that is left out takes no memory.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.baselines import bf16_experts, both_products, sort_slots
from benchmarks.gpu.decoding import (
    compiled_seconds,
    decode_seconds,
    expert_bytes,
    packed_bytes,
    random_mixtral,
)
from benchmarks.gpu.rows import Row, kernel_row
from benchmarks.gpu.run import Calls, Case, Clock, LeftOutError
from trilobite.kernels.gpu.layout.pack import repack
from trilobite.kernels.layer import Pack
from trilobite.measure.gpu import (
    ROUTINGS,
    copies,
    expert_calls,
    hit_bytes,
    linear_calls,
    random_layer,
    random_weight,
    routings,
    spread_bytes,
)
from trilobite.measure.shapes import ExpertsShape
from trilobite.recipe import AnyFormat, Format, parse_format

INT3, INT4 = (Format(bits=bits, group=64) for bits in (3, 4))
LATTICE = "e8p-2"
MILO = {1: 0.088, 16: 0.102, 32: 0.105}
"""MiLo's seconds a step by batch, on an A100-40GB (its Table 6)."""
STEPS = 32
"""Decoding steps that are measured."""
MODEL_BYTES = 32e9
"""Free memory that the whole model takes, with caches."""
MODEL_SECONDS, COMPILE_SECONDS = 30, 150
"""A case of the whole model begins only with so much time left: to make the weights; for torch.compile."""


class Kernel(Protocol):
    """An operator and its random weights in any format. name: in messages    title: in tables."""

    name: str
    title: str

    def calls(self, fmt: AnyFormat, tokens: int) -> Calls:
        """Calls on weights of this format, so many that no cache keeps what the next round reads."""

    def nbytes(self, fmt: AnyFormat, tokens: int) -> float:
        """Bytes of packed weights that one of these calls reads."""

    def baselines(self, tokens: int) -> dict[str, Callable[[], Calls]]:
        """How to make the calls of others that do the same, by name."""


class Experts:
    """The routed experts of one layer. All formats and baselines meet the same routings."""

    def __init__(self, layer: ExpertsShape, device: torch.device) -> None:
        self.name, self.title = layer.name, f"{layer.name} experts"
        self.layer, self.device = layer, device
        self._packs: dict[str, Pack] = {}
        self._routings: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def calls(self, fmt: AnyFormat, tokens: int) -> Calls:
        return expert_calls(self.layer, self._pack(fmt), tokens, self._routed(tokens))

    def nbytes(self, fmt: AnyFormat, tokens: int) -> float:
        return hit_bytes(self.layer, self._pack(fmt), tokens)

    def baselines(self, tokens: int) -> dict[str, Callable[[], Calls]]:
        """bf16: the layer with the routing that grouped_mm takes    grouped_mm: its two products alone."""
        return {
            "bf16": lambda: self._bf16_calls(tokens),
            "grouped_mm": lambda: self._product_calls(tokens),
        }

    def _bf16_calls(self, tokens: int) -> Calls:
        x = self._noise(tokens, self.layer.hidden)
        return [partial(bf16_experts, x, *routed, *self._bf16) for routed in self._routed(tokens)]

    def _product_calls(self, tokens: int) -> Calls:
        slots = tokens * self.layer.active
        rows, h = self._noise(slots, self.layer.hidden), self._noise(slots, self.layer.intermediate)
        ends = [sort_slots(index, self.layer.experts)[1] for index, _ in self._routed(tokens)]
        return [partial(both_products, rows, h, e, *self._bf16) for e in ends]

    def _pack(self, fmt: AnyFormat) -> Pack:
        if str(fmt) not in self._packs:
            self._packs[str(fmt)] = random_layer(self.layer, fmt, self.device)
        return self._packs[str(fmt)]

    def _routed(self, tokens: int) -> list[tuple[Tensor, Tensor]]:
        if tokens not in self._routings:
            self._routings[tokens] = routings(self.layer, tokens, self.device)
        return self._routings[tokens]

    @cached_property
    def _bf16(self) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2I, H] and down [E, H, I]."""
        e, h, i = self.layer.experts, self.layer.hidden, self.layer.intermediate
        return self._noise(e, 2 * i, h) * 0.02, self._noise(e, h, i) * 0.02

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The shape of a linear layer."""

    name: str
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.name} [{self.n}, {self.k}]"


class Linear:
    """A linear layer, as several copies of its weights."""

    def __init__(self, shape: Matrix, device: torch.device) -> None:
        self.name = self.title = str(shape)
        self.shape, self.device = shape, device
        self._packs: dict[str, list[Pack]] = {}

    def calls(self, fmt: AnyFormat, tokens: int) -> Calls:
        return linear_calls(self._copies(fmt), tokens)

    def nbytes(self, fmt: AnyFormat, tokens: int) -> float:
        return 4 * self._copies(fmt)[0].slab.numel()

    def baselines(self, tokens: int) -> dict[str, Callable[[], Calls]]:
        return {"bf16": lambda: self._bf16_calls(tokens)}

    def _bf16_calls(self, tokens: int) -> Calls:
        x = torch.randn(tokens, self.shape.k, device=self.device, dtype=torch.bfloat16)
        return [partial(F.linear, x, w) for w in self._bf16]

    def _copies(self, fmt: AnyFormat) -> list[Pack]:
        if str(fmt) not in self._packs:
            one = repack([[random_weight(self.shape.n, self.shape.k, fmt, device=self.device)]])
            self._packs[str(fmt)] = copies(one, ROUTINGS)
        return self._packs[str(fmt)]

    @cached_property
    def _bf16(self) -> list[Tensor]:
        one = torch.randn(self.shape.n, self.shape.k, device=self.device, dtype=torch.bfloat16)
        return [one.clone() for _ in range(max(ROUTINGS, -(-spread_bytes(self.device) // one.nbytes)))]


def int3_row(kernel: Kernel, clock: Clock, tokens: int, bandwidth: float) -> Row:
    """3 bits, beside 4 bits and the baselines."""
    times = {name: clock(kernel.calls(fmt, tokens)) for name, fmt in (("3-bit", INT3), ("4-bit", INT4))}
    for name, make in kernel.baselines(tokens).items():
        times[name] = clock.baseline(f"{kernel.name}, {tokens} tokens, {name}", make)
    nbytes = kernel.nbytes(INT3, tokens)
    return kernel_row(kernel.title, tokens, times, ours="3-bit", nbytes=nbytes, bandwidth=bandwidth)


def lattice_row(kernel: Kernel, clock: Clock, tokens: int, bandwidth: float) -> Row:
    """QuIP#'s codewords, beside 3 bits."""
    fmt = parse_format(LATTICE)
    times = {name: clock(kernel.calls(f, tokens)) for name, f in (("3-bit", INT3), (LATTICE, fmt))}
    nbytes = kernel.nbytes(fmt, tokens)
    return kernel_row(kernel.title, tokens, times, ours=LATTICE, nbytes=nbytes, bandwidth=bandwidth)


def int3_cases(kernels: Iterable[Kernel], tokens: Sequence[int], bandwidth: float) -> Iterator[Case]:
    """`int3_row` for each kernel, at so many tokens each."""
    for kernel in kernels:
        for t in tokens:
            run = partial(int3_row, kernel, tokens=t, bandwidth=bandwidth)
            yield Case(name=f"{kernel.name}, {t} tokens", run=run)


def lattice_cases(kernels: Iterable[Kernel], tokens: Sequence[int], bandwidth: float) -> Iterator[Case]:
    """`lattice_row` for each kernel, at so many tokens each."""
    for kernel in kernels:
        for t in tokens:
            run = partial(lattice_row, kernel, tokens=t, bandwidth=bandwidth)
            yield Case(name=f"{LATTICE} {kernel.name}, {t} tokens", run=run)


class Decoding:
    """Decoding steps of a whole model. config: of transformers."""

    def __init__(self, config: Any, device: torch.device, bandwidth: float) -> None:
        self.config, self.device, self.bandwidth = config, device, bandwidth
        self._model: nn.Module | None = None

    def row(self, clock: Clock, batch: int, measure: Callable[..., tuple[float, str]]) -> Row:
        """measure: `decode_seconds` or `compiled_seconds`. Raises LeftOutError where memory does not suffice."""
        if self._model is None:
            if not clock.dry:
                self._check_memory()
            self._model = random_mixtral(self.config, self.device)
        took, how = measure(self._model, self.config, batch, self.device, 0 if clock.dry else STEPS)
        share = self.config.num_experts_per_tok / self.config.num_local_experts
        missed = expert_bytes(self._model) * (1 - share) ** batch
        bound = (packed_bytes(self._model) - missed) / self.bandwidth
        return {
            "batch": batch,
            "ms a step": took * 1e3,
            "tokens/s": batch / took,
            "bound ms": bound * 1e3,
            "of bound": bound / took,
            "MiLo, A100, ms": MILO.get(batch, math.nan) * 1e3,
            "run as": how,
        }

    def _check_memory(self) -> None:
        free = torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else math.inf
        if free < MODEL_BYTES:
            raise LeftOutError(
                f"{MODEL_BYTES / 1e9:.0f} GB of memory are needed, {free / 1e9:.0f} GB are free"
            )


def decoding_cases(
    config: Any, device: torch.device, bandwidth: float, batches: Sequence[int]
) -> Iterator[Case]:
    """A step of a whole model, at each batch size."""
    decoding = Decoding(config, device, bandwidth)
    for batch in batches:
        run = partial(decoding.row, batch=batch, measure=decode_seconds)
        yield Case(name=f"whole model, batch {batch}", run=run, least=MODEL_SECONDS)


def compiled_case(config: Any, device: torch.device, bandwidth: float) -> Case:
    """The step at batch 1 by torch.compile, which takes minutes for 32 layers."""
    run = partial(Decoding(config, device, bandwidth).row, batch=1, measure=compiled_seconds)
    return Case(name="torch.compile of a whole step", run=run, least=COMPILE_SECONDS)
