"""E8P codewords in the GPU layout, and the tables that turn them into 4-bit codes (docs/gpu.md draws both).

Every E8P point lies on a grid of step 1/2: a weight is (r - 7.5) / 2 with r in 2 .. 13, so a codeword decodes to one
word of eight 4-bit codes, and the kernels multiply it as they multiply INT4. That word is an exclusive or of what the
pattern says (a table of 256 words) and of what the signs and the shift say:

    r = 8, 10 or 12 for lanes of 1/2, 3/2 or 5/2;  ^ 14 where the lane is negative;  ^ 1 where the shift is +1/4

A lane t of a chunk holds codewords 4 j + t, j = 0 .. 3, of a row: the eight products of 16 columns of which it holds
the elements. The columns of a chunk are permuted for that within 32 columns (`column_of`), and so are the activations.

    word 0    byte j: pattern of codeword j; 1 bit, the only word: entry of the 1-bit E8 codebook, as below
    word 1    bit 4 nibble + j: the lane of that nibble is negative in codeword j; nibble 0: the shift is +1/4
    word 2    3 bits: byte j: entry of the 1-bit E8 codebook for codeword j, (r - 8) / 2; 4 bits: words 0 and 1 of the
    word 3    second stage

Lane e of a codeword is nibble e // 2 + 4 (e % 2): low halves of the pairs first, as in words of 4 bits.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from trilobite.formats.lattice import DIM, e8_points, source_patterns
from trilobite.kernels.gpu.layout.words import LANES

CODEWORDS = 16
"""Codewords of a row in a chunk of 128 columns."""
NIBBLE = tuple(e // 2 + 4 * (e % 2) for e in range(DIM))
"""Nibble of a word of 4-bit codes that holds lane e of a codeword."""
SIGN_BIT = (0, 7, 6, 5, 4, 3, 2, 1)
"""Bit of a stored codeword that becomes nibble 0's (the shift) and every other lane's (its sign)."""


@cache
def tables(device: torch.device) -> Tensor:
    """Words of 4-bit codes: [2, 256] int32, by E8P pattern with all lanes positive, and by code of the E8 codebook.

    The sign of an E8P pattern's lane 0, which makes the sum of the lanes even, is in its word already.
    """
    patterns = source_patterns().long()
    codes = 8 + (patterns - 1)
    codes[:, 0] ^= 14 * ((patterns.sum(-1) // 2) & 1)
    roots = (2 * e8_points(torch.device("cpu")) + 8).long()
    words = torch.stack([(c << 4 * torch.tensor(NIBBLE)).sum(-1) for c in (codes, roots)])
    return _int32(words).to(device)


def _int32(words: Tensor) -> Tensor:
    """int64 of 32 bits as int32."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def column_of(position: Tensor) -> Tensor:
    """Which column of a rotated matrix lies at a position of the GPU layout; both run through whole chunks."""
    i, h, t, p = position // 16 % 2, position // 8 % 2, position // 2 % 4, position % 2
    return position // 32 * 32 + 8 * t + 4 * i + 2 * h + p


def pack_codewords(codes: Tensor, bits: int) -> Tensor:
    """Codewords to words.

    codes: [N, K/8] int64 as in `formats.lattice`    returns: [ceil(K/128), bits, N, 4] int32
    """
    n, blocks = codes.shape
    chunks = -(-blocks // CODEWORDS)
    codes = pad(codes, (0, chunks * CODEWORDS - blocks)).view(n, chunks, 4, LANES)
    words = [_bytes(codes)] if bits == 1 else _stage_words(codes & 0xFFFF)
    if bits == 3:
        words.append(_bytes(codes >> 16))
    elif bits == 4:
        words += _stage_words(codes >> 16)
    return _int32(torch.stack(words).permute(2, 0, 1, 3)).contiguous()


def _bytes(values: Tensor) -> Tensor:
    """[N, C, 4, LANES] of 8 bits -> [N, C, LANES], value j in byte j."""
    return sum((values[:, :, j] << 8 * j for j in range(4)), torch.zeros_like(values[:, :, 0]))


def _stage_words(codes: Tensor) -> list[Tensor]:
    """The pattern word and the sign word of E8P codewords [N, C, 4, LANES]."""
    signs = torch.zeros_like(codes[:, :, 0])
    for e, bit in enumerate(SIGN_BIT):
        for j in range(4):
            signs |= (codes[:, :, j] >> bit & 1) << (4 * NIBBLE[e] + j)
    return [_bytes(codes >> 8), signs]


def unpack_codewords(words: Tensor, k: int) -> Tensor:
    """Inverse of `pack_codewords`.

    words: [C, bits, N, 4] int32    returns: [N, k/8] int64
    """
    chunks, bits, n, _ = words.shape
    parts = [w.long() & 0xFFFFFFFF for w in words.permute(1, 2, 0, 3)]  # each [N, C, LANES]
    codes = _unbytes(parts[0]) if bits == 1 else _stage_codes(parts[0], parts[1])
    if bits == 3:
        codes |= _unbytes(parts[2]) << 16
    elif bits == 4:
        codes |= _stage_codes(parts[2], parts[3]) << 16
    return codes.reshape(n, chunks * CODEWORDS)[:, : k // DIM].contiguous()


def _unbytes(word: Tensor) -> Tensor:
    return torch.stack([word >> 8 * j & 255 for j in range(4)], 2)


def _stage_codes(patterns: Tensor, signs: Tensor) -> Tensor:
    codes = _unbytes(patterns) << 8
    for e, bit in enumerate(SIGN_BIT):
        codes |= torch.stack([(signs >> (4 * NIBBLE[e] + j) & 1) << bit for j in range(4)], 2)
    return codes
