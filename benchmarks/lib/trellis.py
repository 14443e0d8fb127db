"""Codes whose levels stand in tables: grids of any spacing, and bitshift trellises (QTIP, section 3).

A row of a matrix is one stream of `bits` bits a weight. The level of a weight is what a table holds for the last
`window` bits of the stream at that place: its own, and some of those before it. So there are 2^window levels to choose
from, and each choice narrows the next ones; the best row is found by dynamic programming (Viterbi). Where the window
is no longer than a weight there is nothing to remember, and the code is a grid.

Groups of columns have a sub-scale of 4 bits, 1 .. 16, under one fp16 unit for 256 columns of a row. Groups of a grid
may choose among several tables.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SPAN = 256
"""Columns of a row under one unit."""
SCALES = 16
"""The largest sub-scale."""
ROUNDS = 3
"""Times that levels and scales are fitted to each other in turn."""
CHAINS = 512
"""Rows whose best paths are sought together: what that needs stays in the cache."""
LARGEST = 127
"""What whole levels reach: they are signed bytes."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """bits: of a weight    window: bits that tell its level    group: columns under a sub-scale

    shifts: a level is the sum of tables of 16 levels, looked up by 4 bits of the window from each of these on, which a
    byte shuffle does in a register; () = one table of 2^window
    tables: [C, 2^window] fp32, of which each group chooses one; trellises have C = 1
    """

    bits: int
    window: int
    group: int
    shifts: tuple[int, ...] = ()
    tables: Tensor

    @property
    def size(self) -> float:
        """Bits that a weight takes, its share of scales and choices included."""
        return self.bits + (4 + math.log2(len(self.tables))) / self.group + 16 / SPAN


@dataclass(frozen=True, kw_only=True)
class Coded:
    """A matrix in a code. index: levels in all tables, one after the other [N, K]    scale: of each weight [N, K]"""

    index: Tensor
    scale: Tensor

    def decoded(self, code: Code) -> Tensor:
        """What it stands for: [N, K] fp32."""
        return code.tables.flatten()[self.index] * self.scale


def encode(w: Tensor, code: Code, h: Tensor | None = None) -> Coded:
    """The best that is found of a matrix: levels and scales in turn, every row as it was best.

    w: [N, K] fp32, K a multiple of the group    h: [K] fp32 > 0, weights of the columns' errors, None = all alike
    """
    n, k = w.shape
    h = (torch.ones(k) if h is None else h / h.mean()).clamp_min(1e-6)
    groups, weight = w.view(n, -1, code.group), h.view(-1, code.group)
    sizes = _sum(groups.square() * weight, weight.sum(-1)).sqrt()
    units = _stored(_spans(sizes, code).amax(-1) / SCALES)
    best, least = None, torch.full((n,), torch.inf)
    for _ in range(ROUNDS):
        if code.window == code.bits:
            index, sub = _nearest(groups, weight, _of_groups(units, sizes, code), code)
        else:
            sub = _sub_scales(sizes, units, code)
            scale = (sub * _of_groups(units, sizes, code)).repeat_interleave(code.group, 1)
            index = viterbi(w, scale, h, code.tables[0], code.bits)
        levels = code.tables.flatten()[index].view(groups.shape)
        along, square = (_sum(levels * other * weight) for other in (groups, levels))
        if code.window > code.bits:
            sizes = (along / square.clamp_min(1e-30)).clamp_min_(0)
            sub = _sub_scales(sizes, units, code)
        fitted = [_spans(part, code).sum(-1) for part in (along * sub, square * sub.square())]
        units = _stored((fitted[0] / fitted[1].clamp_min(1e-30)).clamp_min_(0))
        found = Coded(
            index=index, scale=(sub * _of_groups(units, sub, code)).repeat_interleave(code.group, 1)
        )
        error = ((found.decoded(code) - w).square_() * h).sum(-1)
        better = (error < least)[:, None]
        best = found if best is None else _merged(better, found, best)
        least = torch.minimum(least, error)
    assert best is not None
    return best


def _sum(values: Tensor, by: Tensor | float = 1.0) -> Tensor:
    return values.sum(-1) / by


def _merged(better: Tensor, new: Coded, old: Coded) -> Coded:
    return Coded(
        index=torch.where(better, new.index, old.index), scale=torch.where(better, new.scale, old.scale)
    )


def _spans(values: Tensor, code: Code) -> Tensor:
    """Groups by span, the last one padded with zeros: [N, groups] -> [N, D, 256 / G]."""
    per = SPAN // code.group
    return torch.nn.functional.pad(values, (0, -values.shape[1] % per)).view(len(values), -1, per)


def _of_groups(units: Tensor, like: Tensor, code: Code) -> Tensor:
    """The unit of each group: [N, D] -> [N, groups]."""
    return units.repeat_interleave(SPAN // code.group, 1)[:, : like.shape[1]]


def _stored(units: Tensor) -> Tensor:
    return (units * 128).half().float() / 128  # as superscale.PARTS


def _sub_scales(sizes: Tensor, units: Tensor, code: Code) -> Tensor:
    """The nearest sub-scales, [N, groups]."""
    return (sizes / _of_groups(units, sizes, code).clamp_min(1e-30)).round_().clamp_(1, SCALES)


def _nearest(groups: Tensor, weight: Tensor, units: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """Levels [N, K] and sub-scales [N, groups] of least error: every sub-scale and table is tried.

    groups: [N, groups, G]    weight: [groups, G]    units: [N, groups]
    """
    best = torch.zeros(groups.shape, dtype=torch.int64)
    least, scale = torch.full(units.shape, torch.inf), torch.ones(units.shape)
    for number, table in enumerate(code.tables):
        levels, order = table.sort()
        middles = (levels[1:] + levels[:-1]) / 2
        for sub in range(1, SCALES + 1):
            step = (sub * units)[..., None]
            place = torch.bucketize(groups / step.clamp_min(1e-30), middles)
            error = _sum((levels[place] * step - groups).square_() * weight)
            better = error < least
            least, scale = torch.minimum(least, error), torch.where(better, float(sub), scale)
            best = torch.where(better[..., None], order[place] + number * len(table), best)
    return best.flatten(1), scale


def viterbi(w: Tensor, scale: Tensor, h: Tensor, table: Tensor, bits: int) -> Tensor:
    """The windows of least Σ h (w - scale · table[window])² of each row, whose stream begins behind zeros.

    w, scale: [N, K] fp32    h: [K] fp32    table: [2^window] fp32    returns: [N, K] int64
    """
    return torch.cat(
        [_paths(*part, h, table, bits) for part in zip(w.split(CHAINS), scale.split(CHAINS), strict=True)]
    )


def _paths(w: Tensor, scale: Tensor, h: Tensor, table: Tensor, bits: int) -> Tensor:
    """A state is what a window shares with the next one. Its low bits are the weight's own, the oldest ones the top."""
    (n, k), choices = w.shape, 2**bits
    states = len(table) // choices
    squares = torch.stack((table.square(), table), 1)  # of an error all but w², which no choice changes
    terms = torch.stack((h * scale.square(), -2 * h * scale * w)).permute(2, 0, 1).contiguous()
    costs = torch.full((k + 1, states, n), 1e30)
    costs[0, 0] = 0
    for i in range(k):
        each = (squares @ terms[i]).view(states, choices, n).add_(costs[i][:, None])
        torch.amin(each.view(choices, states, n), 0, out=costs[i + 1])
    found, rows = torch.empty((n, k), dtype=torch.int64), torch.arange(n)
    state = costs[k].argmin(0)
    oldest = torch.arange(choices)[:, None] * states
    for i in reversed(range(k)):
        windows = oldest + state
        each = (squares[windows] * terms[i].T).sum(-1) + costs[i][windows // choices, rows]
        found[:, i] = windows.gather(0, each.argmin(0, keepdim=True))[0]
        state = found[:, i] // choices
    return found


def train(code: Code, sample: Tensor, *, starts: int, rounds: int) -> Code:
    """The same code with tables fitted to a sample: levels by least squares and codes in turn (Lloyd), then made whole.

    code: its tables say how many there are    sample: [N, K] fp32 of unit variance    starts: of which the best stays
    """
    design = _design(code)
    best, least = code, math.inf
    for seed in range(starts):
        levels = _start(code, design.shape[1], seed)
        for _ in range(rounds):
            code = replace(code, tables=(design @ levels).view(code.tables.shape))
            coded = encode(sample, code)
            error = float((coded.decoded(code) - sample).square().mean())
            if error < least:
                best, least, kept = code, error, levels
            levels = _fitted(design, levels, coded, sample)
    step = kept.abs().max() * max(1, len(code.shifts)) / LARGEST
    return replace(best, tables=(design @ (kept / step).round() * step).view(code.tables.shape))


def _design(code: Code) -> Tensor:
    """Which levels add up to each entry of the tables: [C * 2^window, levels]."""
    if not code.shifts:
        return torch.eye(code.tables.numel())
    windows = torch.arange(2**code.window)
    return torch.cat(
        [torch.nn.functional.one_hot(windows >> shift & 15, 16).float() for shift in code.shifts], 1
    )


def _start(code: Code, count: int, seed: int) -> Tensor:
    """Of grids quantiles of a normal distribution, one table beside the other; of trellises random numbers."""
    if code.window == code.bits:
        quantiles = torch.special.ndtri((torch.arange(2**code.bits) + 0.5) / 2**code.bits)
        return torch.cat([quantiles + 0.3 * number for number in range(len(code.tables))])
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) / max(1, len(code.shifts)) ** 0.5


def _fitted(design: Tensor, levels: Tensor, coded: Coded, sample: Tensor) -> Tensor:
    """Levels of least squared error for codes and scales as they are; those of rare codes stay where they were."""
    index, scale = coded.index.flatten(), coded.scale.flatten()
    square = torch.zeros(len(design)).index_add_(0, index, scale.square())
    along = torch.zeros(len(design)).index_add_(0, index, scale * sample.flatten())
    stiff = 1e-3 * square.mean()
    normal = design.T @ (square[:, None] * design)
    normal.diagonal().add_(stiff)
    return torch.linalg.solve(normal, design.T @ along + stiff * levels)
