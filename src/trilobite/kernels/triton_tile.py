"""Device functions that the kernels share: tiles of slots, and sums over a step of columns in two forms.

With DOT the tokens are the columns of the tensor core's product (weights on the left, so 8 or 16 tokens fill a tile);
without it, every thread multiplies in fp32. Rows of activations are *slots*: token t's a-th expert is slot `t A + a`;
a linear layer has one slot a token. A program works on one tile of slots of one expert, one block of rows of the
weight, and one range of the columns (split K); ranges write sums of their own, which `reduce` or `combine` add in a
fixed order, so results do not depend on the order of execution.

Names: BLOCK_N rows of the weight, BLOCK_M slots, STEP columns that share a scale, `n`, `slot`, `row` vectors of
indices, `p_` pointers. Offsets within a matrix fit 32 bits; those of matrices and rows are 64 bits.
"""

import triton
import triton.language as tl

from trilobite.kernels.triton_decode import (
    bias_of,
    code_pair,
    factor_tile,
    load_scales,
    operand,
    unit_of,
)

# Modes: what a tile of slots is.
DENSE = tl.constexpr(0)
"""Consecutive rows of a linear layer."""
SLOTS = tl.constexpr(1)
"""One slot, of the expert that `index` names."""
SORTED = tl.constexpr(2)
"""Slots of one expert, as `route` has sorted them."""

# Columns of a table (triton_layout.Place).
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
BLOCK_R = tl.constexpr(16)
"""Ranks of a compensator that are added at a time."""
SUMS_FROM = tl.constexpr(64)
"""From so many slots a tile, sums over groups of activations come from `sums` instead of from a product with ones."""


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
        expert = tl.load(p_index + tile).to(tl.int32)
        expert = tl.where((expert >= 0) & (expert < E), expert, E)
        slot = tile + m * 0
        mask = m < tl.where(expert < E, 1, 0)
    else:
        e = tl.arange(0, EP)
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
def load_activations(p_x, row, mask, k0, K, STEP: tl.constexpr, EVEN_K: tl.constexpr):
    """STEP columns of the rows as the right operand [STEP, BLOCK_M]."""
    k = k0 + tl.arange(0, STEP)
    inside = mask[None, :]
    if not EVEN_K:
        inside = inside & (k < K)[:, None]
    return tl.load(p_x + row.to(tl.int64)[None, :] * K + k[:, None], mask=inside, other=0.0)


@triton.jit
def _activation_pairs(p_x, base, end, k):
    """Columns k and k + 1, k [4] even, of the row that begins at `base`: two tensors [1, 4] fp32, zero from `end` on."""
    inside = k < end
    if p_x.dtype.element_ty == tl.float32:
        low = tl.load(p_x + base + k, mask=inside, other=0.0)
        high = tl.load(p_x + base + k + 1, mask=inside, other=0.0)
    else:
        pair = tl.load((p_x + base + k).to(tl.pointer_type(tl.int32)), mask=inside, other=0)
        low = pair.to(tl.int16).to(p_x.dtype.element_ty, bitcast=True).to(tl.float32)
        high = (pair >> 16).to(tl.int16).to(p_x.dtype.element_ty, bitcast=True).to(tl.float32)
    return low[None, :], high[None, :]


@triton.jit
def step_sums(x, p_sums, row, mask, step, steps, BLOCK_N: tl.constexpr):
    """Sum of the activations over a step, in a shape that broadcasts to the accumulator's."""
    if x.dtype == tl.float32:
        return tl.sum(x, 0)[None, :]
    elif x.shape[1] >= SUMS_FROM:
        return tl.load(p_sums + row.to(tl.int64) * steps + step, mask=mask, other=0.0)[None, :]
    else:
        # A product with ones leaves the sums where the accumulator's threads need them; the tensor core is idle anyway.
        return tl.dot(tl.full((BLOCK_N, x.shape[0]), 1.0, x.dtype), x)


@triton.jit
def _add_dot(
    acc, words, first: tl.constexpr, scale, offset, x, total, STEP: tl.constexpr, BITS: tl.constexpr
):
    """acc + scale * codes x + offset * total on the tensor cores: STEP columns of one group."""
    d = tl.dot(operand(words, first, STEP, BITS, x.dtype), x, input_precision="ieee")
    acc += d * (scale * unit_of(BITS, x.dtype))[:, None]
    if BITS != 16:
        acc += total * (offset - bias_of(BITS, x.dtype) * scale)[:, None]
    return acc


