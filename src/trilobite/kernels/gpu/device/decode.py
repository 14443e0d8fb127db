"""Device functions that turn words of the GPU layout into operands (docs/gpu.md), and scales into fp32.

A code leaves a word with a shift, a mask and a magic number: with its bits at the top of the mantissa of 1.0 (fp16
0x3C00, bf16 0x3F80) the number is 1 + q / 2^bits. Two codes at a time, as a word is two halves. The 1 is not taken off
each weight but off the sum over a group, which costs nothing since groups with offsets need the sum of the activations
anyway:

    sum_k (s q + o) x  =  s unit sum_k (q + bias) / unit x  +  (o - bias s) sum_k x,    bias = unit = 2^bits

The words of a row are laid out so that the tile made here *is* the left operand of `mma.m16n8k16`: between memory and
the tensor core no value changes its thread. Triton before 3.8 gives a thread four neighbours of an operand made by
`tl.join` instead of two; there the columns of a step change places (`order`), which a sum over them does not notice.
"""

import triton
import triton.language as tl

from trilobite.formats.superscale import UNITS
from trilobite.kernels.gpu.launch import OLD_TRITON

NEIGHBOURS = tl.constexpr(OLD_TRITON)
"""Whether a thread's values of an operand are four neighbours."""


# How scales lie in `meta` (kernels.layer.Coding.scales); 0: with offsets.
SYMMETRIC = tl.constexpr(1)
SUPER = tl.constexpr(2)


@triton.constexpr_function
def offset_unit(bits):
    """One step of an offset under super-scales (formats/superscale.py)."""
    return UNITS[bits]


