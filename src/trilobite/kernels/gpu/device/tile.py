"""Device functions that the kernels share: tiles of slots, and sums over a step of columns in two forms.

    factored    weights on the left, so that 8 or 16 tokens fill a tile; codes go into the product as they are, scales
                into its result. KS chunks of K at a time, by different warps: a program of few rows still has warps
                enough to keep memory busy, and their sums meet in registers at its end
    scaled      scales go into the weights, which are rounded to the activations' type, so that sums stay in the
                tensor core: for many rows, where products count and not decoding

Rows of activations are *slots*: token t's a-th expert is slot `t A + a`; a linear layer has one slot a token. A program
works on one tile of slots of one expert, one block of rows of the weight, and one range of the columns (split K);
ranges write sums of their own, which `reduce` or `combine` add in a fixed order, so results do not depend on the order
of execution.

Kernels are not specialised by the number of slots S: prompts of all lengths run the same machine code.

Names: BLOCK_N rows of the weight, BLOCK_M slots, STEP columns that share a scale, `n`, `slot`, `row` vectors of
indices, `p_` pointers. Offsets within a matrix fit 32 bits; those of matrices and rows are 64 bits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trilobite.kernels.gpu.device.decode import (
    bias_of,
    factor_bits,
    factor_operand,
    factor_scales,
    load_scales,
    ones,
    operand,
    order,
    unit_of,
)

# Modes: what a tile of slots is.
DENSE = tl.constexpr(0)
"""Consecutive rows of a linear layer."""
SLOTS = tl.constexpr(1)
"""One slot, of the expert that `index` names."""
SORTED = tl.constexpr(2)
"""Slots of one expert, as `route` has sorted them."""

# Columns of a table (layout.pack.PackColumn).
WORDS, META, U_WORDS, U_META, V_WORDS, V_META, SIGNS_IN, SIGNS_OUT, RANK, CLASS, COLUMNS = (
    tl.constexpr(0),
    tl.constexpr(1),
    tl.constexpr(2),
    tl.constexpr(3),
    tl.constexpr(4),
    tl.constexpr(5),
    tl.constexpr(6),
    tl.constexpr(7),
    tl.constexpr(8),
    tl.constexpr(9),
    tl.constexpr(10),
)
BLOCK_R = tl.constexpr(32)
"""Ranks of a compensator that are added at a time."""


@triton.jit
def let_next_begin(CHAIN: tl.constexpr):
    """Say that the launch behind this one may begin, as soon as all programs of this one have (`launch.chained`)."""
    if CHAIN > 0:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(CHAIN: tl.constexpr):
    """Wait until the launch before this one has ended, where this one began early: before what it made is read."""
    if CHAIN > 1:
        gdc_wait()


@triton.jit
def is_other(p_row, CLASS_ID: tl.constexpr):
    """Whether the matrix of a row of the table belongs to another class than this launch; CLASS_ID -1: there is one."""
    if CLASS_ID < 0:
        return False
    else:
        return tl.load(p_row + CLASS) != CLASS_ID


@triton.jit
def tile_slots(
    tile, p_index, p_order, p_ends, p_tiles, S, E, MODE: tl.constexpr, BLOCK_M: tl.constexpr, EP: tl.constexpr
):
    """The expert of a tile (E: none), its slots [BLOCK_M] and which of them are real."""
    m = tl.arange(0, BLOCK_M)
    if MODE == DENSE:
        expert = tile * 0
        slot = tile * BLOCK_M + m
        mask = slot < S
    elif MODE == SLOTS:
        expert = tl.load(p_index + tile)  # may be 64 bits long
        expert = tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)
        slot = tile + m * 0
        mask = m < tl.where(expert < E, 1, 0)
    else:
        e = tl.arange(0, EP)
        # All ends at once instead of a binary search, whose loads would wait for each other.
        last_tile = tl.load(p_tiles + e, mask=e < E, other=2147483647)
        expert = tl.sum((last_tile <= tile).to(tl.int32), 0)
        known = tl.minimum(expert, E - 1)
        before = tl.maximum(known - 1, 0)
        first_tile = tl.where(known > 0, tl.load(p_tiles + before), 0)
        first_slot = tl.where(known > 0, tl.load(p_ends + before), 0)
        at = first_slot + (tile - first_tile) * BLOCK_M + m
        mask = at < tl.where(expert < E, tl.load(p_ends + known), 0)
        slot = tl.load(p_order + at, mask=mask, other=0)
    return expert, slot, mask


@triton.jit
def load_activations(
    p_x, row, mask, start, K, KS: tl.constexpr, STEP: tl.constexpr, FORM: tl.constexpr, EVEN_K: tl.constexpr
):  # fmt: skip
    """STEP columns from `start` on, and as many of the KS - 1 chunks behind it, of the rows: a right operand.

    returns: [KS, STEP, BLOCK_M], scaled [STEP, BLOCK_M], which a tensor core reads where the copy from memory put it
    """
    k = start + order(STEP, FORM)[:, None]
    base, inside = row.to(tl.int64)[None, :] * K, mask[None, :]
    if FORM != "scaled":
        k = k[None, :, :] + (tl.arange(0, KS) * 128)[:, None, None]
        base, inside = base[None, :, :], inside[None, :, :]
    if not EVEN_K:
        inside = inside & (k < K)
    return tl.load(p_x + base + k, mask=inside, other=0.0)


@triton.jit
def step_sums(x, FORM: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum of the activations [KS, STEP, BLOCK_M] over a step, in a shape that broadcasts to the accumulator's."""
    if FORM != "factored":
        return 0.0
    elif x.dtype == tl.float32:
        return tl.sum(x, 1)[:, None, :]
    else:
        # A product with ones leaves the sums where the accumulator's threads need them; the tensor core is idle anyway.
        return tl.dot(ones(x.shape[0], BLOCK_N, x.shape[1], x.dtype), x)


