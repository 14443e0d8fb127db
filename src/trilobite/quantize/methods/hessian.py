"""The Hessian of a matrix, H = E[x x^T] of its inputs, made fit for use: shrunk where data was scarce, damped, factored.

The loss that calibrated methods minimise is tr((W - W_q) H (W - W_q)^T), the mean squared error of the outputs
on the calibration inputs (QuIP# eq. 1, GPTQ eq. 1). Of importance only the diagonal of H is known, E[x^2] of each input:
then H is a vector [K], wherever this module speaks of [K, K].
"""

from typing import Any

import torch
from torch import Tensor

from trilobite.errors import CalibrationError, RecipeError

ENOUGH = 2
"""Tokens per column of H above which an expert's own Hessian is taken as it is."""
DIAGONAL_ENOUGH = 128
"""Tokens above which an expert's own diagonal is."""
DAMPING = 0.01
"""Share of the mean diagonal that is added to the diagonal (GPTQ section 3.3)."""
DAMPINGS = (1.0, 10.0, 100.0)
"""Factors on it that are tried in turn when H is not positive definite, each in fp32 and then in fp64."""
BAND = 1 << 25
"""Weights whose error is measured at a time."""
SMALL = 256
"""Columns of H that are worked on at a time where its being triangular or symmetric saves products."""


class HessianSum:
    """A running sum of x x^T over tokens, fp32, whose mean is H."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.tokens = 0
        self.total: Tensor | None = None

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """x: [T, K] any float dtype."""
        x = x.float()
        if self.total is None:
            self.total = torch.zeros((x.shape[1], x.shape[1]), dtype=torch.float32, device=x.device)
        self.total.addmm_(x.T, x)
        self.tokens += len(x)

    def mean(self) -> Tensor:
        """[K, K] fp32. Raises CalibrationError when it is not finite."""
        assert self.total is not None
        check(self.total)
        return self.total / max(1, self.tokens)

    @staticmethod
    def needed(k: int) -> float:
        """Tokens with which it counts alone: K make H barely invertible and its small eigenvalues noise; with 2 K they
        are within a factor.
        """
        return ENOUGH * k

    @staticmethod
    def neutral(k: int, like: Tensor | None) -> Tensor:
        """An identity, of the size of another one's mean diagonal."""
        size = 1.0 if like is None else float(like.diagonal().mean())
        return torch.eye(k, device=None if like is None else like.device).mul_(size)


class DiagonalSum(HessianSum):
    """A running sum of x^2 over tokens, fp32, whose mean is the diagonal of H."""

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """x: [T, K] any float dtype."""
        squares = x.float().square().sum(0)
        self.total = squares if self.total is None else self.total + squares
        self.tokens += len(x)

    @staticmethod
    def needed(k: int) -> float:
        """A mean of so many squares is within a fifth of what it stands for."""
        return DIAGONAL_ENOUGH

    @staticmethod
    def neutral(k: int, like: Tensor | None) -> Tensor:
        """That of an identity."""
        return torch.ones(k) if like is None else torch.full_like(like, float(like.mean()))


def given(hessian: Tensor | None, method: str) -> Tensor:
    """The Hessian itself; raises RecipeError where there is none."""
    if hessian is None:
        raise RecipeError(
            f"method {method} rounds by the inputs of a matrix and there are none; pass --calibration TEXT, or choose "
            "method search (quip2-free and the like)"
        )
    return hessian


def own_part(tokens: int, k: int, kind: type[HessianSum] = HessianSum) -> float:
    """How much an expert's own Hessian counts, at most 1. The layer's average has the rest."""
    return min(1.0, tokens / kind.needed(k))


def shrink(
    own: Tensor | None, average: Tensor | None, part: float, k: int, kind: type[HessianSum] = HessianSum
) -> Tensor:
    """`part` of an expert's own Hessian, the rest of the layer's average, of an identity where there is no average.

    own, average: [K, K] fp32, or None where no token was seen    returns: [K, K] fp32
    """
    if own is not None and part >= 1:
        return own
    if average is None:
        average = kind.neutral(k, own)
    return average if own is None else torch.lerp(average, own, part)


def check(h: Tensor) -> None:
    """Raise CalibrationError when H holds NaN or infinity.

    h: [K, K] fp32
    """
    if not bool(torch.isfinite(h.sum())) and not bool(torch.isfinite(h).all()):
        raise CalibrationError(
            "the Hessian holds NaN or infinity: activations overflow on the calibration text; check the checkpoint, "
            "or compress with a method that needs no data (search)"
        )


