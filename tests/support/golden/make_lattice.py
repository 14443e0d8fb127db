"""Write `v1-lattice.json`: bytes of packed weights in lattice formats and the values that they stand for.

Made from the specification alone (tests/oracle_lattice.py), not by the code under test.

    python tests/support/golden/make_lattice.py > tests/golden/v1-lattice.json
"""

import json
import struct
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from support import oracle, oracle_lattice
from support.golden.make import _pack

CASES = [
    ("e8p", 2, "hadamard", False, (28, 24)),
    ("e8p", 2, "hadamard", True, (36, 8)),
    ("e8p", 3, "hadamard", False, (20, 40)),
    ("e8p", 4, "fourier", False, (18, 16)),
    ("grid", 2, "fourier", False, (5, 8)),
    ("grid", 3, "hadamard", False, (12, 32)),
    ("grid", 4, "fourier", True, (6, 16)),
    ("e8p", 1, "hadamard", False, (20, 24)),
]


def cases() -> list[dict[str, Any]]:
    """Every case as plain data."""
    return [_case(200 + i, *case) for i, case in enumerate(CASES)]


def _case(
    seed: int, codebook: str, bits: int, transform: str, tuned: bool, shape: tuple[int, int]
) -> dict[str, Any]:
    (n, k), numbers = shape, oracle.lcg(seed)
    bands = -(-n // 16)

    def octets(count: int) -> np.ndarray:
        return np.array([v >> 4 & 255 for v in islice(numbers, count)], np.uint8)

    packed = octets(bands * k // 8 * 16 * bits).reshape(bands, k // 8, 16 * bits)
    kind = (("e8p", "grid").index(codebook), bits, ("hadamard", "fourier").index(transform), 0)
    second = 0.03125 if codebook == "e8p" and bits > 2 else 0.0
    record = np.frombuffer(struct.pack("<4B2f", *kind, 0.1, second), np.uint8)
    signs = {}
    for name, length in (("signs_in", k), ("signs_out", n)):
        phases = transform == "fourier" and length % 2 == 0
        stored = octets(length // 2 if phases else -(-length // 8))
        if not phases and length % 8:
            stored[-1] &= (1 << length % 8) - 1
        if tuned:
            reals = [v / 2**17 - 0.9 for v in islice(numbers, length)]
            stored = np.array(reals, np.float16).view(np.uint8)
        signs[name] = stored
    parts = {"packed": packed, "lattice": record, **signs}
    values = oracle_lattice.decode(parts, shape).astype(np.float32)
    name = f"{codebook}-{bits}{'-fourier' * (transform == 'fourier')}"
    return {
        "format": name,
        "shape": list(shape),
        "tuned": tuned,
        **{suffix: _pack(part) for suffix, part in parts.items()},
        "values": _pack(values),
    }


if __name__ == "__main__":
    print("[\n" + ",\n".join(json.dumps(row) for row in cases()) + "\n]")
