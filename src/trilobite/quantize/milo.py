"""MiLo's Algorithm 1 on one matrix: alternate the quantizer and the low-rank compensator."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trilobite.formats.weight import PackedWeight, decode_factor
from trilobite.quantize.compensator import quantize_factors
from trilobite.quantize.lowrank import truncated_svd
from trilobite.quantize.matrix import Line, Tiles, bands, check_finite, quantize_band, sum_of_squares
from trilobite.recipe import Format

WINDOW = 3
TOLERANCE = 1e-4
"""Stop rule (eq. 15): the mean error of three iterations fell by less than this share, or rose."""


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
    """What to add to a quantized matrix. rank: of U V    compensator: its format    iterations: cap (paper: 20)."""

    rank: int
    compensator: str = "int3"
    iterations: int = 20
    seed: int = 0


@dataclass
class _Iterate:
    error: float
    line: Line
    u: Tensor
    v: Tensor


def milo(w: Tensor, fmt: Format, method: str, compensation: Compensation) -> MiloResult:
    """Jointly optimise codes and compensator (Algorithm 1), quantize the compensator, refit the codes against it.

    Iteration t quantizes W - U V (eq. 4-9; or a least-squares search in their place), decomposes the residual
    W - W_dq (eq. 10-12) and measures eq. 14; it stops by eq. 15, at the cap, or on divergence, and the best iterate
    is kept. The factors are then stored (eq. 13) and the codes found once more for W minus the *stored* U V.

    w: [N, K] any float dtype    Raises WeightError for NaN, infinite or out-of-range weights.
    """
    n, k = w.shape
    norm = _norm(w)
    work = torch.empty(n, k, device=w.device)
    best: _Iterate | None = None
    last: _Iterate | None = None
    errors: list[float] = []
    best_at = 0
    for step in range(compensation.iterations):
        line, residual = _quantize_residual(w, fmt, method, last, work)
        u, v, energy = truncated_svd(
            work, compensation.rank, seed=compensation.seed, start=None if last is None else last.v
        )
        error = max(residual - energy, 0.0) ** 0.5 / norm if norm else 0.0
        errors.append(error)
        last = _Iterate(error, line, u, v)
        if best is None or error < best.error:
            best, best_at = last, step
        if converged(errors):
            break
    assert best is not None
    del work, last
    weight, error = _stored(w, fmt, method, best, compensation.compensator)
    return MiloResult(weight=weight, error=error, errors=errors, best=best_at)


def converged(errors: list[float]) -> bool:
    """The stop rule of eq. 15 on the errors so far (also true when the windowed error rises)."""
    if len(errors) <= WINDOW:
        return False
    now, before = sum(errors[-WINDOW:]), sum(errors[-WINDOW - 1 : -1])
    return before - now < TOLERANCE * before


def _norm(w: Tensor) -> float:
    return math.sqrt(sum(sum_of_squares(check_finite(w[rows].float())) for rows in bands(*w.shape)))


def _quantize_residual(
    w: Tensor, fmt: Format, method: str, last: _Iterate | None, work: Tensor
) -> tuple[Line, float]:
    """Quantize W - U V band by band, leave E = W - W_dq in `work`; returns the line and |E|_F^2."""
    scales, offsets, total = [], [], 0.0
    for rows in bands(*w.shape):
        original = w[rows].float()
        target, start = original, None
        if last is not None:
            target = torch.addmm(original, last.u[rows], last.v, alpha=-1)
            start = _rows(last.line, rows)
        band = quantize_band(
            target, fmt, method, start=start, original=original, residual=work[rows], packed=False
        )
        total += sum_of_squares(band.residual)
        scales.append(band.line[0])
        offsets.append(band.line[1])
    found = [o for o in offsets if o is not None]
    return (torch.cat(scales), torch.cat(found) if found else None), total


def _rows(line: Line, rows: slice) -> Line:
    return line[0][rows], None if line[1] is None else line[1][rows]


def _stored(
    w: Tensor, fmt: Format, method: str, best: _Iterate, compensator: str
) -> tuple[PackedWeight, float]:
    """Store U and V, then refit the codes once against what was stored; also returns the relative error."""
    n, k = w.shape
    lra, lrb = quantize_factors(best.u, best.v, compensator)
    u, v = decode_factor(lra, n).T, decode_factor(lrb, k)
    tiles = Tiles(fmt, (n, k), w.device)
    for rows in bands(n, k):
        original = w[rows].float()
        target = torch.addmm(original, u[rows], v, alpha=-1)
        band = quantize_band(target, fmt, method, start=_rows(best.line, rows))
        tiles.put(rows, band, original)
    weight = PackedWeight(shape=(n, k), packed=tiles.packed, scale=tiles.scale, lra=lra, lrb=lrb)
    return weight, tiles.relative_error