@triton.jit
def _add_factored(
    acc, words, first: tl.constexpr, scale, offset, x, total, STEP: tl.constexpr, BITS: tl.constexpr
):
    """acc + scale * codes x + offset * total on the tensor cores: STEP columns of one group."""
    # Scales go to sums, not to weights: one multiplication a group and row, in fp32, and codes stay exact in 16 bits.
    d = tl.dot(operand(words, first, STEP, BITS, x.dtype, "factored"), x, input_precision="ieee")
    acc += d * (scale * unit_of(BITS, x.dtype))[:, :, None]
    if BITS != 16:
        acc += total * (offset - bias_of(BITS, x.dtype) * scale)[:, :, None]
    return acc


@triton.jit
def _add_scaled(acc, words, first: tl.constexpr, scale, offset, x, STEP: tl.constexpr, BITS: tl.constexpr):
    """acc + (scale * codes + offset) x: the same with weights of x's type, KS = 1."""
    w = operand(words, first, STEP, BITS, x.dtype, "scaled")
    if BITS != 16:
        w = w.to(tl.float32) * (scale * unit_of(BITS, x.dtype))[:, :, None]
        w += (offset - bias_of(BITS, x.dtype) * scale)[:, :, None]
    w = w.to(x.dtype).reshape(w.shape[1], STEP)
    return tl.dot(w, x, acc, input_precision="ieee")


@triton.jit
def add_step(
    acc, words, p_meta, n, rows, x, total, chunk, K,
    FIRST: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
    FORM: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """acc + W x over STEP columns from pair FIRST of each of the chunks [KS] on, which are in `words`.

    x, total: the activations and their sums, of `load_activations` and `step_sums`
    """
    scale, offset = load_scales(p_meta, n, chunk, FIRST, K, rows, BITS, GROUP, SCALES, EVEN_K)
    if FORM == "factored":
        return _add_factored(acc, words, FIRST, scale, offset, x, total, STEP, BITS)
    else:
        return _add_scaled(acc, words, FIRST, scale, offset, x, STEP, BITS)


@triton.jit
def zeros(FORM: tl.constexpr, KS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """An accumulator of zeros: [KS, BLOCK_N, BLOCK_M], scaled [BLOCK_N, BLOCK_M]."""
    if FORM == "factored":
        return tl.zeros((KS, BLOCK_N, BLOCK_M), tl.float32)
    else:
        return tl.zeros((BLOCK_N, BLOCK_M), tl.float32)


@triton.jit
def gathered(acc, FORM: tl.constexpr):
    """The sums [BLOCK_N, BLOCK_M] of an accumulator."""
    # Chunks are summed here, once: KS independent sums in the loop keep the tensor cores from waiting for each other.
    if FORM == "factored":
        return tl.sum(acc, 0)
    else:
        return acc


@triton.jit
def add_compensator(
    acc, p_slab, p_row, p_z, slot, mask, n0, n, N, first, last, S, R_MAX,
    DTYPE: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr, Z_SPLITS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """acc + U z for blocks first .. last - 1 of ranks; z = V x, in Z_SPLITS partial sums [Z_SPLITS, S, R_MAX] fp32."""
    STORED: tl.constexpr = factor_bits(BITS)
    UNIT: tl.constexpr = unit_of(STORED, DTYPE)
    MIDDLE: tl.constexpr = 0.0 if BITS == 16 else bias_of(STORED, DTYPE) + 2.0 ** (BITS - 1)
    R = tl.load(p_row + RANK).to(tl.int32)
    p_words = p_slab + tl.multiple_of(tl.load(p_row + U_WORDS), 32)
    p_meta = p_slab + tl.multiple_of(tl.load(p_row + U_META), 32)
    for block in tl.range(first, last, num_stages=1):
        r = block * BLOCK_R + order(BLOCK_R, FORM)
        at, inside = slot[None, :] * R_MAX + r[:, None], mask[None, :] & (r < R)[:, None]
        z = tl.zeros((BLOCK_R, slot.shape[0]), tl.float32)
        for s in tl.range(0, Z_SPLITS, num_stages=1):  # not unrolled: registers are scarce here
            z += tl.load(p_z + tl.cast(s, tl.int64) * S * R_MAX + at, mask=inside, other=0.0)
        u = factor_operand(p_words, n, block, N, STORED, DTYPE, FORM).reshape(BLOCK_N, BLOCK_R)
        if FORM == "scaled":
            scale = factor_scales(p_meta, n[:, None], r[None, :], R, BITS)
            u = ((u.to(tl.float32) * UNIT - MIDDLE) * scale).to(DTYPE)
            acc = tl.dot(u, z.to(DTYPE), acc, input_precision="ieee")
        else:
            # A block of rows lies in one group: its scales go to z, and the middle of the codes off the sum.
            z = (z * (factor_scales(p_meta, n0, r, R, BITS) * UNIT)[:, None]).to(DTYPE)
            acc -= tl.sum(z.to(tl.float32), 0)[None, :] * (MIDDLE / UNIT)
            acc = tl.dot(u, z, acc, input_precision="ieee")
    return acc
