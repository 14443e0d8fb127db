"""The kernels: one packed matrix, or gate and up with the activation between them, times rows of activations.

Both come in two forms. With DOT the tokens are the columns of the tensor core's product (weights on the left, so 8 or
16 tokens fill a tile); without it, every thread multiplies in fp32. Rows of activations are *slots*: token t's a-th
expert is slot `t A + a`; a linear layer has one slot a token. A program works on one tile of slots of one expert, one
block of rows of the weight, and one range of the columns (split K); ranges write sums of their own, which `reduce` or
`combine` add in a fixed order, so results do not depend on the order of execution.

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
    load_words,
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
WORDS, META, U_WORDS, U_META, V_WORDS, V_META, RANK, CLASS, COLUMNS = (
    tl.constexpr(0),
    tl.constexpr(1),
    tl.constexpr(2),
    tl.constexpr(3),
    tl.constexpr(4),
    tl.constexpr(5),
    tl.constexpr(6),
    tl.constexpr(7),
    tl.constexpr(8),
)
BLOCK_R = tl.constexpr(16)
"""Ranks of a compensator that are added at a time."""
SUMS_FROM = tl.constexpr(64)
"""From so many slots a tile, sums over groups of activations come from `sums` instead of from a product with ones."""


@triton.jit
def _tile_slots(
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
def _activations(p_x, row, mask, k0, K, STEP: tl.constexpr, EVEN_K: tl.constexpr):
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
def _sums(x, p_sums, row, mask, step, steps, BLOCK_N: tl.constexpr):
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
def _zeros(DOT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """An accumulator of zeros: [BLOCK_N, BLOCK_M], or BLOCK_M tensors [BLOCK_N, 4] of partial sums."""
    if DOT:
        return tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        accs = ()
        for _ in tl.static_range(BLOCK_M):
            accs = accs + (tl.zeros((BLOCK_N, 4), tl.float32),)
        return accs


@triton.jit
def _gathered(accs, BLOCK_M: tl.constexpr):
    """The accumulator [BLOCK_N, BLOCK_M] from sums of lanes."""
    m = tl.arange(0, BLOCK_M)[None, :]
    acc = tl.sum(accs[0], 1)[:, None] + m * 0.0
    for i in tl.static_range(1, BLOCK_M):
        acc = tl.where(m == i, tl.sum(accs[i], 1)[:, None], acc)
    return acc


@triton.jit
def _row_ranges(row, mask, K, BLOCK_M: tl.constexpr):
    """Where each row of a tile begins, and its length (0 where there is no such row), as tuples of scalars."""
    m = tl.arange(0, BLOCK_M)
    bases = ()
    ends = ()
    for i in tl.static_range(BLOCK_M):
        bases = bases + (tl.sum(tl.where(m == i, row.to(tl.int64), 0), 0) * K,)
        ends = ends + (tl.sum((mask & (m == i)).to(tl.int32), 0) * K,)
    return bases, ends


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
def _add_compensator(
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


@triton.jit
def product(
    p_x, p_slab, p_table, p_bias, p_sums, p_z, p_out, p_index, p_order, p_ends, p_tiles,
    S, DIVISOR, E, N, K, R_MAX, PROJECTIONS, PROJECTION, CLASS_ID,
    MODE: tl.constexpr, RANKED: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr,
    RANK_BITS: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    EP: tl.constexpr, SPLITS: tl.constexpr, Z_SPLITS: tl.constexpr, EVEN_K: tl.constexpr, BIAS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out[split, slot] = W x[slot // DIVISOR] over a range of columns; W is one projection of the slot's expert.

    grid: (tiles, row blocks, SPLITS x projections). out: [projections, SPLITS, S, N], fp32 or the result's type.
    RANKED: W is the compensator factor V of the projection, [rank, K] in groups of 64, and N the largest rank.
    """
    tile, split = tl.program_id(0), tl.program_id(2) % SPLITS
    local = tl.program_id(2) // SPLITS
    expert, slot, mask = _tile_slots(tile, p_index, p_order, p_ends, p_tiles, S, E, MODE, BLOCK_M, EP)
    if expert >= E:
        return
    p_row = p_table + (expert.to(tl.int64) * PROJECTIONS + PROJECTION + local) * COLUMNS
    if tl.load(p_row + CLASS) != CLASS_ID:
        return
    n0 = tl.program_id(1) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    rows = N
    p_words, p_meta = p_slab + tl.multiple_of(tl.load(p_row + WORDS), 32), p_slab
    if RANKED:
        rows = tl.load(p_row + RANK).to(tl.int32)
        p_words = p_slab + tl.multiple_of(tl.load(p_row + V_WORDS), 32)
        p_meta = p_slab + tl.multiple_of(tl.load(p_row + V_META), 32)
    else:
        p_meta = p_slab + tl.multiple_of(tl.load(p_row + META), 32)
    chunks = tl.cdiv(K, 128)
    blocks = chunks
    if RANK_BITS:
        blocks += tl.cdiv(tl.load(p_row + RANK).to(tl.int32), BLOCK_R)
    each = tl.cdiv(blocks, SPLITS)
    first = tl.minimum(split * each, blocks)
    last = tl.minimum(first + each, blocks)
    main = tl.minimum(last, chunks)
    if n0 >= rows:
        main = first
    row = slot // DIVISOR
    steps = chunks * (128 // STEP)
    acc = _zeros(DOT, BLOCK_N, BLOCK_M)
    if not DOT:
        bases, row_ends = _row_ranges(row, mask, K, BLOCK_M)
    for c in tl.range(first, main, num_stages=STAGES):
        words = load_words(p_words, n, c, rows, BITS)
        for j in tl.static_range(128 // STEP):
            k0 = c * 128 + j * STEP
            scale, offset = load_scales(p_meta, n, _group(k0, K, GROUP, EVEN_K), rows, BITS, SYMMETRIC)
            if DOT:
                x = _activations(p_x, row, mask, k0, K, STEP, EVEN_K)
                total = (
                    _sums(x, p_sums, row, mask, c * (128 // STEP) + j, steps, BLOCK_N) if BITS != 16 else 0.0
                )
                acc = _add_dot(acc, words, j * STEP // 8, scale, offset, x, total, STEP, BITS)
            else:
                acc = _add_lanes(
                    acc, words, j * STEP // 8, scale, offset, p_x, bases, row_ends, k0, STEP, BITS, BLOCK_M
                )
    if not DOT:
        acc = _gathered(acc, BLOCK_M)
    if RANK_BITS:
        acc = _add_compensator(
            acc, p_slab, p_row, p_z, slot, mask, n0, tl.maximum(first, chunks) - chunks, last - chunks, S, R_MAX,
            p_x.dtype.element_ty, RANK_BITS, BLOCK_N, Z_SPLITS, DOT,
        )  # fmt: skip
    if BIAS:
        acc += tl.load(p_bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at = (((local * SPLITS + split) * S + slot).to(tl.int64) * N)[None, :] + n[:, None]
    tl.store(p_out + at, acc.to(p_out.dtype.element_ty), mask=mask[None, :] & (n < N)[:, None])


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr):
    """act(gate) * up, or gpt-oss's clamped gate; names as in `reference.gate_fn`."""
    if ACTIVATION == "gpt_oss":
        # The comparisons let NaN through, as torch.clamp does.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return (up + 1.0) * gate * tl.sigmoid(1.702 * gate)
    elif ACTIVATION == "silu" or ACTIVATION == "swish":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_new" or ACTIVATION == "gelu_pytorch_tanh" or ACTIVATION == "gelu_fast":
        return 0.5 * gate * (1.0 + _tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up
    elif ACTIVATION == "relu":
        return tl.where(gate < 0.0, 0.0, gate) * up
    elif ACTIVATION == "relu2":
        return tl.where(gate < 0.0, 0.0, gate * gate) * up
    elif ACTIVATION == "sigmoid":
        return tl.sigmoid(gate) * up
    elif ACTIVATION == "quick_gelu":
        return gate * tl.sigmoid(1.702 * gate) * up
    elif ACTIVATION == "tanh":
        return _tanh(gate) * up
    else:
        tl.static_assert(ACTIVATION == "linear", "unknown activation")
        return gate * up


@triton.jit
def gate_up(
    p_x, p_slab, p_table, p_bias, p_sums, p_z, p_h, p_index, p_order, p_ends, p_tiles,
    S, DIVISOR, E, N, K, R_MAX, CLASS_ID,
    MODE: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    GATE_BITS: tl.constexpr, GATE_GROUP: tl.constexpr, GATE_SYMMETRIC: tl.constexpr, GATE_RANK_BITS: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr, RANK_BITS: tl.constexpr,
    STEP: tl.constexpr, DOT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, EP: tl.constexpr,
    Z_SPLITS: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """h[slot] = act(gate x) * (up x), or act(up x) without gates; x is row slot // DIVISOR.

    grid: (tiles, row blocks). h: [S, N]    bias: [E, 2N], gate first    z: [2, Z_SPLITS, S, R_MAX] fp32
    """
    tile = tl.program_id(0)
    expert, slot, mask = _tile_slots(tile, p_index, p_order, p_ends, p_tiles, S, E, MODE, BLOCK_M, EP)
    if expert >= E:
        return
    p_gate = p_table + expert.to(tl.int64) * 3 * COLUMNS
    p_up = p_gate + COLUMNS
    if tl.load(p_up + CLASS) != CLASS_ID:
        return
    n0 = tl.program_id(1) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    p_words = p_slab + tl.multiple_of(tl.load(p_up + WORDS), 32)
    p_meta = p_slab + tl.multiple_of(tl.load(p_up + META), 32)
    p_gate_words = p_slab + tl.multiple_of(tl.load(p_gate + WORDS), 32)
    p_gate_meta = p_slab + tl.multiple_of(tl.load(p_gate + META), 32)
    chunks = tl.cdiv(K, 128)
    row = slot // DIVISOR
    steps = chunks * (128 // STEP)
    acc = _zeros(DOT, BLOCK_N, BLOCK_M)
    if not DOT:
        bases, row_ends = _row_ranges(row, mask, K, BLOCK_M)
    gate = acc
    for c in tl.range(0, chunks, num_stages=STAGES):
        words = load_words(p_words, n, c, N, BITS)
        if GATED:
            gate_words = load_words(p_gate_words, n, c, N, GATE_BITS)
        for j in tl.static_range(128 // STEP):
            k0 = c * 128 + j * STEP
            scale, offset = load_scales(p_meta, n, _group(k0, K, GROUP, EVEN_K), N, BITS, SYMMETRIC)
            if DOT:
                x = _activations(p_x, row, mask, k0, K, STEP, EVEN_K)
                total = _sums(x, p_sums, row, mask, c * (128 // STEP) + j, steps, BLOCK_N)
                acc = _add_dot(acc, words, j * STEP // 8, scale, offset, x, total, STEP, BITS)
            else:
                acc = _add_lanes(
                    acc, words, j * STEP // 8, scale, offset, p_x, bases, row_ends, k0, STEP, BITS, BLOCK_M
                )
            if GATED:
                scale, offset = load_scales(
                    p_gate_meta, n, _group(k0, K, GATE_GROUP, EVEN_K), N, GATE_BITS, GATE_SYMMETRIC
                )
                if DOT:
                    gate = _add_dot(gate, gate_words, j * STEP // 8, scale, offset, x, total, STEP, GATE_BITS)
                else:
                    gate = _add_lanes(
                        gate, gate_words, j * STEP // 8, scale, offset, p_x, bases, row_ends, k0,
                        STEP, GATE_BITS, BLOCK_M,
                    )  # fmt: skip
    if not DOT:
        acc, gate = _gathered(acc, BLOCK_M), _gathered(gate, BLOCK_M)
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    if RANK_BITS:
        last = tl.cdiv(tl.load(p_up + RANK).to(tl.int32), BLOCK_R)
        p_z_up = p_z + tl.cast(Z_SPLITS * S, tl.int64) * R_MAX
        acc = _add_compensator(
            acc,
            p_slab,
            p_up,
            p_z_up,
            slot,
            mask,
            n0,
            0,
            last,
            S,
            R_MAX,
            DTYPE,
            RANK_BITS,
            BLOCK_N,
            Z_SPLITS,
            DOT,
        )
    if GATED and GATE_RANK_BITS:
        last = tl.cdiv(tl.load(p_gate + RANK).to(tl.int32), BLOCK_R)
        gate = _add_compensator(
            gate, p_slab, p_gate, p_z, slot, mask, n0, 0, last, S, R_MAX,
            DTYPE, GATE_RANK_BITS, BLOCK_N, Z_SPLITS, DOT,
        )  # fmt: skip
    if BIAS:
        p_bias += expert.to(tl.int64) * 2 * N
        gate += tl.load(p_bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        acc += tl.load(p_bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        h = _activate(gate, acc, ACTIVATION)
    else:
        h = _activate(acc, 1.0, ACTIVATION)
    at = (slot.to(tl.int64) * N)[None, :] + n[:, None]
    tl.store(p_h + at, h.to(DTYPE), mask=mask[None, :] & (n < N)[:, None])


@triton.jit
def sums(p_x, p_sums, K, STEPS, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """sums[row, step] = sum of x over the STEP columns of a step. grid: (rows, blocks of steps)."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = step[:, None] * STEP + tl.arange(0, STEP)[None, :]
    x = tl.load(p_x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(p_sums + row * STEPS + step, tl.sum(x, 1), mask=step < STEPS)


@triton.jit
def reduce(p_parts, p_bias, p_y, S, N, SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """y[s, n] = sum over splits of parts[split, s, n], + bias[n]. grid: (S, blocks of N)."""
    s = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(p_parts + (split * S + s) * N + n, mask=n < N, other=0.0)
    if BIAS:
        acc += tl.load(p_bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(p_y + s * N + n, acc.to(p_y.dtype.element_ty), mask=n < N)