@triton.jit
def load_words(p_words, n, chunk, chunks, N, BITS: tl.constexpr, EVEN_K: tl.constexpr):
    """The words of KS chunks: BITS tensors [KS, BLOCK_N, 4] int32, zero from row N and from chunk `chunks` on.

    n: [BLOCK_N] rows    chunk: [KS]    EVEN_K: no chunk lies past the end
    """
    at = n[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    inside = (n < N)[None, :, None]
    if not EVEN_K:
        inside = inside & (chunk < chunks)[:, None, None]
    words = ()
    for w in tl.static_range(BITS):
        words = words + (
            tl.load(p_words + ((chunk * BITS + w) * N * 4)[:, None, None] + at, mask=inside, other=0),
        )
    return words


@triton.jit
def load_scales(
    p_meta, n, chunk, first: tl.constexpr, K, N,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Scales and offsets [KS, BLOCK_N] fp32 of the groups that hold pair `first` of the chunks [KS].

    Past column K they are the last group's, or finite: what they multiply is zero.
    """
    PER: tl.constexpr = 4 if SCALES == SUPER else 2 if SCALES == SYMMETRIC else 1  # groups a word
    IN_CHUNK: tl.constexpr = first * 8 // GROUP if GROUP > 0 and GROUP < 128 else 0
    rows, inside = n[None, :] + chunk[:, None] * 0, (n < N)[None, :]
    if BITS == 16:
        scale = tl.full(rows.shape, 1.0, tl.float32)
        offset = tl.full(rows.shape, 0.0, tl.float32)
    else:
        if GROUP == 0:
            word = chunk * 0
        elif GROUP < 128:
            # Groups that share a word load it by the same address, so that the compiler loads it once.
            word = chunk * (128 // GROUP // PER) + IN_CHUNK // PER
        else:
            word = chunk // (GROUP // 128 * PER)
        if GROUP > 0 and not EVEN_K:
            word = tl.minimum(word, tl.cdiv(K, GROUP * PER) - 1)
        pair = tl.load(p_meta + (word * N)[:, None] + rows, mask=inside, other=0)
        if SCALES == SUPER:
            code = pair >> IN_CHUNK % 4 * 8
            word = chunk // 4  # a super-scale is for two chunks, a word has two of them
            if not EVEN_K:
                word = tl.minimum(word, tl.cdiv(K, 512) - 1)
            pair = tl.load(
                p_meta + ((tl.cdiv(K, GROUP * 4) + word) * N)[:, None] + rows, mask=inside, other=0
            )
            pair = pair >> (chunk // 2 % 2 * 16)[:, None]
            supers = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * (1 / 128)
            scale = supers * ((code & 15) + 1).to(tl.float32)
            offset = supers * (((code >> 4 & 15) - 15) * offset_unit(BITS)).to(tl.float32)
        elif SCALES == SYMMETRIC:
            if GROUP > 64:
                pair = pair >> (chunk // (GROUP // 128) % 2 * 16)[:, None]
            elif IN_CHUNK % 2:
                pair = pair >> 16
            scale = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            offset = scale * -(2.0 ** (BITS - 1))
        else:
            scale = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            offset = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, offset


@triton.constexpr_function
def is_converted(bits, dtype):
    """Whether codes become numbers one by one: fp32, 16-bit factors, and INT8 in bf16, whose mantissa is too short."""
    return bits == 16 or dtype == tl.float32 or (bits == 8 and dtype == tl.bfloat16)


@triton.constexpr_function
def bias_of(bits, dtype):
    """What `operand` adds to every code, of which it then makes the 2^bits-th part; see `unit_of`."""
    return 0.0 if is_converted(bits, dtype) else 2.0**bits


@triton.constexpr_function
def unit_of(bits, dtype):
    """`operand` makes (code + bias) / unit of a code."""
    return 1.0 if is_converted(bits, dtype) else 2.0**bits


@triton.constexpr_function
def factor_bits(bits):
    """Bits in which the GPU layout keeps codes of U: those of 3 bits in 4, so that 32 of them are a word."""
    return 4 if bits == 3 else bits


@triton.jit
def _move(word, bits: tl.constexpr):
    """word << bits, or >> where negative."""
    if bits > 0:
        return word << bits
    elif bits < 0:
        return word >> -bits
    else:
        return word


@triton.jit
def _pair(words, f: tl.constexpr, BITS: tl.constexpr, TOP: tl.constexpr, MAGIC: tl.constexpr):
    """Pair f of every lane: a code in each half of the word, its highest bit at bit TOP - 1, and the magic number."""
    TO: tl.constexpr = TOP - BITS if BITS < 16 else 0
    MASK: tl.constexpr = (2**BITS - 1) * 0x00010001 << TO
    if BITS == 16:
        return words[f]
    elif BITS == 3 and f == 15:
        v = (_move(words[0], TO) & (0x00010001 << TO)) | MAGIC
        v = (_move(words[1], TO + 1) & (0x00020002 << TO)) | v
        return (_move(words[2], TO + 2) & (0x00040004 << TO)) | v
    elif BITS == 3:
        return (_move(words[f // 5], TO - 1 - 3 * (f % 5)) & MASK) | MAGIC
    else:
        return (_move(words[f // (16 // BITS)], TO - BITS * (f % (16 // BITS))) & MASK) | MAGIC


@triton.jit
def _pairs(
    words,
    first: tl.constexpr,
    count: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    MAGIC: tl.constexpr,
):
    """Pairs first .. first + count - 1 as [KS, BLOCK_N, 4, count] int32."""
    if count == 1:
        return _pair(words, first, BITS, TOP, MAGIC)[:, :, :, None]
    else:
        a = _pairs(words, first, count // 2, BITS, TOP, MAGIC)
        b = _pairs(words, first + count // 2, count // 2, BITS, TOP, MAGIC)
        return tl.permute(tl.join(a, b), (0, 1, 2, 4, 3)).reshape(a.shape[0], a.shape[1], 4, count)


@triton.jit
def _values(words, first: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Codes + bias of STEP columns as [KS, BLOCK_N, 4, STEP/8, 2] of DTYPE: lane, pair, half."""
    RAW: tl.constexpr = tl.bfloat16 if (DTYPE == tl.bfloat16 and BITS < 8) else tl.float16
    TOP: tl.constexpr = 7 if RAW == tl.bfloat16 else 10  # bits of the mantissa
    MAGIC: tl.constexpr = 0x3F803F80 if RAW == tl.bfloat16 else 0x3C003C00  # 1.0
    v = _pairs(words, first, STEP // 8, BITS, TOP, MAGIC)
    low = v.to(tl.int16).to(RAW, bitcast=True)
    high = (v >> 16).to(tl.int16).to(RAW, bitcast=True)
    w = tl.join(low, high)
    if BITS < 16 and RAW != DTYPE:
        w = (
            w.to(tl.float32) * 2.0**BITS - 2.0**BITS
        )  # exact; so is the conversion of an integer up to 255 to bf16
    return w.to(DTYPE)


@triton.jit
def order(STEP: tl.constexpr, FORM: tl.constexpr):
    """Which column of a step stands at each place of an operand of this form."""
    d = tl.arange(0, STEP)
    if NEIGHBOURS and FORM == "factored":
        return d // 16 * 16 + d // 2 % 2 * 8 + d // 4 % 4 * 2 + d % 2
    else:
        return d


@triton.jit
def operand(
    words, first: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Codes + bias of STEP columns from pair `first` on, as the left operand [KS, BLOCK_N, STEP] of DTYPE."""
    w = _values(words, first, STEP, BITS, DTYPE)
    if NEIGHBOURS and FORM == "factored":
        w = tl.permute(w.reshape(w.shape[0], w.shape[1], 4, STEP // 16, 2, 2), (0, 1, 3, 2, 4, 5))
    else:
        w = tl.permute(w, (0, 1, 3, 2, 4))
    return w.reshape(w.shape[0], w.shape[1], STEP)


@triton.jit
def ones(KS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """A left operand [KS, ROWS, STEP] of ones, in the layout that `operand` gets."""
    if NEIGHBOURS:
        half = tl.full((KS, ROWS, STEP // 2), 1.0, DTYPE)
        return tl.join(half, half).reshape(KS, ROWS, STEP)
    else:
        return tl.full((KS, ROWS, STEP), 1.0, DTYPE)


@triton.jit
def factor_operand(p_words, n, block, N, STORED: tl.constexpr, DTYPE: tl.constexpr, FORM: tl.constexpr):
    """Codes + bias, as `operand` makes them, of 32 ranks of U: [1, BLOCK_N, 32] of DTYPE."""
    at = n[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    words = ()
    for w in tl.static_range(STORED // 4):
        word = p_words + (block * (STORED // 4) + w) * N * 4
        words = words + (tl.load(word + at, mask=(n < N)[None, :, None], other=0),)
    return operand(words, 0, 32, STORED, DTYPE, FORM)


@triton.jit
def factor_scales(p_meta, n, r, R, BITS: tl.constexpr):
    """Scales of U [R, N] at rows n and ranks r, which broadcast to each other; fp32, zero past rank R."""
    if BITS == 16:
        return 1.0 + 0.0 * (n + r)
    else:
        pair = tl.load(p_meta + n // 128 * R + r, mask=r < R, other=0)
        return (pair >> (n // 64 % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
