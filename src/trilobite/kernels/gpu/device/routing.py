"""Routing on the device, without a host that waits: sort the slots by expert, and add up a token's experts.

One launch of `route` sorts. Every program counts all experts' slots (a histogram), and places the slots of its own block
behind those of smaller experts and of earlier slots of the same one: a stable counting sort without atomics, whose
result is the same every time. Indices are padded to tiles, tensors are not: `tiles` and `ends` tell each tile of each
expert where its slots begin and end. Grids have a fixed size, that of the worst case, and tiles too many leave at once.
"""

import triton
import triton.language as tl

from trilobite.kernels.gpu.device.tile import wait_for_last


@triton.jit
def _known(index, E):
    """Experts as int32, -1 for indices that name none, of 64 bits or less."""
    return tl.where((index >= 0) & (index < E), index, -1).to(tl.int32)


@triton.jit(do_not_specialize=["S"])
def route(
    p_index, p_order, p_ends, p_tiles, S, E, EP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Stable counting sort of slots by expert. grid: (ceil(S / BLOCK),)

    index: [T, A], read as the experts of S = T A slots, E and above (and below 0) = none
    order: [S] int32, slots by expert; those without one are left out    ends: [E] int32, past the last of each expert
    tiles: [E] int32, past the last tile of BLOCK_M slots of each expert
    """
    own = tl.program_id(0)
    e = tl.arange(0, EP)
    count = tl.zeros((EP,), tl.int32)
    before = tl.zeros((EP,), tl.int32)
    # Every program counts all slots: quadratic, but without a second launch or atomics, whose order would not be stable.
    for block in range(0, tl.cdiv(S, BLOCK)):
        s = block * BLOCK + tl.arange(0, BLOCK)
        index = _known(tl.load(p_index + s, mask=s < S, other=-1), E)
        hits = tl.sum((index[:, None] == e[None, :]).to(tl.int32), 0)
        count += hits
        before += tl.where(block < own, hits, 0)
    count = tl.where(e < E, count, 0)
    ends = tl.cumsum(count, 0)
    if own == 0:
        tl.store(p_ends + e, ends, mask=e < E)
        tl.store(p_tiles + e, tl.cumsum(tl.cdiv(count, BLOCK_M), 0), mask=e < E)
    i = tl.arange(0, BLOCK)
    slot = own * BLOCK + i
    index = _known(tl.load(p_index + slot, mask=slot < S, other=-1), E)
    real = index >= 0
    # The same indices along the other axis: which earlier slots of this block have my expert?
    other = tl.load(p_index + own * BLOCK + i[None, :], mask=own * BLOCK + i[None, :] < S, other=-1)
    other = _known(other, E)
    rank = tl.sum(((other == index[:, None]) & (i[None, :] < i[:, None])).to(tl.int32), 1)
    first = tl.sum(tl.where(index[:, None] == e[None, :], (ends - count + before)[None, :], 0), 1)
    tl.store(p_order + first + rank, slot, mask=real)


@triton.jit(do_not_specialize=["S"])
def combine(
    p_parts, p_index, p_weights, p_bias, p_y, S, E, A, N,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """y[t] = sum over a of weight[t, a] * (sum over splits of parts[split, t A + a] + bias[expert]).

    grid: (T, blocks of N). parts: [SPLITS, S, N] fp32; slots without an expert are not read
    """
    wait_for_last(CHAIN)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros((BLOCK,), tl.float32)
    for a in range(0, A):
        slot = t * A + a
        expert = _known(tl.load(p_index + slot), E)
        inside = n < tl.where(expert >= 0, N, 0)  # parts of slots without an expert were never written
        part = tl.zeros((BLOCK,), tl.float32)
        for split in tl.static_range(SPLITS):
            part += tl.load(p_parts + (split * S + slot) * N + n, mask=inside, other=0.0)
        if BIAS:
            part += tl.load(p_bias + expert.to(tl.int64) * N + n, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(p_weights + slot).to(tl.float32)
        y += tl.where(inside, part * weight, 0.0)
    tl.store(p_y + t * N + n, y.to(p_y.dtype.element_ty), mask=n < N)
