"""Truncated singular value decomposition with the square root split (MiLo eq. 11-12)."""

import torch
from torch import Tensor

EXACT = 512
"""Matrices whose smaller side is at most this are decomposed exactly, through the Gram matrix in float64."""
OVERSAMPLE = 8
POWER_ITERATIONS = 3
WARM_POWER_ITERATIONS = 0
"""MiLo's rounds start from the subspace of the round before: each is one more power iteration on a residual that moves
slowly, and its error cannot rise."""


def truncated_svd(
    e: Tensor, rank: int, *, seed: int, start: Tensor | None = None
) -> tuple[Tensor, Tensor, float]:
    """Best rank-`rank` approximation U V of E, each factor carrying the square root of the singular values.

    Large matrices use randomised subspace iteration with oversampling (Halko et al. 2011), started from `start` where
    given. Same inputs and seed, same result.

    e: [N, K] fp32    start: V of an earlier call [R', K] or None
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
    iterations = POWER_ITERATIONS
    if start is not None:
        known = min(start.shape[0], width)
        probe[:, :known] = start[:known].T / start[:known].norm(dim=1).clamp_min(1e-30)
        iterations = WARM_POWER_ITERATIONS
    q = _orthonormal(e @ probe)
    for _ in range(iterations):
        q = _orthonormal(e @ _orthonormal(e.T @ q))
    b = q.T @ e
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
