"""One packed matrix times rows of activations, and the end of split K."""

import triton
import triton.language as tl

from trilobite.kernels.gpu.device.decode import load_words
from trilobite.kernels.gpu.device.tile import (
    BLOCK_R,
    COLUMNS,
    META,
    RANK,
    V_META,
    V_WORDS,
    WORDS,
    add_compensator,
    add_step,
    gathered,
    is_other,
    let_next_begin,
    load_activations,
    step_sums,
    tile_slots,
    wait_for_last,
    zeros,
)


@triton.jit(do_not_specialize=["S"])
def product(
    p_x, p_slab, p_table, p_bias, p_z, p_out, p_index, p_order, p_ends, p_tiles,
    S, DIVISOR, E, N, K, R_MAX, PROJECTIONS, PROJECTION,
    CLASS_ID: tl.constexpr, MODE: tl.constexpr, RANKED: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, RANK_BITS: tl.constexpr, STEP: tl.constexpr, FORM: tl.constexpr, KS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, EP: tl.constexpr, SPLITS: tl.constexpr, Z_SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """out[split, slot] = W x[slot // DIVISOR] over a range of columns; W is one projection of the slot's expert.

    grid: (tiles, row blocks, SPLITS x projections). out: [projections, SPLITS, S, N], fp32 or the result's type.
    RANKED: W is the compensator factor V of the projection, [rank, K] in groups of 64, and N the largest rank.
    """
    let_next_begin(CHAIN)
    tile, split = tl.program_id(0), tl.program_id(2) % SPLITS
    local = tl.program_id(2) // SPLITS
    expert, slot, mask = tile_slots(tile, p_index, p_order, p_ends, p_tiles, S, E, MODE, BLOCK_M, EP)
    known = tl.minimum(expert, E - 1).to(tl.int64)
    p_row = p_table + (known * PROJECTIONS + PROJECTION + local) * COLUMNS
    n0 = tl.program_id(1) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    rows = N
    # Parts begin at multiples of 32 words (layout.pack.ALIGN): told so, the compiler loads 16 bytes at once.
    p_words, p_meta = p_slab + tl.multiple_of(tl.load(p_row + WORDS), 32), p_slab
    if RANKED:
        rows = tl.load(p_row + RANK).to(tl.int32)
        p_words = p_slab + tl.multiple_of(tl.load(p_row + V_WORDS), 32)
        p_meta = p_slab + tl.multiple_of(tl.load(p_row + V_META), 32)
    else:
        p_meta = p_slab + tl.multiple_of(tl.load(p_row + META), 32)
    wait_for_last(CHAIN)
    if expert >= E:
        return
    if is_other(p_row, CLASS_ID):
        return
    chunks = tl.cdiv(K, 128)
    rounds = tl.cdiv(chunks, KS)
    blocks = rounds
    if RANK_BITS:  # U z is work along K too: splits share it, so that none of them waits for another
        blocks += tl.cdiv(tl.load(p_row + RANK).to(tl.int32), BLOCK_R)
    each = tl.cdiv(blocks, SPLITS)
    first = tl.minimum(split * each, blocks)
    last = tl.minimum(first + each, blocks)
    main = tl.minimum(last, rounds)
    if n0 >= rows:  # of V: ranks differ between experts, the grid is made for the largest
        main = first
    row = slot // DIVISOR
    acc = zeros(FORM, KS, BLOCK_N, BLOCK_M)
    for c in tl.range(first, main, num_stages=STAGES):
        chunk = c * KS + tl.arange(0, KS)
        words = load_words(p_words, n, chunk, chunks, rows, BITS, EVEN_K)
        for j in tl.static_range(128 // STEP):
            x = load_activations(p_x, row, mask, c * KS * 128 + j * STEP, K, KS, STEP, FORM, EVEN_K)
            total = 0.0
            if BITS != 16:
                total = step_sums(x, FORM, BLOCK_N)
            acc = add_step(
                acc, words, p_meta, n, rows, x, total, chunk, K,
                j * STEP // 8, STEP, BITS, GROUP, SCALES, FORM, EVEN_K,
            )  # fmt: skip
    acc = gathered(acc, FORM)
    if RANK_BITS:
        acc = add_compensator(
            acc, p_slab, p_row, p_z, slot, mask, n0, n, N, tl.maximum(first, rounds) - rounds, last - rounds, S, R_MAX,
            p_x.dtype.element_ty, RANK_BITS, BLOCK_N, Z_SPLITS, FORM,
        )  # fmt: skip
    if BIAS:
        acc += tl.load(p_bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at = (((local * SPLITS + split) * S + slot).to(tl.int64) * N)[None, :] + n[:, None]
    tl.store(p_out + at, acc.to(p_out.dtype.element_ty), mask=mask[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["S"])
def reduce(
    p_parts, p_bias, p_y, S, N,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """y[s, n] = sum over splits of parts[split, s, n], + bias[n]. grid: (S, blocks of N)."""
    wait_for_last(CHAIN)
    s = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(p_parts + (split * S + s) * N + n, mask=n < N, other=0.0)
    if BIAS:
        acc += tl.load(p_bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(p_y + s * N + n, acc.to(p_y.dtype.element_ty), mask=n < N)
