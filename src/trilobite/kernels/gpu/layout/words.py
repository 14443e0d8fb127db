"""Codes and scales as 32-bit words of the GPU layout, and back (docs/gpu.md draws them).

A *chunk* is one row x 128 columns. It is four *lanes* of `bits` 32-bit words; lane t holds the 32 columns that thread t
of a quad holds of the left operand of eight `mma.m16n8k16`, columns `16 i + 8 h + 2 t + p`. The 16 pairs f = 2 i + h
have their element p = 0 in the low and p = 1 in the high half of a word, so one shift and one mask give two codes:

    bits   pair f: word, bit of each half
    2      f // 8, 2 (f % 8)
    3      f // 5, 1 + 3 (f % 5) for f < 15; pair 15: bit b of its codes is bit 0 of each half of word b
    4      f // 4, 4 (f % 4)
    8      f // 2, 8 (f % 2)
    16     f (fp16 compensators)

    words  int32 [ceil(K/128), bits, N, 4]
    meta   int32 [K/G, N], scale and offset as two fp16; symmetric: [ceil(K/G / 2), N], scales of two groups;
           under super-scales [ceil(K/G / 4) + ceil(K / 512), N], bytes of four groups, then two super-scales
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 128
"""Columns of a chunk."""
LANES = 4
ROW_SLICE = 1024
"""Rows that are repacked at a time, which bounds the memory of intermediate results."""


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes to words.

    codes: [N, K] uint8, or int16 for 16 bits    returns: [ceil(K/128), bits, N, 4] int32
    """
    n, k = codes.shape
    chunks = -(-k // CHUNK)
    out = torch.empty((chunks, bits, n, LANES), dtype=torch.int32, device=codes.device)
    for at in range(0, n, ROW_SLICE):
        rows = pad(codes[at : at + ROW_SLICE], (0, chunks * CHUNK - k)).int() & (2**bits - 1)
        pairs = rows.view(-1, chunks, 16, LANES, 2).permute(1, 2, 0, 3, 4)
        out[:, :, at : at + ROW_SLICE] = _join_pairs(pairs[..., 0] | (pairs[..., 1] << 16), bits)
    return out


def _join_pairs(pairs: Tensor, bits: int) -> Tensor:
    """[C, 16, N, 4] int32 with a code in each half -> words [C, bits, N, 4]."""
    each, low = (5, 1) if bits == 3 else (16 // bits, 0)
    words = torch.zeros_like(pairs[:, :bits])
    for w in range(bits):
        for j in range(each):
            words[:, w] |= pairs[:, each * w + j] << (bits * j + low)
        if bits == 3:
            words[:, w] |= (pairs[:, 15] >> w) & 0x00010001
    return words


def unpack_words(words: Tensor, k: int) -> Tensor:
    """Inverse of `pack_words`.

    words: [C, bits, N, 4] int32    returns: [N, k] uint8, int16 for 16 bits
    """
    chunks, bits, n, _ = words.shape
    mask, (each, low) = 2**bits - 1, (5, 1) if bits == 3 else (16 // bits, 0)
    pairs = torch.empty((chunks, 16, n, LANES, 2), dtype=torch.int32, device=words.device)
    for f in range(16):
        for p in (0, 1):
            if bits == 3 and f == 15:
                high = [((words[:, w] >> (16 * p)) & 1) << w for w in range(3)]
                pairs[:, f, :, :, p] = high[0] | high[1] | high[2]
            else:
                pairs[:, f, :, :, p] = (words[:, f // each] >> (16 * p + bits * (f % each) + low)) & mask
    codes = pairs.permute(2, 0, 1, 3, 4).reshape(n, chunks * CHUNK)[:, :k]
    return codes.to(torch.int16 if bits == 16 else torch.uint8)


def pack_meta(scale: Tensor, offset: Tensor | None) -> Tensor:
    """Scales and offsets to words: [N, K/G] fp16 each -> [K/G, N] int32, symmetric [ceil(K/G / 2), N]."""
    first = scale.T
    if offset is None:
        first = pad(first, (0, 0, 0, first.shape[0] % 2))
        first, second = first[0::2], first[1::2]
    else:
        second = offset.T
    pair = torch.stack((first, second), -1).contiguous()
    return pair.view(torch.int32).squeeze(-1)


def pack_super(codes: Tensor, supers: Tensor) -> Tensor:
    """Scales under super-scales to words: bytes of four groups in one, then two super-scales in one.

    codes: [N, K/G] uint8    supers: [N, D] fp16    returns: [ceil(K/G / 4) + ceil(D / 2), N] int32
    """
    quads = pad(codes, (0, -codes.shape[1] % 4)).contiguous().view(torch.int32)
    pairs = pad(supers, (0, supers.shape[1] % 2)).contiguous().view(torch.int32)
    return torch.cat((quads, pairs), 1).T.contiguous()


def unpack_super(meta: Tensor, groups: int, spans: int) -> tuple[Tensor, Tensor]:
    """Inverse of `pack_super`: codes [N, groups] uint8, super-scales [N, spans] fp16."""
    by_row, quads = meta.T.clone(memory_format=torch.contiguous_format), -(-groups // 4)
    codes = by_row[:, :quads].view(torch.uint8)[:, :groups]
    return codes, by_row[:, quads:].view(torch.float16)[:, :spans]


def unpack_meta(meta: Tensor, groups: int, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Inverse of `pack_meta`: fp16 scales [N, groups] and offsets, or None."""
    pair = meta.unsqueeze(-1).view(torch.float16)  # [W, N, 2]
    if not symmetric:
        return pair[..., 0].T.contiguous(), pair[..., 1].T.contiguous()
    return pair.permute(1, 0, 2).reshape(meta.shape[1], -1)[:, :groups].contiguous(), None
