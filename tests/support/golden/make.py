"""Write `v1.json`: bytes of packed weights in format version 1 and the values that they stand for.

Made from the specification alone (tests/oracle.py), not by the code under test. The files of a format version
never change once released; a new version gets a new file.

    python tests/support/golden/make.py > tests/golden/v1.json
"""

import base64
import json
import sys
import zlib
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from support import oracle

LINEAR = [
    (bits, 32, symmetric, double, (17, 64))
    for bits in (2, 3, 4, 8)
    for symmetric in (0, 1)
    for double in (0, 1)
]
CASES = [*LINEAR, (3, 64, 0, 0, (33, 64)), (3, 32, 0, 1, (3, 288)), (4, 96, 0, 0, (5, 96))]
RANK = 3


def cases() -> list[dict[str, Any]]:
    """Every case as plain data."""
    found = [_matrix(i, *case) for i, case in enumerate(CASES)]
    return found + [
        _factor(100 + i, name, bits)
        for i, (name, bits) in enumerate((("int3", 3), ("int8", 8), ("fp16", 16)))
    ]


def _matrix(
    seed: int, bits: int, group: int, symmetric: int, double: int, shape: tuple[int, int]
) -> dict[str, Any]:
    n, k = shape
    numbers = oracle.lcg(seed)
    bands, groups = -(-n // 16), k // group
    codes = np.zeros((bands * 16, k), np.uint8)
    codes[:n] = np.array([v % 2**bits for v in islice(numbers, n * k)], np.uint8).reshape(n, k)
    rows = 16 if symmetric else 32
    tiles = []
    for band in range(bands):
        for g in range(groups):
            block = [
                oracle.write_block(codes[16 * band : 16 * band + 16, at : at + 32], bits)
                for at in range(g * group, (g + 1) * group, 32)
            ]
            meta = [v / 2**20 - 0.03 for v in islice(numbers, rows)]
            inside = np.arange(rows) % 16 + 16 * band < n
            if double:
                stored = np.array([v * 2**20 % 256 for v in meta]).astype(np.uint8)
            else:
                stored = np.where(inside, meta, 0).astype(np.float16).view(np.uint8)
            tiles.append(np.concatenate([*block, stored]))
    packed = np.stack(tiles).reshape(bands, groups, -1)
    scale = None
    if double:
        supers = -(-groups // (16 if bits >= 4 else 8))
        pairs = [v / 2**22 - 0.005 for v in islice(numbers, bands * supers * rows // 8)]
        scale = np.array(pairs, np.float32).view(np.uint8).reshape(bands, supers, rows // 2)
    values = oracle.decode(packed, scale, bits=bits, group=group, symmetric=bool(symmetric), shape=shape)
    name = f"int{bits}-g{group}{'-sym' * symmetric}{'-dq' * double}"
    row = {"format": name, "shape": list(shape), "packed": _pack(packed), "codes": _pack(codes[:n])}
    return row | ({} if scale is None else {"scale": _pack(scale)}) | {"values": _pack(values)}


def _factor(seed: int, name: str, bits: int) -> dict[str, Any]:
    length, numbers = 70, oracle.lcg(seed)
    if bits == 16:
        stored = np.array([v / 2**18 - 0.1 for v in islice(numbers, RANK * length)], np.float16).reshape(
            RANK, length
        )
        values = stored.astype(np.float32)
    else:
        groups = []
        for _ in range(RANK * 2):
            codes = [v % 2**bits for v in islice(numbers, 64)]
            half = np.array([next(numbers) / 2**20 - 0.03], np.float16).view(np.uint8)
            groups.append(np.concatenate((oracle.write_stream(codes, bits), half)))
        stored = np.stack(groups).reshape(RANK, 2, -1)
        values = oracle.decode_factor(stored, length, bits)
    return {"compensator": name, "length": length, "factor": _pack(stored), "values": _pack(values)}


def _pack(a: np.ndarray) -> dict[str, Any]:
    return {
        "dtype": str(a.dtype),
        "shape": list(a.shape),
        "data": base64.b64encode(zlib.compress(a.tobytes(), 9)).decode(),
    }


def unpack(row: dict[str, Any]) -> np.ndarray:
    """An array of the JSON file."""
    return (
        np.frombuffer(zlib.decompress(base64.b64decode(row["data"])), row["dtype"])
        .reshape(row["shape"])
        .copy()
    )


if __name__ == "__main__":
    print("[\n" + ",\n".join(json.dumps(row) for row in cases()) + "\n]")
