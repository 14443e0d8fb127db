"""Lattice formats read slowly from docs/format.md and QuIP#: numpy, loops, dense matrices; nothing of trilobite."""

import struct
from itertools import product

import numpy as np

SECTION_C1 = """
[3, 1, 1, 1, 3, 3, 3, 3] [1, 3, 1, 1, 3, 3, 3, 3] [1, 1, 3, 1, 3, 3, 3, 3] [1, 1, 1, 3, 3, 3, 3, 3]
[3, 3, 3, 1, 3, 3, 1, 1] [3, 3, 3, 1, 3, 1, 3, 1] [3, 3, 3, 1, 1, 3, 3, 1] [3, 3, 3, 1, 3, 1, 1, 3]
[3, 3, 3, 1, 1, 3, 1, 3] [3, 3, 3, 1, 1, 1, 3, 3] [3, 3, 1, 3, 3, 3, 1, 1] [3, 3, 1, 3, 3, 1, 3, 1]
[3, 3, 1, 3, 1, 3, 3, 1] [3, 3, 1, 3, 3, 1, 1, 3] [3, 3, 1, 3, 1, 3, 1, 3] [3, 3, 1, 3, 1, 1, 3, 3]
[3, 1, 3, 3, 3, 3, 1, 1] [3, 1, 3, 3, 3, 1, 3, 1] [3, 1, 3, 3, 1, 3, 3, 1] [3, 1, 3, 3, 3, 1, 1, 3]
[3, 1, 3, 3, 1, 3, 1, 3] [1, 3, 3, 3, 1, 1, 3, 3] [1, 3, 3, 3, 3, 3, 1, 1] [1, 3, 3, 3, 3, 1, 3, 1]
[1, 3, 3, 3, 1, 3, 3, 1] [1, 3, 3, 3, 3, 1, 1, 3] [1, 3, 3, 3, 1, 3, 1, 3] [1, 1, 3, 3, 1, 3, 3, 3]
[3, 3, 1, 1, 3, 3, 3, 1]
"""
"""As printed in the paper, in halves."""


def padding() -> list[tuple[float, ...]]:
    """The 29 patterns of norm 12."""
    return [
        tuple(int(v) / 2 for v in part.strip("[] \n").split(","))
        for part in SECTION_C1.split("]")
        if part.strip()
    ]


def source() -> list[tuple[float, ...]]:
    """The 256 patterns of E8P in order."""
    small = [v for v in product((0.5, 1.5, 2.5, 3.5), repeat=8) if sum(x * x for x in v) <= 10]
    small.sort(key=lambda v: (sum(x * x for x in v), v))
    return small + padding()


def e8p(code: int, patterns: list[tuple[float, ...]]) -> list[float]:
    """One codeword, as section C.2 explains it on its example."""
    bits = f"{code:016b}"
    s = list(patterns[int(bits[:8], 2)])
    for j, bit in enumerate(reversed(bits[8:15])):  # the j-th from right
        if bit == "1":
            s[7 - j] = -s[7 - j]
    if sum(s) % 2 != 0:
        s[0] = -s[0]
    return [x + (0.25 if bits[15] == "1" else -0.25) for x in s]


def e8_codebook() -> list[tuple[float, ...]]:
    """The 1-bit E8 codebook in order."""
    roots = [
        v
        for v in [*product((-1, 0, 1), repeat=8), *product((-0.5, 0.5), repeat=8)]
        if sum(x * x for x in v) == 2 and sum(v) % 2 == 0
    ]
    axes = [tuple(s * 2.0 if i == j else 0.0 for j in range(8)) for i in range(8) for s in (1, -1)]
    return [(0.0,) * 8, *sorted(roots), *axes[:15]]


