"""Write `v1-super.json`: bytes of packed weights under super-scales and the values that they stand for.

Made from the specification alone (tests/support/oracle_super.py), not by the code under test.

    python tests/support/golden/make_super.py > tests/support/golden/v1-super.json
"""

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from support import oracle, oracle_super
from support.golden.make import _pack

CASES = [
    *((bits, group, (17, 64)) for bits in (2, 3, 4) for group in (16, 32)),
    (3, 16, (33, 320)),
    (3, 32, (5, 96)),
    (2, 16, (3, 288)),
    (4, 32, (16, 576)),
]


def cases() -> list[dict[str, Any]]:
    """Every case as plain data."""
    return [_case(300 + i, *case) for i, case in enumerate(CASES)]


def _case(seed: int, bits: int, group: int, shape: tuple[int, int]) -> dict[str, Any]:
    (n, k), numbers = shape, oracle.lcg(seed)
    bands, width = -(-n // 16), 64 if k % 64 == 0 else 32
    codes = np.zeros((bands * 16, k), np.uint8)
    codes[:n] = np.array([(v >> 4) % 2**bits for v in islice(numbers, n * k)]).reshape(n, k)
    meta = np.zeros((bands * 16, k // group), np.uint8)
    for r in range(n):
        for g in range(k // group):
            s = (next(numbers) >> 4) % 16 + 1
            o = (next(numbers) >> 4) % (oracle_super.most_offset(s, bits) + 1)
            meta[r, g] = s - 1 + 16 * o
    supers = np.zeros((bands, -(-k // 256), 16), np.float16)
    for band in range(bands):
        for d in range(supers.shape[1]):
            row = np.array([v / 2**18 + 1e-3 for v in islice(numbers, 16)])
            supers[band, d] = np.where(np.arange(16) + 16 * band < n, row, 0)
    tiles = []
    for band in range(bands):
        rows = slice(16 * band, 16 * band + 16)
        for at in range(0, k, width):
            blocks = [oracle.write_block(codes[rows, c : c + 32], bits) for c in range(at, at + width, 32)]
            tiles.append(np.concatenate([*blocks, meta[rows, at // group : (at + width) // group].flatten()]))
    packed = np.stack(tiles).reshape(bands, k // width, -1)
    scale = supers.view(np.uint8)
    values = oracle_super.decode(packed, scale, bits=bits, group=group, shape=shape)
    row = {"format": f"int{bits}-g{group}-super", "shape": list(shape), "packed": _pack(packed)}
    return row | {"scale": _pack(scale), "codes": _pack(codes[:n]), "values": _pack(values)}


if __name__ == "__main__":
    print("[\n" + ",\n".join(json.dumps(row) for row in cases()) + "\n]")