@triton.jit
def _add_lanes(
    accs, words, first: tl.constexpr, scale, offset, p_x, bases, ends, k0,
    STEP: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The same in fp32 without tensor cores, lane by lane: accs is a tuple of BLOCK_M tensors [BLOCK_N, 4]."""
    lanes = tl.arange(0, 4) * 2
    parts = ()
    totals = ()
    for f in tl.static_range(STEP // 8):
        low, high = code_pair(words, first + f, BITS)
        for m in tl.static_range(BLOCK_M):
            x0, x1 = _activation_pairs(p_x, bases[m], ends[m], k0 + 8 * f + lanes)
            if f == 0:
                part = low * x0
                total = x0 + x1
            else:
                part = parts[m] + low * x0
                total = totals[m] + x0 + x1
            parts = parts + (part + high * x1,)
            totals = totals + (total,)
        if f > 0:
            parts = parts[BLOCK_M:]
            totals = totals[BLOCK_M:]
    made = ()
    for m in tl.static_range(BLOCK_M):
        acc = accs[m] + parts[m] * (scale * unit_of(BITS, tl.float16))[:, None]
        if BITS != 16:
            acc += totals[m] * (offset - bias_of(BITS, tl.float16) * scale)[:, None]
        made = made + (acc,)
    return made


@triton.jit
def _group(k0, K, GROUP: tl.constexpr, EVEN_K: tl.constexpr):
    """Index of the group that holds column k0; the last one for the padding behind column K."""
    if GROUP == 0:
        return k0 * 0
    elif EVEN_K:
        return k0 // GROUP
    else:
        return tl.minimum(k0 // GROUP, tl.cdiv(K, GROUP) - 1)


@triton.jit
def add_step(
    acc, words, p_meta, n, rows, x, total, p_x, bases, ends, k0, K,
    FIRST: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr,
    DOT: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """acc + W x over the STEP columns from k0 on, pair FIRST of the chunk in `words`.

    x, total: the activations and their sums with DOT; without it they are read from p_x, `bases` and `ends`
    """
    scale, offset = load_scales(p_meta, n, _group(k0, K, GROUP, EVEN_K), rows, BITS, SYMMETRIC)
    if DOT:
        return _add_dot(acc, words, FIRST, scale, offset, x, total, STEP, BITS)
    else:
        return _add_lanes(acc, words, FIRST, scale, offset, p_x, bases, ends, k0, STEP, BITS, BLOCK_M)


@triton.jit
def zeros(DOT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """An accumulator of zeros: [BLOCK_N, BLOCK_M], or BLOCK_M tensors [BLOCK_N, 4] of partial sums."""
    if DOT:
        return tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        accs = ()
        for _ in tl.static_range(BLOCK_M):
            accs = accs + (tl.zeros((BLOCK_N, 4), tl.float32),)
        return accs


@triton.jit
def gathered(accs, BLOCK_M: tl.constexpr):
    """The accumulator [BLOCK_N, BLOCK_M] from sums of lanes."""
    m = tl.arange(0, BLOCK_M)[None, :]
    acc = tl.sum(accs[0], 1)[:, None] + m * 0.0
    for i in tl.static_range(1, BLOCK_M):
        acc = tl.where(m == i, tl.sum(accs[i], 1)[:, None], acc)
    return acc


@triton.jit
def row_ranges(row, mask, K, BLOCK_M: tl.constexpr):
    """Where each row of a tile begins, and its length (0 where there is no such row), as tuples of scalars."""
    m = tl.arange(0, BLOCK_M)
    bases = ()
    ends = ()
    for i in tl.static_range(BLOCK_M):
        bases = bases + (tl.sum(tl.where(m == i, row.to(tl.int64), 0), 0) * K,)
        ends = ends + (tl.sum((mask & (m == i)).to(tl.int32), 0) * K,)
    return bases, ends


@triton.jit
def add_compensator(
    acc, p_slab, p_row, p_z, slot, mask, n0, first, last, S, R_MAX,
    DTYPE: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr, Z_SPLITS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """acc + U z for blocks first .. last - 1 of ranks; z = V x, in Z_SPLITS partial sums [Z_SPLITS, S, R_MAX] fp32."""
    R = tl.load(p_row + RANK).to(tl.int32)
    p_words = p_slab + tl.multiple_of(tl.load(p_row + U_WORDS), 32)
    p_meta = p_slab + tl.multiple_of(tl.load(p_row + U_META), 32)
    for block in tl.range(first, last, num_stages=1):
        r = block * BLOCK_R + tl.arange(0, BLOCK_R)
        u = factor_tile(p_words, p_meta, r, R, n0, BITS, BLOCK_N)
        z = tl.zeros((BLOCK_R, slot.shape[0]), tl.float32)
        for s in tl.range(0, Z_SPLITS, num_stages=1):  # not unrolled: registers are scarce here
            at = (s * S + slot).to(tl.int64)[None, :] * R_MAX + r[:, None]
            z += tl.load(p_z + at, mask=mask[None, :] & (r[:, None] < R), other=0.0)
        if DOT:
            acc += tl.dot(tl.trans(u).to(DTYPE), z.to(DTYPE), input_precision="ieee")
        else:
            acc += tl.sum(u[:, :, None] * z[:, None, :], 0)
    return acc
