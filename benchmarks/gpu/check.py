"""Compare the GPU kernels with the reference, before anything is measured: interpreted they are tested, compiled not.

Numbers of rows take every tile of the tables and every way to find slots; one matrix fills its last step over K, one
does not; some slots name no expert.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.rows import Row
from benchmarks.gpu.run import Case, Clock
from trilobite.formats.weight import PackedWeight
from trilobite.kernels import ops, reference
from trilobite.kernels.expert_table import build
from trilobite.kernels.layer import ExpertsLayer
from trilobite.measure.gpu import experts_layer, random_weight
from trilobite.recipe import parse_format

FORMATS = (
    ("int3-g64", 0),
    ("int3-g64", 20),
    ("int4-g128-sym", 0),
    ("int8-channel-sym", 0),
    ("e8p-2", 0),
    ("e8p-3", 20),
)
"""Formats and ranks."""
TOKENS = (1, 3, 12, 40, 300)
ACTIVE = 2
COLUMNS = (384, 2944)
"""Of one step over K and of several, the last one not full, some of them in splits of their own."""
LIMITS = {"linear": 1e-2, "experts": 3e-2}
"""Relative errors of sums of bf16 numbers, and of a layer that rounds what lies between its products."""
CPU = torch.device("cpu")


class WrongResultError(Exception):
    """A kernel computes something else than the reference."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One format, rank and width K. rows: of a linear layer    experts, intermediate: of a layer of experts"""

    format: str
    rank: int
    k: int
    device: torch.device
    rows: int = 320
    experts: int = 8
    intermediate: int = 384

    @property
    def name(self) -> str:
        """For reports."""
        return f"{self.format}, rank {self.rank}, K = {self.k}"

    def row(self, clock: Clock) -> Row:
        """The worst error of each operator. Raises WrongResultError for one above its limit."""
        worst = {"linear": 0.0, "experts": 0.0}
        for tokens in TOKENS:
            for name in worst:
                found, expected = self.run(name, tokens)
                if not clock.dry:
                    worst[name] = max(worst[name], relative_error(found, expected()))
        for name, error in worst.items():
            if not error < LIMITS[name]:
                raise WrongResultError(f"{name} is off by {error:.2g}, at most {LIMITS[name]:g} is rounding")
        return {"format": self.format, "rank": self.rank, "K": self.k} | {
            f"{name}, 1e-3": error * 1e3 for name, error in worst.items()
        }

    def run(self, operator: str, tokens: int) -> tuple[Tensor, Callable[[], Tensor]]:
        """What the kernels compute, and how to compute what is right, on the CPU."""
        return self._linear(tokens) if operator == "linear" else self._experts(tokens)

    def _linear(self, tokens: int) -> tuple[Tensor, Callable[[], Tensor]]:
        w, x = self._weight(self.rows, self.k), torch.randn(tokens, self.k).bfloat16()
        found = ops.linear_gpu(x.to(self.device), ops.repack([[self._there(w)]]))
        return found, partial(reference.linear, x, w)

    def _experts(self, tokens: int) -> tuple[Tensor, Callable[[], Tensor]]:
        h, i = self.k, self.intermediate
        weights = [[self._weight(*s) for s in ((i, h), (i, h), (h, i))] for _ in range(self.experts)]
        x = torch.randn(tokens, h).bfloat16()
        index = torch.rand(tokens, self.experts + 1).topk(ACTIVE).indices  # the last one is nobody
        share = torch.rand(tokens, ACTIVE).bfloat16()
        slab, table = build([(gate, up, down) for gate, up, down in weights])
        stored = ExpertsLayer(slab=slab, table=table, hidden=h, intermediate=i, activation="silu")
        expected = partial(reference.experts, x, index, share, stored)
        pack = ops.repack([[self._there(w) for w in row] for row in weights])
        x, index, share = (t.to(self.device) for t in (x, index, share))
        return ops.experts(x, index, share, experts_layer(pack)), expected

    def _weight(self, n: int, k: int) -> PackedWeight:
        return random_weight(n, k, parse_format(self.format), rank=self.rank, device=CPU)

    def _there(self, w: PackedWeight) -> PackedWeight:
        return w.to(self.device)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Of all elements together."""
    difference = (found.cpu().double() - expected.double()).norm()
    return float(difference / expected.double().norm())


def check_cases(device: torch.device) -> Iterator[Case]:
    """A case for each format, rank and K."""
    for name, rank in FORMATS:
        for k in COLUMNS:
            check = Check(format=name, rank=rank, k=k, device=device)
            yield Case(name=f"check of {check.name}", run=check.row)
