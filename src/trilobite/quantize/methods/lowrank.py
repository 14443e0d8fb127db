"""Truncated singular value decomposition with the square root split (MiLo eq. 11-12)."""

from collections.abc import Iterable

import torch
from torch import Tensor

EXACT = 512
"""Matrices whose smaller side is at most this are decomposed exactly, through the Gram matrix in float64."""
OVERSAMPLE = 8
POWER_ITERATIONS = 3
DEPENDENT = 1e-5
"""Least eigenvalue of the cosines between a product's columns: below it a direction holds rounding errors alone."""


def truncated_svd(
    e: Tensor, rank: int, *, seed: int, power: int = POWER_ITERATIONS
) -> tuple[Tensor, Tensor, float]:
    """Best rank-`rank` approximation U V of E, each factor carrying the square root of the singular values.

    Large matrices use randomised subspace iteration with oversampling (Halko et al. 2011). Same inputs and seed, same
    result.

    e: [N, K] fp32    power: iterations of a large matrix; one does where `followed_svd` goes on from here
    returns: U [N, rank], V [rank, K], and the squared Frobenius norm of U V (so that the squared error of the
    approximation is |E|^2 minus it: U V is an orthogonal projection of E)
    """
    n, k = e.shape
    rank = min(rank, n, k)
    if min(n, k) <= EXACT:
        return _exact(e, rank)
    width = min(rank + OVERSAMPLE, n, k)
    generator = torch.Generator(device=e.device).manual_seed(seed)
    probe = torch.randn(k, width, generator=generator, device=e.device)
    q = _orthonormal(e @ probe)
    for _ in range(power):
        q = _orthonormal(e @ _orthonormal(e.T @ q))
    return _within(q, q.T @ e, rank)


def followed_svd(
    parts: Iterable[tuple[slice, Tensor]], shape: tuple[int, int], start: Tensor
) -> tuple[Tensor, Tensor, float]:
    """The same for a matrix near one that is decomposed already, by one power iteration; its parts are seen once.

    parts: rows of E and their values [.., K] fp32    start: V of the other [R, K]
    returns: U [N, R], V [R, K], and the squared Frobenius norm of U V
    """
    n, k = shape
    rank = len(start)
    probe = (start / start.norm(dim=1, keepdim=True).clamp_min(1e-30)).T.contiguous()
    y = start.new_empty(n, rank)
    along = start.new_zeros(rank, k)
    for rows, e in parts:
        torch.mm(e, probe, out=y[rows])
        along.addmm_(y[rows].T, e)
    # Q = Y T^T is orthonormal, Q^T E = T (Y^T E). To decompose Y itself would take as long as to multiply it.
    gram = (y.T @ y).double()
    size = gram.diagonal().sqrt()
    unit = torch.where(size > 0, 1 / size, 0.0)
    values, vectors = torch.linalg.eigh(gram * unit * unit[:, None])
    t = torch.where(values > DEPENDENT, values.rsqrt(), 0.0)[:, None] * vectors.T * unit
    left, sigma = _top_eigen(t @ (along @ along.T).double() @ t.T, rank)
    turn = (t.T @ left.double()).float()
    return _split(y @ turn, turn.T @ along, sigma)


def _within(q: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """The best approximation whose columns Q spans, b = Q^T E."""
    left, sigma = _top_eigen(b @ b.T, rank)
    return _split(q @ left, left.T @ b, sigma)


def _orthonormal(y: Tensor) -> Tensor:
    q: Tensor = torch.linalg.qr(y).Q
    return q


def _exact(e: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    n, k = e.shape
    wide = e if n <= k else e.T
    wide64 = wide.double()
    left, sigma = _top_eigen(wide64 @ wide64.T, rank)
    u, v, energy = _split(left, left.T @ wide, sigma)
    return (u, v, energy) if n <= k else (v.T.contiguous(), u.T.contiguous(), energy)


def _top_eigen(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Top eigenvectors [M, rank] of a Gram matrix and the square roots of their eigenvalues [rank], in fp32."""
    values, vectors = torch.linalg.eigh(gram.double())
    top = vectors.flip(-1)[:, :rank]
    # An eigenvector's sign is arbitrary: fix it, so that equal inputs give equal bytes on every machine.
    largest = top.gather(0, top.abs().argmax(0, keepdim=True))
    top = top * torch.where(largest < 0, -1.0, 1.0)
    return top.float(), values.flip(-1)[:rank].clamp_min(0).sqrt().float()


def _split(left: Tensor, projected: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor, float]:
    """left [N, r] orthonormal, projected = left^T E = diag(sigma) V^T -> U = left sqrt(sigma), V = .../sqrt(sigma)."""
    root = sigma.sqrt()
    inverse = torch.where(root > 0, 1 / root, torch.zeros_like(root))
    return left * root, projected * inverse[:, None], float(sigma.double().square().sum())
