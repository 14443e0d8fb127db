"""Gate and up projection of experts with the activation between them, in one kernel or after two products."""

import triton
import triton.language as tl

from trilobite.kernels.gpu.device.decode import load_words
from trilobite.kernels.gpu.device.tile import (
    BLOCK_R,
    COLUMNS,
    META,
    RANK,
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


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr):
    """act(gate) * up, or gpt-oss's clamped gate; names as in `kernels/activation.py`."""
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


@triton.jit(do_not_specialize=["S"])
def gate_up(
    p_x, p_slab, p_table, p_bias, p_z, p_h, p_index, p_order, p_ends, p_tiles,
    S, DIVISOR, E, N, K, R_MAX,
    CLASS_ID: tl.constexpr, MODE: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    GATE_BITS: tl.constexpr, GATE_GROUP: tl.constexpr, GATE_SCALES: tl.constexpr, GATE_RANK_BITS: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, RANK_BITS: tl.constexpr, STEP: tl.constexpr,
    FORM: tl.constexpr, KS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, EP: tl.constexpr,
    Z_SPLITS: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """h[slot] = act(gate x) * (up x), or act(up x) without gates; x is row slot // DIVISOR.

    grid: (tiles, row blocks). h: [S, N]    bias: [E, 2N], gate first, or [E, N] without gates
      z: [2, Z_SPLITS, S, R_MAX] fp32
    """
    let_next_begin(CHAIN)
    tile = tl.program_id(0)
    expert, slot, mask = tile_slots(tile, p_index, p_order, p_ends, p_tiles, S, E, MODE, BLOCK_M, EP)
    p_gate = p_table + tl.minimum(expert, E - 1).to(tl.int64) * 3 * COLUMNS
    p_up = p_gate + COLUMNS
    n0 = tl.program_id(1) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    p_words = p_slab + tl.multiple_of(tl.load(p_up + WORDS), 32)
    p_meta = p_slab + tl.multiple_of(tl.load(p_up + META), 32)
    p_gate_words = p_slab + tl.multiple_of(tl.load(p_gate + WORDS), 32)
    p_gate_meta = p_slab + tl.multiple_of(tl.load(p_gate + META), 32)
    wait_for_last(CHAIN)
    if expert >= E:
        return
    if is_other(p_up, CLASS_ID):
        return
    chunks = tl.cdiv(K, 128)
    row = slot // DIVISOR
    acc = zeros(FORM, KS, BLOCK_N, BLOCK_M)
    gate = zeros(FORM, KS, BLOCK_N, BLOCK_M)
    for c in tl.range(0, tl.cdiv(chunks, KS), num_stages=STAGES):
        chunk = c * KS + tl.arange(0, KS)
        words = load_words(p_words, n, chunk, chunks, N, BITS, EVEN_K)
        if GATED:
            gate_words = load_words(p_gate_words, n, chunk, chunks, N, GATE_BITS, EVEN_K)
        for j in tl.static_range(128 // STEP):
            x = load_activations(p_x, row, mask, c * KS * 128 + j * STEP, K, KS, STEP, FORM, EVEN_K)
            total = step_sums(x, FORM, BLOCK_N)
            acc = add_step(
                acc, words, p_meta, n, N, x, total, chunk, K,
                j * STEP // 8, STEP, BITS, GROUP, SCALES, FORM, EVEN_K,
            )  # fmt: skip
            if GATED:
                gate = add_step(
                    gate, gate_words, p_gate_meta, n, N, x, total, chunk, K,
                    j * STEP // 8, STEP, GATE_BITS, GATE_GROUP, GATE_SCALES, FORM, EVEN_K,
                )  # fmt: skip
    acc, gate = gathered(acc, FORM), gathered(gate, FORM)
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    if RANK_BITS:
        last = tl.cdiv(tl.load(p_up + RANK).to(tl.int32), BLOCK_R)
        p_z_up = p_z + tl.cast(Z_SPLITS * S, tl.int64) * R_MAX
        acc = add_compensator(
            acc, p_slab, p_up, p_z_up, slot, mask, n0, n, N, 0, last, S, R_MAX,
            DTYPE, RANK_BITS, BLOCK_N, Z_SPLITS, FORM,
        )  # fmt: skip
    if GATED and GATE_RANK_BITS:
        last = tl.cdiv(tl.load(p_gate + RANK).to(tl.int32), BLOCK_R)
        gate = add_compensator(
            gate, p_slab, p_gate, p_z, slot, mask, n0, n, N, 0, last, S, R_MAX,
            DTYPE, GATE_RANK_BITS, BLOCK_N, Z_SPLITS, FORM,
        )  # fmt: skip
    if BIAS:
        if GATED:
            p_gate_bias = p_bias + expert.to(tl.int64) * 2 * N
            gate += tl.load(p_gate_bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
            p_up_bias = p_gate_bias + N
        else:
            p_up_bias = p_bias + expert.to(tl.int64) * N
        acc += tl.load(p_up_bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        h = _activate(gate, acc, ACTIVATION)
    else:
        h = _activate(acc, 1.0, ACTIVATION)
    at = (slot.to(tl.int64) * N)[None, :] + n[:, None]
    tl.store(p_h + at, h.to(DTYPE), mask=mask[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["S"])
def activate(
    p_both, p_table, p_bias, p_index, p_h, S, E, N,
    CLASS_ID: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """h[slot] = act(both[0, slot]) * both[1, slot], biases added, as in `gate_up`; for the slots of one class.

    grid: (S, blocks of N). both: [2, S, N] fp32, gate first    h: [S, N]
    """
    slot = tl.program_id(0)
    expert = tl.load(p_index + slot).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return
    if is_other(p_table + (expert * 3 + 1) * COLUMNS, CLASS_ID):
        return
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = slot.to(tl.int64) * N + n
    up = tl.load(p_both + tl.cast(S, tl.int64) * N + at, mask=n < N, other=0.0)
    if GATED:
        gate = tl.load(p_both + at, mask=n < N, other=0.0)
        if BIAS:
            p_bias += expert * 2 * N
            gate += tl.load(p_bias + n, mask=n < N, other=0.0).to(tl.float32)
            up += tl.load(p_bias + N + n, mask=n < N, other=0.0).to(tl.float32)
        h = _activate(gate, up, ACTIVATION)
    else:
        if BIAS:
            up += tl.load(p_bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)
        h = _activate(up, 1.0, ACTIVATION)
    tl.store(p_h + at, h.to(p_h.dtype.element_ty), mask=n < N)