def tile(data: np.ndarray, codebook: str, bits: int, scale: float, second: float) -> np.ndarray:
    """One tile of 16 * bits bytes -> [16, 8] in rotated coordinates."""
    if codebook == "grid":
        rows = data.reshape(16, bits)
        codes = [
            [
                sum((int(r[(bits * i + b) // 8]) >> (bits * i + b) % 8 & 1) << b for b in range(bits))
                for i in range(8)
            ]
            for r in rows
        ]
        return (np.array(codes) - (2**bits - 1) / 2) * scale
    patterns, small = source(), e8_codebook()
    if bits == 1:
        return np.array([small[c] for c in data]) * scale
    first = [e8p(int(lo) | int(hi) << 8, patterns) for lo, hi in data[:32].reshape(16, 2)]
    w = np.array(first) * scale
    if bits == 3:
        w = w + np.array([small[c] for c in data[32:]]) * second
    if bits == 4:
        w = (
            w
            + np.array([e8p(int(lo) | int(hi) << 8, patterns) for lo, hi in data[32:].reshape(16, 2)])
            * second
        )
    return w


def field_squares(p: int, e: int) -> tuple[list[tuple[int, ...]], set[tuple[int, ...]]]:
    """Elements of GF(p^e) by number, and the non-zero squares, found by squaring everything."""
    elements = [tuple(v // p**i % p for i in range(e)) for v in range(p**e)]
    one = elements[1]

    def times(a: tuple[int, ...], b: tuple[int, ...], modulus: tuple[int, ...]) -> tuple[int, ...]:
        c = [0] * (2 * e)
        for i, j in product(range(e), range(e)):
            c[i + j] += a[i] * b[j]
        for top in range(2 * e - 1, e - 1, -1):
            for j in range(e):
                c[top - e + j] -= c[top] * modulus[j]
            c[top] = 0
        return tuple(v % p for v in c[:e])

    for modulus in elements[1:]:
        x = elements[p] if e > 1 else ((-modulus[0]) % p,)
        power, order = x, 1
        while power != one and any(power) and order < p**e:
            power, order = times(power, x, modulus), order + 1
        if power == one and order == p**e - 1:
            return elements, {times(a, a, modulus) for a in elements[1:]}
    raise AssertionError


def paley(p: int, e: int) -> np.ndarray:
    """Paley's first matrix for q = 3 mod 4, his second for q = 1 mod 4."""
    elements, squares = field_squares(p, e)
    q = p**e

    def chi(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        d = tuple((x - y) % p for x, y in zip(a, b, strict=True))
        return 0 if not any(d) else 1 if d in squares else -1

    c = np.ones((q + 1, q + 1), int)
    c[0, 0] = 0
    c[1:, 1:] = [[chi(a, b) for b in elements] for a in elements]
    if q % 4 == 3:
        c[1:, 0] = -1
        return c + np.eye(q + 1, dtype=int)
    return np.kron(c, [[1, 1], [1, -1]]) + np.kron(np.eye(q + 1, dtype=int), [[1, -1], [-1, -1]])


def sylvester(order: int) -> np.ndarray:
    """A power of two."""
    return np.array([[(-1) ** bin(i & j).count("1") for j in range(order)] for i in range(order)])


HADAMARD = {
    4: lambda: sylvester(4),
    8: lambda: sylvester(8),
    12: lambda: paley(11, 1),
    20: lambda: paley(19, 1),
    24: lambda: np.kron(paley(11, 1), sylvester(2)),
    28: lambda: paley(3, 3),
    32: lambda: sylvester(32),
    36: lambda: paley(17, 1),
    40: lambda: np.kron(paley(19, 1), sylvester(2)),
}


def matrix(transform: str, n: int, stored: np.ndarray) -> np.ndarray:
    """T [n, n] in real numbers from the stored vector."""
    tuned = len(stored) == 2 * n
    if transform == "fourier" and n % 2 == 0:
        if tuned:
            pairs = stored.copy().view(np.float16).astype(float).reshape(-1, 2)
            s = pairs[:, 0] + 1j * pairs[:, 1]
        else:
            s = np.exp(2j * np.pi * stored / 256)
        m = n // 2
        t = np.array([[np.exp(-2j * np.pi * i * j / m) / m**0.5 * s[j] for j in range(m)] for i in range(m)])
        real = np.zeros((n, n))  # multiplication by a + ib is [[a, -b], [b, a]]
        real[0::2, 0::2], real[0::2, 1::2], real[1::2, 0::2], real[1::2, 1::2] = (
            t.real,
            -t.imag,
            t.imag,
            t.real,
        )
        return real
    if tuned:
        signs = stored.copy().view(np.float16).astype(float)
    else:
        signs = np.array([1.0 - 2 * (int(stored[i // 8]) >> i % 8 & 1) for i in range(n)])
    if transform == "hadamard":
        v = HADAMARD[n]() / n**0.5
    else:
        angle = 2 * np.pi * np.outer(np.arange(n), np.arange(n)) / n
        v = (np.cos(angle) + np.sin(angle)) / n**0.5
    return v * signs


def decode(parts: dict[str, np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """All stored bytes -> weights [N, K] in float64."""
    n, k = shape
    codebook, bits, transform, _, scale, second = struct.unpack("<4B2f", parts["lattice"].tobytes())
    packed = parts["packed"]
    rotated = np.zeros((16 * packed.shape[0], k))
    for band, g in product(range(packed.shape[0]), range(k // 8)):
        found = tile(packed[band, g], ("e8p", "grid")[codebook], bits, scale, second)
        rotated[16 * band : 16 * band + 16, 8 * g : 8 * g + 8] = found
    kind = ("hadamard", "fourier")[transform]
    t_in, t_out = matrix(kind, k, parts["signs_in"]), matrix(kind, n, parts["signs_out"])
    return t_out.T @ rotated[:n] @ t_in
