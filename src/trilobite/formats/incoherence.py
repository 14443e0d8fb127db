"""Random orthogonal transforms that spread a matrix's outliers over all its entries (QuIP#, section 3 and A.2).

A transform of the last dimension, n long, is T x = V (s * x) with a fixed orthogonal V and a random vector s:

    hadamard    V = H / sqrt(n), H a Hadamard matrix, s random signs                            (section 3)
    fourier     n even: V the discrete Fourier transform of the n/2 complex numbers that pairs of neighbours make,
                s random phases (section A.2); n odd: V the discrete Hartley transform, s random signs

H is a Kronecker product of Hadamard matrices whose orders multiply to n: powers of two (Sylvester), Paley's two
constructions over GF(q), q a prime power, and four orders of Goethals and Seidel's array that those leave out. Among
the factorisations of n the one with the fewest operations is taken; an index of the dimension is a number in mixed
radix, its first digit that of the first factor. So T costs n times the sum of the factors.

`s` is stored in bytes. Drawn ones: a bit a sign, ceil(n/8) bytes, lowest bit first, 1 = negative; or, for phases, n/2
bytes, byte p = the phase p/256 of a turn: the 256 phases have the moments of uniform ones up to the 255th order, so
the bounds of Lemma A.3 hold for them. Tuned ones (any real numbers, `s` then is no longer of unit size): n fp16, 2n
bytes; for an even n and fourier, pairs of them are real and imaginary part.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from trilobite.errors import ShapeError

LARGEST_CORE = 1024
"""Largest order of a factor that is not a power of two."""
LARGEST_POWER = 64
"""Powers of two are cut into factors of at most this order."""
GOETHALS_SEIDEL = {
    92: (0x56426A, 0x13A5C8, 0x1BDBD8, 0x21C384),
    116: (0x715EA38, 0x657FA98, 0x1A0CCC16, 0x4B12348),
    156: (0x65988EA2EC, 0x4928C7C26E, 0x2F2F6146BE, 0x7EF5EFD0C2),
    172: (0x5D2157B45E, 0x24DC0D76F28, 0x727AE335484, 0x200C1C4CB38),
}
"""First rows of four circulants, bit i set where entry i is -1, whose periodic autocorrelations cancel. Found by search
among the unions of orbits of a group of multipliers."""


def _prime_power(q: int) -> tuple[int, int] | None:
    """(p, e) with q = p**e, or None."""
    for p in range(2, q + 1):
        if q % p == 0:
            e = 0
            while q % p == 0:
                q, e = q // p, e + 1
            return (p, e) if q == 1 else None
    return None


@lru_cache(maxsize=16)
def _squares(p: int, e: int) -> tuple[int, ...]:
    """The squares of GF(p^e) without zero, elements numbered by their coefficients in base p.

    They are the even powers of x, modulo the first polynomial x^e + ... of which x generates all non-zero elements.
    """
    for candidate in range(1, p**e):
        modulus = [candidate // p**i % p for i in range(e)]
        power, powers = [1] + [0] * (e - 1), []
        for _ in range(p**e - 1):
            powers.append(sum(d * p**i for i, d in enumerate(power)))
            power = [(low - power[-1] * m) % p for low, m in zip([0, *power], modulus, strict=False)]
        if len(set(powers)) == p**e - 1 and 0 not in powers:
            return tuple(powers[::2])
    raise AssertionError(f"no primitive polynomial of degree {e} over GF({p})")


def _residues(p: int, e: int) -> Tensor:
    """Jacobsthal's matrix of GF(q): 1 where a_i - a_j is a square, -1 where it is none, 0 on the diagonal."""
    q = p**e
    character = -torch.ones(q, dtype=torch.int8)
    character[list(_squares(p, e))] = 1
    character[0] = 0
    digits = torch.stack([torch.arange(q) // p**i % p for i in range(e)], -1)
    difference = (digits[:, None] - digits[None]) % p
    return character[(difference * torch.tensor([p**i for i in range(e)])).sum(-1)]


def _bordered(residues: Tensor, corner: int) -> Tensor:
    """[[0, 1], [corner, Q]]: a conference matrix of order q + 1."""
    q = residues.shape[0]
    c = torch.ones(q + 1, q + 1, dtype=torch.int8)
    c[0, 0], c[1:, 0], c[1:, 1:] = 0, corner, residues
    return c


def _circulant(bits: int, m: int) -> Tensor:
    row = torch.tensor([-1 if bits >> i & 1 else 1 for i in range(m)], dtype=torch.int8)
    return torch.stack([row.roll(i) for i in range(m)])


def _goethals_seidel(order: int) -> Tensor:
    """The array of four circulants A, B, C, D of order m with A A^T + B B^T + C C^T + D D^T = 4 m I."""
    a, b, c, d = (_circulant(bits, order // 4) for bits in GOETHALS_SEIDEL[order])
    b, c, d = b.flip(1), c.flip(1), d.flip(1)  # B R, C R, D R
    bt, ct, dt = (t.flip(1).T.flip(1) for t in (b, c, d))  # B^T R, ...
    rows = ((a, b, c, d), (-b, a, dt, -ct), (-c, -dt, a, bt), (-d, ct, -bt, a))
    return torch.cat([torch.cat(row, 1) for row in rows])


def _construction(order: int) -> str:
    """How a Hadamard matrix of this order is made: sylvester, paley1, paley2, array; "" where we know none."""
    if order & (order - 1) == 0:
        return "sylvester"
    if order % 4 or order > LARGEST_CORE:
        return ""
    if order % 4 == 0 and _prime_power(order - 1):
        return "paley1"
    if (order // 2 - 1) % 4 == 1 and _prime_power(order // 2 - 1):
        return "paley2"
    return "array" if order in GOETHALS_SEIDEL else ""


@lru_cache(maxsize=64)
def hadamard_matrix(order: int) -> Tensor:
    """A Hadamard matrix of an order that `factors` may return: [order, order] int8 of +-1, H H^T = order I.

    Raises ShapeError for an order that no construction here gives.
    """
    kind = _construction(order)
    if kind == "sylvester":
        h = torch.ones(1, 1, dtype=torch.int8)
        for _ in range(order.bit_length() - 1):
            h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
        return h
    if kind == "paley1":
        field = _prime_power(order - 1)
        assert field is not None
        return torch.eye(order, dtype=torch.int8) + _bordered(_residues(*field), -1)
    if kind == "paley2":
        field = _prime_power(order // 2 - 1)
        assert field is not None
        conference = _bordered(_residues(*field), 1)
        full = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
        diagonal = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)
        return torch.kron(conference, full) + torch.kron(torch.eye(order // 2, dtype=torch.int8), diagonal)
    if kind == "array":
        return _goethals_seidel(order)
    raise ShapeError(f"no Hadamard matrix of order {order} is known here; use the fourier transform")


@lru_cache(maxsize=1024)
def factors(n: int) -> tuple[int, ...] | None:
    """Orders of Hadamard matrices that multiply to n, with the least sum; powers of two come last, in even parts.

    None where there are none: n odd, or 2 mod 4, or its odd part in no known order.
    """
    if n < 1:
        return None
    odd = n // (n & -n)
    if odd == 1:
        return _powers(n.bit_length() - 1)
    best: tuple[int, ...] | None = None
    for order in range(4, min(n, LARGEST_CORE) + 1, 4):
        if n % order or order & (order - 1) == 0 or not _construction(order):
            continue
        rest = factors(n // order)
        if rest is not None and (best is None or order + sum(rest) < sum(best)):
            best = (order, *rest)
    return best


def _powers(exponent: int) -> tuple[int, ...]:
    """2**exponent as factors of at most LARGEST_POWER, as equal as possible."""
    largest = LARGEST_POWER.bit_length() - 1
    parts = -(-exponent // largest)
    return tuple(1 << (exponent + i) // parts for i in range(parts))


def fitting_transform(transform: str, n: int, k: int) -> str:
    """`transform` itself, or `fourier` where a side of the matrix has no Hadamard matrix."""
    return transform if factors(n) is not None and factors(k) is not None else "fourier"


@lru_cache(maxsize=256)
def _core(order: int, device: torch.device) -> Tensor:
    core: Tensor = hadamard_matrix(order).float() / order**0.5
    return core.to(device)


def hadamard(x: Tensor, *, transpose: bool = False) -> Tensor:
    """H x / sqrt(n) along the last dimension, or with H transposed, which is the inverse.

    x: [..., n] fp32    Raises ShapeError where there is no Hadamard matrix.
    """
    n = x.shape[-1]
    orders = factors(n)
    if orders is None:
        raise ShapeError(f"no Hadamard matrix of order {n} is known here; use the fourier transform")
    y, after = x.reshape(-1, n), n
    for order in orders:
        core = _core(order, x.device)
        core = core.T if transpose else core
        after //= order
        y = y.reshape(-1, order) @ core.T if after == 1 else core @ y.reshape(-1, order, after)
    return y.reshape(x.shape)


def _hartley(x: Tensor) -> Tensor:
    """The discrete Hartley transform, its own inverse and transpose."""
    f = torch.fft.fft(x, norm="ortho")
    y: Tensor = f.real - f.imag
    return y


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.contiguous().view(*x.shape[:-1], -1, 2))


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x).flatten(-2)


@dataclass(frozen=True, kw_only=True)
class Spin:
    """A transform ready for use.

    transform: hadamard or fourier    s: [n] fp32: real factors; for fourier and an even n, real and imaginary parts
    """

    transform: str
    s: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """T x = V (s * x). x: [..., n] fp32."""
        if self.transform == "hadamard":
            return hadamard(x * self.s)
        if x.shape[-1] % 2:
            return _hartley(x * self.s)
        return _real(torch.fft.fft(_complex(x) * _complex(self.s), norm="ortho"))

    def adjoint(self, y: Tensor) -> Tensor:
        """T^T y = s * (V^T y): the inverse when s is of unit size. y: [..., n] fp32."""
        if self.transform == "hadamard":
            return hadamard(y, transpose=True) * self.s
        if y.shape[-1] % 2:
            return _hartley(y) * self.s
        return _real(torch.fft.ifft(_complex(y), norm="ortho") * _complex(self.s).conj())


def signs_bytes(transform: str, n: int, *, tuned: bool = False) -> int:
    """Bytes of a stored vector s of n values."""
    if tuned:
        return 2 * n
    return n // 2 if transform == "fourier" and n % 2 == 0 else -(-n // 8)


def draw_signs(transform: str, n: int, seed: int) -> Tensor:
    """A random vector s as stored: uint8 [signs_bytes(transform, n)]. The bits past n are zero."""
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randint(0, 256, (signs_bytes(transform, n),), dtype=torch.uint8, generator=generator)
    if len(stored) == -(-n // 8) and n % 8:
        stored[-1] &= (1 << n % 8) - 1
    return stored


def store_signs(s: Tensor) -> Tensor:
    """Tuned values [n] as stored: uint8 [2n], the bytes of fp16."""
    return s.half().contiguous().view(torch.uint8)


def read_signs(stored: Tensor, transform: str, n: int) -> Spin:
    """The transform that stored bytes describe.

    stored: uint8 [signs_bytes(...)]    Raises ShapeError when their number fits neither form.
    """
    if stored.numel() == 2 * n:
        values = stored if stored.data_ptr() % 2 == 0 else stored.clone()
        return Spin(transform=transform, s=values.contiguous().view(torch.float16).float())
    if stored.numel() != signs_bytes(transform, n):
        raise ShapeError(
            f"{stored.numel()} bytes of signs; a {transform} transform of length {n} has "
            f"{signs_bytes(transform, n)}, or {2 * n} when tuned"
        )
    if transform == "fourier" and n % 2 == 0:
        angle = stored.double() * (torch.pi / 128)
        return Spin(transform=transform, s=torch.stack((angle.cos(), angle.sin()), -1).flatten().float())
    bits = (stored[:, None] >> torch.arange(8, dtype=torch.uint8, device=stored.device)) & 1
    return Spin(transform=transform, s=1.0 - 2.0 * bits.flatten()[:n].float())
