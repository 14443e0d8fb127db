"""Products with E8P codewords (QuIP#, section 4.2): decoded in registers to 4-bit codes, and multiplied as INT4 is.

Activations and sums are in rotated coordinates, `hadamard.py` takes them there and back; a compensator's share is
in plain ones and has a kernel of its own.
"""

import triton
import triton.language as tl

from trilobite.kernels.gpu.device.decode import bias_of, load_words, ones, operand, unit_of
from trilobite.kernels.gpu.device.tile import (
    BLOCK_R,
    COLUMNS,
    META,
    RANK,
    WORDS,
    add_compensator,
    is_other,
    load_activations,
    tile_slots,
)


@triton.jit
def _lookup(p_codes, word):
    """Table entries for the four bytes of every word: four tensors of 4-bit codes."""
    made = ()
    for j in tl.static_range(4):
        made = made + (tl.load(p_codes + ((word >> (8 * j)) & 255)),)
    return made


@triton.jit
def _e8p(p_codes, patterns, signs):
    """Four codewords of every lane as words of 4-bit codes: weight = (code - 7.5) / 2 (`layout/codewords.py`)."""
    entries = _lookup(p_codes, patterns)
    made = ()
    for j in tl.static_range(4):
        x = (signs >> j) & 0x11111111
        # Nibble 0 holds the shift b; its lane is negative when the others' signs say so: b ^ (parity of all eight),
        # which is bit 28 of a product that adds up the nibbles.
        odd = ((x * 0x11111111).to(tl.uint32, bitcast=True) >> 28).to(tl.int32)
        made = made + (entries[j] ^ (((x ^ odd) & 0x11111111) * 14) ^ ((x & 1) * 0x11111111),)
    return made


@triton.jit
def _as_weights(acc, total, scale, middle: tl.constexpr, DTYPE: tl.constexpr):
    """scale * sum (code - middle) x from the product with `operand` and the sum of x."""
    return scale * (unit_of(4, DTYPE) * acc - (bias_of(4, DTYPE) + middle) * total)


@triton.jit(do_not_specialize=["S"])
def lattice_product(
    p_x, p_slab, p_table, p_codes, p_out, p_index, p_order, p_ends, p_tiles,
    S, E, N, K, PROJECTIONS, PROJECTION,
    CLASS_ID: tl.constexpr, MODE: tl.constexpr, BITS: tl.constexpr, KS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, EP: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[p, split, slot] = C x[p, slot] over a range of columns; C is what the codewords of one projection stand for.

    grid: (tiles, row blocks, SPLITS x projections). x: [projections, S, K], rotated, in the order of the layout, K a
    multiple of 128    codes: `layout.codewords.tables`    out: [projections, SPLITS, S, N] fp32
    """
    tile, split = tl.program_id(0), tl.program_id(2) % SPLITS
    local = tl.program_id(2) // SPLITS
    expert, slot, mask = tile_slots(tile, p_index, p_order, p_ends, p_tiles, S, E, MODE, BLOCK_M, EP)
    if expert >= E:
        return
    p_row = p_table + (expert.to(tl.int64) * PROJECTIONS + PROJECTION + local) * COLUMNS
    if is_other(p_row, CLASS_ID):
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    p_words = p_slab + tl.multiple_of(tl.load(p_row + WORDS), 32)
    chunks = K // 128
    rounds = tl.cdiv(chunks, KS)
    each = tl.cdiv(rounds, SPLITS)
    first = tl.minimum(split * each, rounds)
    last = tl.minimum(first + each, rounds)
    row = local * S + slot
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    acc = tl.zeros((KS, BLOCK_N, BLOCK_M), tl.float32)
    rest = tl.zeros((KS, BLOCK_N, BLOCK_M), tl.float32)
    totals = tl.zeros((KS, 16, BLOCK_M), tl.float32)  # 16 equal rows: the least that a tensor core multiplies
    for c in tl.range(first, last, num_stages=STAGES):
        chunk = c * KS + tl.arange(0, KS)
        words = load_words(p_words, n, chunk, chunks, N, BITS, EVEN_K)
        x = load_activations(p_x, row, mask, c * KS * 128, K, KS, 128, "factored", EVEN_K)
        totals = tl.dot(ones(KS, 16, 128, DTYPE), x, totals, input_precision="ieee")
        if BITS == 1:
            codes = _lookup(p_codes + 256, words[0])
        else:
            codes = _e8p(p_codes, words[0], words[1])
        acc = tl.dot(operand(codes, 0, 128, 4, DTYPE, "factored"), x, acc, input_precision="ieee")
        if BITS > 2:
            if BITS == 3:
                codes = _lookup(p_codes + 256, words[2])
            else:
                codes = _e8p(p_codes, words[2], words[3])
            rest = tl.dot(operand(codes, 0, 128, 4, DTYPE, "factored"), x, rest, input_precision="ieee")
    total = tl.sum(tl.sum(totals, 1), 0)[None, :] / 16.0
    p_scales = p_slab + tl.multiple_of(tl.load(p_row + META), 32)
    scale = tl.load(p_scales).to(tl.float32, bitcast=True) / 2
    made = _as_weights(tl.sum(acc, 0), total, scale, 8.0 if BITS == 1 else 7.5, DTYPE)
    if BITS > 2:
        second = tl.load(p_scales + 1).to(tl.float32, bitcast=True) / 2
        made += _as_weights(tl.sum(rest, 0), total, second, 8.0 if BITS == 3 else 7.5, DTYPE)
    at = (((local * SPLITS + split) * S + slot).to(tl.int64) * N)[None, :] + n[:, None]
    tl.store(p_out + at, made, mask=mask[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["S"])
def compensate(
    p_x, p_slab, p_table, p_z, p_out, p_index, p_order, p_ends, p_tiles,
    S, E, N, R_MAX, PROJECTIONS, PROJECTION,
    CLASS_ID: tl.constexpr, MODE: tl.constexpr, RANK_BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    EP: tl.constexpr, Z_SPLITS: tl.constexpr,
):  # fmt: skip
    """out[slot] = U z of one projection. grid: (tiles, row blocks). z: [Z_SPLITS, S, R_MAX] fp32    out: [S, N] fp32.

    x: only its type is used, in which U and z are multiplied
    """
    tile = tl.program_id(0)
    expert, slot, mask = tile_slots(tile, p_index, p_order, p_ends, p_tiles, S, E, MODE, BLOCK_M, EP)
    if expert >= E:
        return
    p_row = p_table + (expert.to(tl.int64) * PROJECTIONS + PROJECTION) * COLUMNS
    if is_other(p_row, CLASS_ID):
        return
    n0 = tl.program_id(1) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    last = tl.cdiv(tl.load(p_row + RANK).to(tl.int32), BLOCK_R)
    acc = add_compensator(
        tl.zeros((BLOCK_N, BLOCK_M), tl.float32), p_slab, p_row, p_z, slot, mask, n0, n, N, 0, last, S, R_MAX,
        p_x.dtype.element_ty, RANK_BITS, BLOCK_N, Z_SPLITS, "factored",
    )  # fmt: skip
    at = (slot.to(tl.int64) * N)[None, :] + n[:, None]
    tl.store(p_out + at, acc, mask=mask[None, :] & (n < N)[:, None])
