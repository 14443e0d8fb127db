"""MiLo's Algorithm 1 on one matrix: alternate the quantizer and the low-rank compensator."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trilobite.formats.weight import PackedWeight, decode_factor, dequantize
from trilobite.quantize.methods.bands import (
    Tiles,
    bands,
    check_finite,
    quantize_band,
    relative_error,
    sum_of_squares,
)
from trilobite.quantize.methods.compensator import fit_factor, quantize_factor, quantize_factors
from trilobite.quantize.methods.ldlq import quantize_lattice
from trilobite.quantize.methods.lowrank import truncated_svd
from trilobite.recipe import AnyFormat, Format, LatticeFormat

WINDOW = 3
TOLERANCE = 1e-4
"""Stop rule (eq. 15): the mean error of three iterations fell by less than this share, or rose."""
DRAFT_STEPS = 1
"""Alternations of `search` inside the loop. Codes that are only nearly the best leave more for the low rank to find:
the stored error is lower than with the full search in every round, and so is the time."""
REFITS = 2
"""Rounds in which 3-bit factors are fitted once more against the codes, and the codes against the factors as stored."""


@dataclass(frozen=True, kw_only=True)
class MiloResult:
    """A quantized matrix and how it was found.

    error: relative error of what is stored    best: index of the iterate that was kept
    errors: relative error |W - W_dq - U V|_F / |W|_F after each iteration, U and V still in fp32 (eq. 14)
    """

    weight: PackedWeight
    error: float
    errors: list[float]
    best: int


@dataclass(frozen=True, kw_only=True)
class Compensation:
    """What to add to a quantized matrix. rank: of U V    compensator: its format    iterations: cap (paper: 20).

    seed: of the SVD, and of the transform of the outputs    input_seed: of that of the inputs (lattice formats)
    """

    rank: int
    compensator: str = "int3"
    iterations: int = 20
    seed: int = 0
    input_seed: int = 0


Factors = tuple[Tensor, Tensor]
"""U [N, R] and V [R, K], fp32."""


def milo(
    w: Tensor, fmt: AnyFormat, method: str, compensation: Compensation, hessian: Tensor | None = None
) -> MiloResult:
    """Jointly optimise codes and compensator (Algorithm 1), quantize the compensator, refit the codes against it.

    Iteration t quantizes W - U V (eq. 4-9; or a least-squares search in their place), decomposes the residual
    W - W_dq (eq. 10-12) and measures eq. 14; it stops by eq. 15, at the cap, or on divergence, and the best iterate
    is kept. The factors are then stored (eq. 13) and the codes found once more for W minus the *stored* U V.

    w: [N, K] any float dtype    hessian: [K, K] fp32, for ldlq, which finds the last codes; before them nothing but
    the error of the weights counts    Raises WeightError for NaN, infinite or out-of-range weights.
    """
    draft = "search" if method == "ldlq" else method
    norm = math.sqrt(sum(sum_of_squares(check_finite(w[rows].float())) for rows in bands(*w.shape)))
    work = torch.empty(w.shape, dtype=torch.float32, device=w.device)
    best: Factors | None = None
    last: Factors | None = None
    errors: list[float] = []
    for _ in range(compensation.iterations):
        residual = _draft(w, fmt, draft, last, work, compensation)
        start = None if last is None else last[1]
        u, v, energy = truncated_svd(work, compensation.rank, seed=compensation.seed, start=start)
        last = u, v
        errors.append(math.sqrt(max(residual - energy, 0.0)) / norm if norm else 0.0)
        if errors[-1] <= min(errors):
            best = last
        if converged(errors):
            break
    assert best is not None
    lra, lrb = _stored_factors(w, fmt, draft, best, compensation, work)
    del work, last
    if isinstance(fmt, LatticeFormat):
        weight, error = _final_lattice(w, fmt, method, (lra, lrb), compensation, hessian)
    else:
        weight, error = _final(w, fmt, method, lra, lrb)
    return MiloResult(weight=weight, error=error, errors=errors, best=errors.index(min(errors)))


def converged(errors: list[float]) -> bool:
    """The stop rule of eq. 15 on the errors so far (also true when the windowed error rises)."""
    if len(errors) <= WINDOW:
        return False
    now, before = sum(errors[-WINDOW:]), sum(errors[-WINDOW - 1 : -1])
    return before - now <= TOLERANCE * before


def _draft(
    w: Tensor,
    fmt: AnyFormat,
    method: str,
    factors: Factors | None,
    work: Tensor,
    compensation: Compensation,
) -> float:
    """Quantize W - U V band by band, leave E = W - W_dq in `work`; returns |E|_F^2."""
    total = 0.0
    if isinstance(fmt, LatticeFormat):  # its transform mixes all rows
        target = w.float() if factors is None else torch.addmm(w.float(), *factors, alpha=-1)
        packed, _ = _rotate_and_round(target, fmt, method, compensation)
        torch.sub(w, dequantize(packed), out=work)
        return sum(sum_of_squares(work[rows]) for rows in bands(*w.shape))
    for rows in bands(*w.shape):
        original = w[rows].float()
        target = (
            original if factors is None else torch.addmm(original, factors[0][rows], factors[1], alpha=-1)
        )
        quantize_band(
            target, fmt, method, steps=DRAFT_STEPS, original=original, residual=work[rows], packed=False
        )
        total += sum_of_squares(work[rows])
    return total


def _stored_factors(
    w: Tensor, fmt: AnyFormat, method: str, factors: Factors, compensation: Compensation, work: Tensor
) -> tuple[Tensor, Tensor]:
    """Store U and V; 3-bit ones lose enough in it that fitting them to the residual again, in turn, pays."""
    n, k = w.shape
    compensator = compensation.compensator
    lra, lrb = quantize_factors(*factors, compensator)
    if compensator != "int3":
        return lra, lrb
    best = lra, lrb
    least = math.inf
    for step in range(REFITS + 1):
        u, v = decode_factor(lra, n).T, decode_factor(lrb, k)
        energy = _draft(w, fmt, method, (u, v), work, compensation)
        error = energy - _explained(work, u, v)
        if error < least:
            least, best = error, (lra, lrb)
        if step < REFITS:
            lra = quantize_factor(fit_factor(v @ work.T, v @ v.T), compensator)
            u = decode_factor(lra, n).T
            _draft(w, fmt, method, (u, v), work, compensation)
            lrb = quantize_factor(fit_factor(u.T @ work, u.T @ u), compensator)
    return best


def _explained(e: Tensor, u: Tensor, v: Tensor) -> float:
    """|E|^2 - |E - U V|^2."""
    inner = (u.T @ e) * v
    gram = (u.T @ u) * (v @ v.T)
    return float(2 * inner.double().sum() - gram.double().sum())


def _final(w: Tensor, fmt: Format, method: str, lra: Tensor, lrb: Tensor) -> tuple[PackedWeight, float]:
    """The codes for W minus the stored U V, packed, and the relative error of all."""
    n, k = w.shape
    u, v = decode_factor(lra, n).T, decode_factor(lrb, k)
    tiles = Tiles(fmt, (n, k), w.device)
    for rows in bands(n, k):
        original = w[rows].float()
        tiles.put(rows, quantize_band(torch.addmm(original, u[rows], v, alpha=-1), fmt, method), original)
    weight = PackedWeight(shape=(n, k), packed=tiles.packed, scale=tiles.scale, lra=lra, lrb=lrb)
    return weight, tiles.relative_error


def _rotate_and_round(
    w: Tensor, fmt: LatticeFormat, method: str, compensation: Compensation, hessian: Tensor | None = None
) -> tuple[PackedWeight, float]:
    seeds = {"seed": compensation.seed, "input_seed": compensation.input_seed}
    return quantize_lattice(w, fmt, method=method, hessian=hessian, **seeds)


def _final_lattice(
    w: Tensor,
    fmt: LatticeFormat,
    method: str,
    factors: tuple[Tensor, Tensor],
    compensation: Compensation,
    hessian: Tensor | None,
) -> tuple[PackedWeight, float]:
    """`_final` for a lattice format. factors: as stored."""
    (n, k), (lra, lrb) = w.shape, factors
    target = torch.addmm(w.float(), decode_factor(lra, n).T, decode_factor(lrb, k), alpha=-1)
    packed, _ = _rotate_and_round(target, fmt, method, compensation, hessian)
    weight = replace(packed, lra=lra, lrb=lrb)
    return weight, relative_error(w, weight)