def hessian_note(tokens: int, part: float) -> dict[str, Any]:
    """What the report says of a Hessian. part: how much of it is the matrix's own."""
    return {"tokens": tokens} | ({"own": float(f"{part:.4g}")} if part < 1 else {})


def damped(h: Tensor) -> Tensor:
    """H with DAMPING of its mean diagonal added to the diagonal: the loss whose minimum `inverse_factor` leads to.

    h: [K, K] fp32    Columns that no input ever excited get the mean of the others, as there.
    """
    loss = h.clone()
    loss.diagonal().add_(_damping(h, DAMPING))
    return loss


def _damping(h: Tensor, share: float) -> Tensor:
    """What is added to the diagonal: a share of its mean, or the mean where no input came. h: [K, K] fp32 -> [K]."""
    diagonal = h.diagonal()
    alive = diagonal > 0
    mean = float(diagonal[alive].mean()) if bool(alive.any()) else 1.0
    return torch.where(alive, share * mean, mean)


def inverse_factor(h: Tensor) -> Tensor:
    """The upper triangular U with H^-1 = U^T U, of the damped H.

    Columns that no input ever excited get the mean of the others on the diagonal, so that they round to nearest and
    feed nothing back. Damping starts at 1 % of the mean diagonal and is raised when the factorisation fails, which is
    tried in fp32 and then in fp64.

    h: [K, K] fp32    returns: [K, K] fp32    Raises CalibrationError for a non-finite or hopeless H.
    """
    check(h)
    for factor in DAMPINGS:
        for dtype in (torch.float32, torch.float64):
            # Reversed in both directions, the lower Cholesky factor of H is the inverse of the upper one of H^-1.
            reversed_h = h.flip(0, 1).to(dtype)
            reversed_h.diagonal().add_(_damping(h, factor * DAMPING).flip(0).to(dtype))
            lower, info = torch.linalg.cholesky_ex(reversed_h)
            del reversed_h
            if int(info) == 0 and bool(torch.isfinite(lower.diagonal()).all()):
                _invert_lower(lower)
                upper: Tensor = lower.flip(0, 1).float()
                return upper
    raise CalibrationError(
        "the Hessian is not positive definite, even damped by its whole mean diagonal; calibrate with more text "
        "(--samples), or compress with a method that needs no data (search)"
    )


def _invert_lower(lower: Tensor) -> None:
    """Invert a lower triangular matrix in place, by halves: [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]].

    lower: [K, K] fp32 or fp64    A third of the products of solving for an identity, and a fourth of the memory.
    """
    n = len(lower)
    if n <= SMALL:
        identity = torch.eye(n, dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
        return
    half = n // 2
    a, b, c = lower[:half, :half], lower[half:, :half], lower[half:, half:]
    by_a = torch.linalg.solve_triangular(a, b, upper=False, left=False)
    b.copy_(torch.linalg.solve_triangular(c, by_a, upper=False).neg_())
    _invert_lower(a)
    _invert_lower(c)


def weighted_error(e: Tensor, h: Tensor) -> float:
    """tr(E H E^T).

    e: [N, K] fp32    h: [K, K] fp32, symmetric, or its diagonal [K]
    """
    n, k = e.shape
    step = max(1, BAND // k)
    total = 0.0
    for first in range(0, n, step):
        band = e[first : first + step]
        if h.dim() == 1:
            total += float(torch.dot((band * h).flatten(), band.flatten()))
            continue
        for start in range(0, k, SMALL):  # what lies beside the diagonal counts twice
            stop = start + SMALL
            along = band[:, start:stop] @ h[start:stop, start:]
            along[:, SMALL:] *= 2
            total += float(along.mul_(band[:, start:]).sum())
    return total


def relative_loss(w: Tensor, w_hat: Tensor, h: Tensor) -> float:
    """The loss of a quantized matrix over that of a matrix of zeros: tr((W - W_hat) H (W - W_hat)^T) / tr(W H W^T).

    w: [N, K] any float dtype    w_hat: [N, K] fp32    h: [K, K] fp32, or its diagonal [K]
    """
    whole = weighted_error(w.float(), h)
    return max(weighted_error(w.float() - w_hat, h), 0.0) / whole if whole > 0 else 0.0
