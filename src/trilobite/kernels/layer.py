"""What backends are told beside bytes: a layer of experts, matrices in the GPU layout, settings of the CPU engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from torch import Tensor

from trilobite.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Coding:
    """What a GPU kernel has to be compiled for; bits = 0: no such matrix.

    group: 0 = the whole row    e8p: the words are E8P codewords    tuned: the vectors of its transforms are fp16
    super_scales: 4-bit scales under super-scales    rank: the largest of all that share this
    """

    bits: int
    group: int = 0
    symmetric: bool = False
    e8p: bool = False
    tuned: bool = False
    super_scales: bool = False
    rank_bits: int = 0
    rank: int = 0

    @property
    def scales(self) -> int:
        """How scales lie in `meta`, as kernels are told: 0 with offsets, 1 symmetric, 2 under super-scales."""
        return 2 if self.super_scales else int(self.symmetric)


ABSENT = Coding(bits=0)
Codings = tuple[tuple[Coding, ...], ...]
"""For every class of experts, a coding for each of its matrices; experts of one class run in one launch."""


def spec_of(codings: Codings) -> list[int]:
    """Codings as plain numbers, which is what an operator can take; spelled out, for torch.compile to follow."""
    return [
        int(value)
        for row in codings
        for c in row
        for value in (c.bits, c.group, c.symmetric, c.e8p, c.tuned, c.super_scales, c.rank_bits, c.rank)
    ]


@lru_cache(maxsize=1024)
def codings_of(spec: tuple[int, ...], projections: int) -> Codings:
    """Inverse of `spec_of`; remembered, as an operator asks at every call."""
    codings = [
        Coding(
            bits=b,
            group=g,
            symmetric=bool(s),
            e8p=bool(e),
            tuned=bool(t),
            super_scales=bool(ss),
            rank_bits=rb,
            rank=r,
        )
        for b, g, s, e, t, ss, rb, r in (spec[i : i + 8] for i in range(0, len(spec), 8))
    ]
    return tuple(tuple(codings[i : i + projections]) for i in range(0, len(codings), projections))


class PackColumn(IntEnum):
    """Columns of a pack's table: offsets of the parts in 32-bit words, rank, and class (-1 = absent)."""

    WORDS = 0
    META = 1
    U_WORDS = 2
    U_META = 3
    V_WORDS = 4
    V_META = 5
    SIGNS_IN = 6
    SIGNS_OUT = 7
    RANK = 8
    CLASS = 9


@dataclass(frozen=True, kw_only=True, eq=False)
class Pack:
    """Packed matrices in the GPU layout.

    slab: [words] int32    table: [E, P, 10] int64 on the same device, columns as in `PackColumn`
    codings: for every class of experts, P codings    shapes: [N, K] of each of the P matrices
    """

    slab: Tensor
    table: Tensor
    codings: Codings
    shapes: Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertsLayer:
    """The routed experts of one layer as the `experts` operator takes them: E experts, gates among them or not.

    slab, table: as stored (`expert_table`), or of a `Pack` in the GPU layout    codings: of that pack, () as stored
    hidden, intermediate: H, I    activation: as in `kernels/activation.py`
    gate_up_bias: [E, 2I], gate first, [E, I] without gates, or None    down_bias: [E, H] or None
    """

    slab: Tensor
    table: Tensor
    hidden: int
    intermediate: int
    activation: str
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    codings: Codings = ()


ACTIVATION_MODES = ("exact", "int8")


@dataclass(frozen=True)
class CpuSettings:
    """How the CPU engine computes for one model: chosen when it is loaded.

    activations: "exact", or "int8": one 8-bit digit of each    threads: None = as many as torch, asked at every call;
    affinity, the cgroup's quota and TRILOBITE_THREADS stay the upper limit
    """

    activations: str = "exact"
    threads: int | None = None

    def __post_init__(self) -> None:
        """Raise SettingError for a mode that there is not, or less than one thread."""
        if self.activations not in ACTIVATION_MODES:
            raise SettingError(
                f"activations {self.activations!r}: expected one of {', '.join(ACTIVATION_MODES)}"
            )
        if self.threads is not None and self.threads < 1:
            raise SettingError(
                f"{self.threads} threads; expected at least 1, or None for as many as torch has"
            )


EXACT = CpuSettings()
