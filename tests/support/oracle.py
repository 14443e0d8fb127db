"""The packed format read slowly, bit by bit, from its specification alone: imports nothing of trilobite.

Only numpy and Python loops; what `formats/` does with shifts on whole tensors is checked against this.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np


def positions(bits: int, row: int, column: int) -> list[tuple[int, int]]:
    """(byte of the block, bit of the byte) of every bit of one code, the lowest first."""
    step, inside = column // 4, 4 * row + column % 4
    if bits == 8:
        places = [(step, b) for b in range(8)]
    elif bits == 4:
        places = [(step // 2, 4 * (step % 2) + b) for b in range(4)]
    elif bits == 2:
        places = [(step // 4, 2 * (step % 4) + b) for b in range(2)]
    elif step < 6:
        places = [(step // 2, 3 * (step % 2) + b) for b in range(3)]
    elif step == 6:
        places = [(0, 6), (0, 7), (2, 6)]
    else:
        places = [(1, 6), (1, 7), (2, 7)]
    return [(64 * plane + inside, bit) for plane, bit in places]


def read_block(data: np.ndarray, bits: int, columns: int = 32) -> np.ndarray:
    """One block, or its first half -> codes [16, columns]."""
    codes = np.zeros((16, columns), np.uint8)
    for r, k in product(range(16), range(columns)):
        codes[r, k] = sum(
            (int(data[byte]) >> bit & 1) << i for i, (byte, bit) in enumerate(positions(bits, r, k))
        )
    return codes


def write_block(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [16, 32] -> one block."""
    data = np.zeros(64 * bits, np.uint8)
    for r, k in product(range(16), range(32)):
        for i, (byte, bit) in enumerate(positions(bits, r, k)):
            data[byte] |= (int(codes[r, k]) >> i & 1) << bit
    return data


def read_stream(data: np.ndarray, bits: int, count: int) -> list[int]:
    """A little-endian bit stream -> its first `count` codes."""
    at = [int(data[i // 8]) >> i % 8 & 1 for i in range(bits * count)]
    return [sum(at[bits * c + b] << b for b in range(bits)) for c in range(count)]


def write_stream(codes: list[int], bits: int) -> np.ndarray:
    """Codes -> a little-endian bit stream."""
    data = np.zeros(-(-len(codes) * bits // 8), np.uint8)
    for c, b in product(range(len(codes)), range(bits)):
        data[(bits * c + b) // 8] |= (codes[c] >> b & 1) << (bits * c + b) % 8
    return data


def decode(
    packed: np.ndarray,
    scale: np.ndarray | None,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    shape: tuple[int, int],
) -> np.ndarray:
    """Tiles -> weights [N, K] in float32, each operation rounded once. `scale` present = double quantized."""
    n, k = shape
    w = np.zeros((packed.shape[0] * 16, k), np.float32)
    for band, g in product(range(packed.shape[0]), range(k // group)):
        tile = packed[band, g]
        codes, meta = tile[: group * 2 * bits], tile[group * 2 * bits :]
        pairs = None if scale is None else scale[band, g // (16 if bits >= 4 else 8)].view(np.float32)
        width = min(group, 32)
        for block in range(group // width):
            cut = read_block(codes[2 * width * bits * block : 2 * width * bits * (block + 1)], bits, width)
            for r in range(16):
                step, base = _line(meta, pairs, r, symmetric, bits)
                at = g * group + block * width
                w[band * 16 + r, at : at + width] = cut[r].astype(np.float32) * step + base
    return w[:n]


def _line(
    meta: np.ndarray, pairs: np.ndarray | None, row: int, symmetric: bool, bits: int
) -> tuple[np.float32, np.float32]:
    if pairs is None:
        half = meta.view(np.float16).astype(np.float32)
        step, base = half[row], None if symmetric else half[16 + row]
    else:
        step = np.float32(meta[row]) * pairs[0] + pairs[1]
        base = None if symmetric else np.float32(meta[16 + row]) * pairs[2] + pairs[3]
    return step, -step * np.float32(2 ** (bits - 1)) if base is None else base


def decode_factor(stored: np.ndarray, length: int, bits: int) -> np.ndarray:
    """A stored compensator factor [R, groups, bytes] -> [R, length] float32."""
    out = np.zeros((stored.shape[0], stored.shape[1] * 64), np.float32)
    for r, g in product(range(stored.shape[0]), range(stored.shape[1])):
        data = stored[r, g]
        scale = data[-2:].view(np.float16).astype(np.float32)[0]
        for i, code in enumerate(read_stream(data[:-2], bits, 64)):
            out[r, 64 * g + i] = np.float32(code - 2 ** (bits - 1)) * scale
    return out[:, :length]


def lcg(seed: int) -> Iterator[int]:
    """Numbers 0 .. 65535 that are the same everywhere and for ever (Numerical Recipes' generator)."""
    state = seed
    while True:
        state = (state * 1664525 + 1013904223) % 2**32
        yield state >> 16
