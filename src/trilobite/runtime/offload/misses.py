"""Which misses the host computes itself, from the bytes it holds, while others are copied: whatever ends first.

What either way takes is measured end to end when a model is loaded: an expert copied and then computed by the device,
and the same one computed by the host, the activations' ways forth and back included, for several numbers of tokens. What
the host then takes beside copies and the other layers' pages is learned as it computes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from trilobite.kernels.ops import BoundExperts

TOKENS = (1, 4, 16, 64)
"""Of one expert, for which both ways are measured."""
ROUNDS = 3
LEARNED = 1 / 8
"""Weight of the latest call in what is known of the host's pace."""
FORGOTTEN = 1 / 64
"""Of what a pace differs from 1, each time that the host is passed over for it, so that it is tried again."""
EXTREME = 4.0
"""No single call counts as more times slower than this: it met the disk."""
Copy = Callable[[int, Tensor, Tensor, Tensor], float]
"""Brings an expert that is absent, computes it for x, index and weights, lets go of it: seconds."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds for one expert with as many tokens as `TOKENS` say, each way."""

    copied: Sequence[float]
    computed: Sequence[float]

    def of(self, tokens: int) -> tuple[float, float]:
        """Copied, computed; beyond the measured numbers, computing goes on in proportion."""
        more = max(1.0, tokens / TOKENS[-1])
        copied, computed = (float(np.interp(tokens, TOKENS, way)) for way in (self.copied, self.computed))
        return copied, more * computed

    def __str__(self) -> str:
        """For people."""
        ways = zip(TOKENS, self.copied, self.computed, strict=True)
        return ", ".join(f"{n}: {1e3 * a:.2f} or {1e3 * b:.2f} ms" for n, a, b in ways)


class HostShare:
    """Chooses, and computes what it chose.

    pace: what the host takes now, over what it took when `costs` were measured, at least 1
    """

    def __init__(self, costs: Costs, calls: Sequence[BoundExperts]) -> None:
        """calls: the experts of each layer, as the CPU engine runs them where they lie on the host."""
        self.costs, self._calls = costs, calls
        self.pace = 1.0

    def choose(self, tokens: Mapping[int, int]) -> list[int]:
        """Those of the absent experts that the host computes. tokens: of each."""
        chosen = self._first_to_end(tokens, self.pace)
        if not chosen and self._first_to_end(tokens, 1.0):
            self.pace += FORGOTTEN * (1 - self.pace)
        return chosen

    def _first_to_end(self, tokens: Mapping[int, int], pace: float) -> list[int]:
        experts = sorted(tokens, key=lambda e: tokens[e])
        ways = [self.costs.of(tokens[e]) for e in experts]
        copied = np.cumsum([0.0, *(a for a, _ in reversed(ways))])[::-1]
        computed = np.cumsum([0.0, *(pace * b for _, b in ways)])
        return experts[: int(np.argmin(np.maximum(copied, computed)))]

    def compute(self, layer: int, tokens: Sequence[int], x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The sum over the experts of `index` [T, A], E for all others. tokens: of each    returns: [T, H] fp32."""
        started = perf_counter()
        sums = compute(self._calls[layer], x, index, weights)
        expected = sum(self.costs.of(n)[1] for n in tokens)
        ratio = (perf_counter() - started) / expected
        self.pace += LEARNED * (min(max(ratio, 1.0), EXTREME) - self.pace)
        return sums


def compute(call: BoundExperts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """On the host. returns: [T, H] fp32."""
    parts = call.parts(x, index, weights)
    parts.add(index)
    return parts.sums


def measure(experts: int, x: Tensor, copy: Copy, host: BoundExperts) -> Costs:
    """Both ways, of one layer. experts: E    x: [64, H]."""
    order = cycle(range(experts))
    copied, computed = list[float](), list[float]()
    for tokens in TOKENS:
        found = []
        for _ in range(ROUNDS + 1):
            expert = next(order)
            inputs = x[:tokens], *routed(tokens, expert, x.device)
            seconds = copy(expert, *inputs)
            started = perf_counter()
            compute(host, *(tensor.cpu() for tensor in inputs)).to(x.device)
            found.append((seconds, perf_counter() - started))
        copied.append(median(a for a, _ in found[1:]))  # the first one warms up
        computed.append(median(b for _, b in found[1:]))
    return Costs(copied=copied, computed=computed)


def routed(tokens: int, expert: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """All tokens on one expert: index [T, 1], weights [T, 1]."""
    return torch.full((tokens, 1), expert, device=device), torch.ones(tokens, 1, device=device)
