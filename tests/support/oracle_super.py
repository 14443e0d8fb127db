"""Formats under super-scales read slowly, weight by weight, from their specification alone."""

from itertools import product

import numpy as np

from support import oracle

UNITS = {2: 3, 3: 6, 4: 8}


def most_offset(scale: int, bits: int) -> int:
    """The largest offset code beside a sub-scale: no code may count more than 254."""
    return min(15, (254 - scale * (2**bits - 1)) // UNITS[bits])


def decode(
    packed: np.ndarray, scale: np.ndarray, *, bits: int, group: int, shape: tuple[int, int]
) -> np.ndarray:
    """Tiles [B, tiles, bytes] and super-scales [B, D, 32] -> weights [N, K] in float32, each rounded once."""
    n, k = shape
    width = 64 if k % 64 == 0 else 32
    w = np.zeros((packed.shape[0] * 16, k), np.float32)
    for band, t in product(range(packed.shape[0]), range(k // width)):
        tile = packed[band, t]
        codes, meta = tile[: 2 * width * bits], tile[2 * width * bits :].reshape(16, width // group)
        for block in range(width // 32):
            cut = oracle.read_block(codes[64 * bits * block : 64 * bits * (block + 1)], bits)
            for r, c in product(range(16), range(32)):
                at = t * width + 32 * block + c
                byte = int(meta[r, (32 * block + c) // group])
                counts = (byte % 16 + 1) * int(cut[r, c]) + UNITS[bits] * (byte // 16 - 15)
                w[band * 16 + r, at] = (
                    scale[band, at // 256].view(np.float16)[r].astype(np.float32) / 128 * counts
                )
    return w[:n]
