"""MiLo's Algorithm 1 on one matrix: alternate the quantizer and the low-rank compensator."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trilobite.formats import affine
from trilobite.formats.weight import PackedWeight, decode_factor
from trilobite.quantize.compensator import quantize_factors
from trilobite.quantize.lowrank import truncated_svd
from trilobite.quantize.matrix import Line, bands, check_finite, find_line, store
from trilobite.recipe import Format

WINDOW = 3
TOLERANCE = 1e-4
"""Stop rule (eq. 15): the mean error of three iterations fell by less than this share, or rose."""


@dataclass(frozen=True, kw_only=True)
class MiloResult:
    """A quantized matrix and how it was found.

    errors: relative error |W - W_dq - U V|_F / |W|_F after each iteration, U and V still in fp32 (eq. 14)
    best: index of the iterate that was kept
    """

    weight: PackedWeight
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
    return MiloResult(weight=_stored(w, fmt, method, best, compensation, work), errors=errors, best=best_at)


def converged(errors: list[float]) -> bool:
    """The stop rule of eq. 15 on the errors so far (also true when the windowed error rises)."""
    if len(errors) <= WINDOW:
        return False
    now, before = sum(errors[-WINDOW:]), sum(errors[-WINDOW - 1 : -1])
    return before - now < TOLERANCE * before


def _norm(w: Tensor) -> float:
    total = sum(float(check_finite(w[rows].float()).double().square().sum()) for rows in bands(*w.shape))
    return total**0.5


def _quantize_residual(
    w: Tensor, fmt: Format, method: str, last: _Iterate | None, work: Tensor
) -> tuple[Line, float]:
    """Quantize W - U V band by band, leave E = W - W_dq in `work`; returns the line and |E|_F^2."""
    n, k = w.shape
    scales, offsets, total = [], [], 0.0
    for rows in bands(n, k):
        original = w[rows].float()
        target, start = original, None
        if last is not None:
            target = torch.addmm(original, last.u[rows], last.v, alpha=-1)
            start = (last.line[0][rows], None if last.line[1] is None else last.line[1][rows])
        line = find_line(target, fmt, method, start)
        grid = affine.make_grid(*line, fmt)
        codes = affine.round_to_grid(target, grid, fmt).view(target.shape[0], -1, fmt.group_size(k))
        dequantized = codes.float().mul_(grid.scale[..., None]).add_(grid.offset[..., None]).view_as(target)
        work[rows] = original - dequantized
        total += float(work[rows].double().square().sum())
        scales.append(line[0])
        offsets.append(line[1])
    found = [o for o in offsets if o is not None]
    return (torch.cat(scales), torch.cat(found) if found else None), total


def _stored(
    w: Tensor, fmt: Format, method: str, best: _Iterate, compensation: Compensation, work: Tensor
) -> PackedWeight:
    """Store U and V, then refit the codes once against what was stored."""
    n, k = w.shape
    lra, lrb = quantize_factors(best.u, best.v, compensation.compensator)
    u, v = decode_factor(lra, n).T, decode_factor(lrb, k)
    packed = torch.empty(affine.packed_shape(fmt, n, k), dtype=torch.uint8, device=w.device)
    scale_shape = affine.scale_shape(fmt, n, k)
    scale = None if scale_shape is None else torch.empty(scale_shape, dtype=torch.uint8, device=w.device)
    for rows in bands(n, k):
        target = torch.addmm(w[rows].float(), u[rows], v, alpha=-1)
        start = (best.line[0][rows], None if best.line[1] is None else best.line[1][rows])
        store(target, find_line(target, fmt, method, start), fmt, rows, packed, scale)
    return PackedWeight(shape=(n, k), packed=packed, scale=scale, lra=lra, lrb=lrb)
