"""The fast Hadamard transform with its random signs, forward and back (QuIP#, Algorithm 3; formats/incoherence.py).

H of order n = L R is a Kronecker product of H_L, whatever Hadamard matrices make up the order L, and Sylvester's H_R:
with x as a matrix [L, R], H x is H_L x H_R. Both products run on the tensor cores; H_R's entries are the parity of
i & j, those of H_L come from a table. A program makes BLOCK_L rows of the result, and reads all of x for that.
"""

import triton
import triton.language as tl

from trilobite.kernels.gpu.device.tile import COLUMNS, SIGNS_IN, SIGNS_OUT, is_other


@triton.jit
def _sylvester(R: tl.constexpr):
    """H_R [R, R] fp32, R a power of two up to 256."""
    both = tl.arange(0, R)[:, None] & tl.arange(0, R)[None, :]
    both ^= both >> 4
    both ^= both >> 2
    both ^= both >> 1
    return 1.0 - 2.0 * (both & 1).to(tl.float32)


@triton.jit
def _high(x):
    """The part of fp32 numbers that the tensor core sees: their first 11 bits."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _from_left(h, x, acc):
    """acc + h x for h of +-1: two products of 11 bits each, 22 of the 24 bits of x."""
    high = _high(x)
    acc = tl.dot(h, high, acc, input_precision="tf32")
    return tl.dot(h, x - high, acc, input_precision="tf32")


@triton.jit
def _from_right(x, h):
    """x h for h of +-1, likewise."""
    high = _high(x)
    return tl.dot(x - high, h, tl.dot(high, h, input_precision="tf32"), input_precision="tf32")


@triton.jit
def _factors(p_signs, k, mask, TUNED: tl.constexpr):
    """Entries k of a random vector, fp32: bits, 1 = negative, or fp16 where they are tuned."""
    if TUNED:
        pair = tl.load(p_signs + k // 2, mask=mask, other=0)
        return (pair >> (k % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        word = tl.load(p_signs + k // 32, mask=mask, other=0)
        return 1.0 - 2.0 * (word >> (k % 32) & 1).to(tl.float32)


@triton.jit
def _position(k):
    """Where column k lies in the GPU layout of a lattice format: inverse of `layout.codewords.column_of`."""
    lane, e = k % 32 // 8, k % 8
    return k // 32 * 32 + e // 4 * 16 + e // 2 % 2 * 8 + lane * 2 + e % 2


@triton.jit
def _expert(p_index, slot, E, INDEXED: tl.constexpr):
    """The expert of a slot; E: none."""
    if INDEXED:
        expert = tl.load(p_index + slot)  # may be 64 bits long
        return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)
    else:
        return slot * 0


@triton.jit(do_not_specialize=["S"])
def spin(
    p_x, p_slab, p_table, p_core, p_index, p_out,
    S, DIVISOR, E, N, L, WIDTH, SCALE, PROJECTIONS, PROJECTION,
    CLASS_ID: tl.constexpr, INDEXED: tl.constexpr, TUNED: tl.constexpr, R: tl.constexpr, PADDED_R: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """out[p, slot] = T_in x[slot // DIVISOR], in the order of the GPU layout; columns from N on are left as they are.

    grid: (S, blocks of L, projections). x: [rows, N]    out: [projections, S, WIDTH]    core: H_L [L, L] int8
    N = L R    SCALE: N ** -0.5    PADDED_R: R, at least 16
    """
    slot, local = tl.program_id(0), tl.program_id(2)
    expert = _expert(p_index, slot, E, INDEXED)
    if expert >= E:
        return
    p_row = p_table + (expert.to(tl.int64) * PROJECTIONS + PROJECTION + local) * COLUMNS
    if is_other(p_row, CLASS_ID):
        return
    p_signs = p_slab + tl.multiple_of(tl.load(p_row + SIGNS_IN), 32)
    p_x += (slot // DIVISOR).to(tl.int64) * N
    i = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    r = tl.arange(0, PADDED_R)[None, :]
    acc = tl.zeros((BLOCK_L, PADDED_R), tl.float32)
    for j0 in tl.range(0, L, BLOCK_J, num_stages=1):
        j = j0 + tl.arange(0, BLOCK_J)
        k, inside = j[:, None] * R + r, (j < L)[:, None] & (r < R)
        x = tl.load(p_x + k, mask=inside, other=0.0).to(tl.float32) * _factors(p_signs, k, inside, TUNED)
        h = tl.load(p_core + i[:, None] * L + j[None, :], mask=(i < L)[:, None] & (j < L)[None, :], other=0)
        acc = _from_left(h.to(tl.float32), x, acc)
    # H_L X H_R with X = x as [L, R]: two small products instead of one of order n.
    y = _from_right(acc, _sylvester(PADDED_R)) * SCALE
    k = i[:, None] * R + r
    p_out += (local * S + slot).to(tl.int64) * WIDTH
    tl.store(p_out + _position(k), y.to(p_out.dtype.element_ty), mask=(i < L)[:, None] & (r < R))


@triton.jit(do_not_specialize=["S"])
def spin_back(
    p_parts, p_slab, p_table, p_core, p_index, p_low, p_bias, p_out,
    S, E, N, L, SCALE, PROJECTIONS, PROJECTION,
    CLASS_ID: tl.constexpr, INDEXED: tl.constexpr, TUNED: tl.constexpr, SPLITS: tl.constexpr, LOW: tl.constexpr,
    BIAS: tl.constexpr, R: tl.constexpr, PADDED_R: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """out[p, slot] = T_out^T (sum over splits of parts[p, split, slot]) + low[p, slot] + bias.

    grid: (S, blocks of L, projections). parts: [projections, SPLITS, S, N] fp32    low: [projections, S, N] fp32
    out: [projections, S, N]    bias: [N], of a linear layer    the rest as in `spin`
    """
    slot, local = tl.program_id(0), tl.program_id(2)
    expert = _expert(p_index, slot, E, INDEXED)
    if expert >= E:
        return
    p_row = p_table + (expert.to(tl.int64) * PROJECTIONS + PROJECTION + local) * COLUMNS
    if is_other(p_row, CLASS_ID):
        return
    p_signs = p_slab + tl.multiple_of(tl.load(p_row + SIGNS_OUT), 32)
    i = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    r = tl.arange(0, PADDED_R)[None, :]
    acc = tl.zeros((BLOCK_L, PADDED_R), tl.float32)
    for j0 in tl.range(0, L, BLOCK_J, num_stages=1):
        j = j0 + tl.arange(0, BLOCK_J)
        k, inside = j[:, None] * R + r, (j < L)[:, None] & (r < R)
        z = tl.zeros((BLOCK_J, PADDED_R), tl.float32)
        for split in tl.range(0, SPLITS, num_stages=1):  # not unrolled: registers are scarce here
            at = ((local * SPLITS + split) * S + slot).to(tl.int64) * N
            z += tl.load(p_parts + at + k, mask=inside, other=0.0)
        h = tl.load(p_core + j[None, :] * L + i[:, None], mask=(i < L)[:, None] & (j < L)[None, :], other=0)
        acc = _from_left(h.to(tl.float32), z, acc)
    y = _from_right(acc, _sylvester(PADDED_R)) * SCALE
    k, inside = i[:, None] * R + r, (i < L)[:, None] & (r < R)
    y *= _factors(p_signs, k, inside, TUNED)
    at = (local * S + slot).to(tl.int64) * N
    if LOW:
        y += tl.load(p_low + at + k, mask=inside, other=0.0)
    if BIAS:
        y += tl.load(p_bias + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(p_out + at + k, y.to(p_out.dtype.element_ty), mask=inside)
