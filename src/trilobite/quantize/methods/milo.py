"""MiLo's Algorithm 1 on one matrix: alternate the quantizer and the low-rank compensator."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from trilobite.formats.weight import decode_factor, dequantize
from trilobite.quantize.methods.bands import (
    BAND,
    bands,
    check_finite,
    quantize_band,
    quantize_bands,
    relative_error,
    sum_of_squares,
)
from trilobite.quantize.methods.compensator import (
    fit_factor,
    quantize_absmax,
    quantize_factor,
    quantize_factors,
)
from trilobite.quantize.methods.hessian import relative_loss
from trilobite.quantize.methods.ldlq import quantize_lattice
from trilobite.quantize.methods.lowrank import EXACT, POWER_ITERATIONS, followed_svd, truncated_svd
from trilobite.quantize.methods.quantized import Compensation, Quantized
from trilobite.quantize.methods.search import Scales
from trilobite.recipe import AnyFormat, LatticeFormat

WINDOW = 3
TOLERANCE = 1e-4
"""Stop rule (eq. 15): the mean error of three iterations fell by less than this share, or rose."""
LEAST = 1e-4
"""Importance of a column that has none, of an average of 1."""
DRAFT_STEPS = 1
"""Alternations of `search` inside the loop. Codes that are only nearly the best leave more for the low rank to find:
the stored error is lower than with the full search in every round, and so is the time."""
FOLLOWING = 4
LARGEST_FALL = 1 / 30
"""Rounds at the end, two fifths of all at most, in which lines begin as the round before left them, and come to rest;
not before a round lowers the error by less than this share: as long as the low rank finds more, lines that follow
would leave outliers to the codes."""
STRIDE, LONGEST_STRIDE = 2.2, 3.0
LONG_STRIDE_RANKS = 32
"""What the codes are found for moves by more than the low rank did, in about half the rounds; after a round that made it
worse, no farther. Farther still would oscillate, and the sooner the more ranks there are, which take up more of what the
codes leave: the longest stride is for a 32nd of the smaller side, .4 less for each doubling, down to STRIDE.
"""
REFITS = 1
"""Rounds in which 3-bit factors are fitted once more against the codes, and the codes against the factors as stored."""


Factors = tuple[Tensor, Tensor]
"""U [N, R] and V [R, K], fp32; or both as they are stored."""


def milo(
    w: Tensor,
    fmt: AnyFormat,
    *,
    method: str,
    hessian: Tensor | None = None,
    compensation: Compensation | None = None,
) -> Quantized:
    """Quantize by a method, and where a rank is asked for, let codes and compensator alternate; see `quantized.Method`.

    hessian: [K, K] fp32, for ldlq, which finds the last codes; before them nothing but the error of the weights counts.
    Or the importance of each column, [K] fp32, for search: what counts is the error weighted by it, everywhere.
    """
    compensation = compensation or Compensation()
    quantizer = _compensated if compensation.rank else _codes
    quantized = quantizer(w, fmt, method, compensation, hessian)
    if hessian is None or quantized.proxy is not None:
        return quantized
    return replace(quantized, proxy=relative_loss(w, dequantize(quantized.weight), hessian))


def _codes(
    w: Tensor,
    fmt: AnyFormat,
    method: str,
    compensation: Compensation,
    hessian: Tensor | None,
    factors: Factors | None = None,
) -> Quantized:
    """The codes for W, or for W minus the stored U V. factors: `lra` and `lrb` as in formats/weight.py."""
    if not isinstance(fmt, LatticeFormat):
        lra, lrb = factors or (None, None)
        return quantize_bands(w, fmt, method, lra, lrb, weight=_importance(hessian))
    target = w if factors is None else _minus(w, factors)
    seeds = {"seed": compensation.seed, "input_seed": compensation.input_seed}
    quantized = quantize_lattice(target, fmt, method=method, hessian=hessian, **seeds)
    if factors is None:
        return quantized
    weight = replace(quantized.weight, lra=factors[0], lrb=factors[1])
    return Quantized(weight=weight, error=relative_error(w, weight))


def _importance(hessian: Tensor | None) -> Tensor | None:
    """Of each column [K] fp32 with a mean of 1, where there is one. Columns that no input excites count a little."""
    if hessian is None or hessian.dim() != 1:
        return None
    return (hessian / hessian.mean().clamp_min(1e-30)).clamp_min(LEAST)


def _minus(w: Tensor, factors: Factors) -> Tensor:
    """W minus the stored U V, [N, K] fp32."""
    (n, k), (lra, lrb) = w.shape, factors
    return torch.addmm(w.float(), decode_factor(lra, n).T, decode_factor(lrb, k), alpha=-1)


def _compensated(
    w: Tensor, fmt: AnyFormat, method: str, compensation: Compensation, hessian: Tensor | None
) -> Quantized:
    """Jointly optimise codes and compensator (Algorithm 1), quantize the compensator, refit the codes against it.

    Iteration t quantizes W - U V (eq. 4-9; or a least-squares search in their place), decomposes the residual
    W - W_dq (eq. 10-12) and measures eq. 14; it stops by eq. 15, at the cap, or on divergence, and the best iterate
    is kept. The factors are then stored (eq. 13) and the codes found once more for W minus the *stored* U V.
    Without refits both are stored as the last iteration leaves them.
    """
    # Feedback moves errors to where H does not see them, and the low rank would spend its terms on them.
    draft = "search" if method == "ldlq" else method
    weight = _importance(hessian)
    root = torch.ones(1, device=w.device) if weight is None else weight.sqrt()
    norm = math.sqrt(sum(sum_of_squares(check_finite(w[rows].float()) * root) for rows in bands(*w.shape)))
    best: Factors | None = None
    last: Factors | None = None
    before: Factors | None = None
    ahead: Factors | None = None
    errors: list[float] = []
    lines: list[Scales] = []
    lines_of_best = lines
    following = False
    for left in reversed(range(compensation.iterations)):
        following = following or _may_follow(left, errors, compensation)
        residuals = _Residuals(w, fmt, draft, ahead, compensation, weight, lines if following else None)
        u, v, energy = _decomposed(residuals, w, compensation, None if ahead is None else ahead[1] * root)
        before, last, lines = ahead, (u, v / root), residuals.lines
        errors.append(math.sqrt(max(residuals.energy - energy, 0.0)) / norm if norm else 0.0)
        if errors[-1] <= min(errors):  # with hqq and rtn inside errors may rise again
            best, lines_of_best = last, lines
        if converged(errors):
            break
        ahead = _ahead(before, last, _stride(w, compensation, errors))
    assert best is not None
    assert last is not None
    if not compensation.refit:
        return replace(_as_published(w, fmt, draft, before, last, compensation), errors=tuple(errors))
    stored = _stored_factors(w, fmt, draft, best, compensation, weight, lines_of_best)
    return replace(_codes(w, fmt, method, compensation, hessian, stored), errors=tuple(errors))


def _as_published(
    w: Tensor, fmt: AnyFormat, method: str, before: Factors | None, last: Factors, compensation: Compensation
) -> Quantized:
    """The codes of the last iteration, found for W minus the factors before it, and its factors, by eq. 13."""
    target = w.float() if before is None else torch.addmm(w.float(), *before, alpha=-1)
    weight = _codes(target, fmt, method, compensation, None).weight
    lra, lrb = (quantize_absmax(f.contiguous(), compensation.compensator) for f in (last[0].T, last[1]))
    weight = replace(weight, lra=lra, lrb=lrb)
    return Quantized(weight=weight, error=relative_error(w, weight))


def converged(errors: list[float]) -> bool:
    """The stop rule of eq. 15 on the errors so far (also true when the windowed error rises)."""
    if len(errors) <= WINDOW:
        return False
    now, before = sum(errors[-WINDOW:]), sum(errors[-WINDOW - 1 : -1])
    return before - now <= TOLERANCE * before


def _may_follow(left: int, errors: list[float], compensation: Compensation) -> bool:
    """Whether lines may begin as the round before left them, which did not; left: rounds after this one."""
    most = min(FOLLOWING, compensation.iterations * 2 // 5) if compensation.refit else 0
    return left < most and errors[-1] > (1 - LARGEST_FALL) * errors[-2]


def _stride(w: Tensor, compensation: Compensation, errors: list[float]) -> float:
    """How far to go; as published: no farther than the low rank."""
    worse = len(errors) > 1 and errors[-1] > errors[-2]
    if not compensation.refit or worse:
        return 1.0
    doublings = math.log2(LONG_STRIDE_RANKS * compensation.rank / min(w.shape))
    return min(LONGEST_STRIDE, max(STRIDE, LONGEST_STRIDE - 0.4 * doublings))


def _ahead(before: Factors | None, last: Factors, stride: float) -> Factors:
    """Factors that lie `stride` times as far from those before as the last, seen in the space of U."""
    if before is None or stride == 1:
        return last
    u, v = last
    overlap = (u.T @ before[0]) / u.square().sum(0).clamp_min(1e-30)[:, None]
    return u, torch.addmm(v, overlap, before[1], beta=stride, alpha=1 - stride)


class _Residuals:
    """E = W - W_dq by bands, where W_dq is W - U V in draft quality; once."""

    def __init__(
        self,
        w: Tensor,
        fmt: AnyFormat,
        method: str,
        factors: Factors | None,
        compensation: Compensation,
        weight: Tensor | None,
        start: list[Scales] | None,
    ) -> None:
        """weight: importance of the columns; with it E has its columns multiplied by its root.

        start: `lines` of other residuals, that searches start from
        """
        self._inputs = (w, fmt, method, factors, compensation)
        self._weight, self._start = weight, start
        self.energy = 0.0
        """|E|_F^2 of what was seen."""
        self.lines: list[Scales] = []
        """Scales and offsets of the bands that were seen."""

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows of E and their values, which the next ones overwrite."""
        for rows, e in self._unweighted():
            if self._weight is not None:
                e *= self._weight.sqrt()
            self.energy += sum_of_squares(e)
            yield rows, e

    def _unweighted(self) -> Iterator[tuple[slice, Tensor]]:
        w, fmt, method, factors, compensation = self._inputs
        n, k = w.shape
        if isinstance(fmt, LatticeFormat):  # its transform mixes all rows
            target = w.float() if factors is None else torch.addmm(w.float(), *factors, alpha=-1)
            drafted = dequantize(_codes(target, fmt, method, compensation, None).weight)
            yield from ((rows, w[rows] - drafted[rows]) for rows in bands(n, k))
            return
        # Products of few rows and many columns are slow.
        parts = list(bands(n, k, max(BAND, compensation.rank * k)))
        original, target, residual = w.new_empty(3, min(n, parts[0].stop), k, dtype=torch.float32)
        for i, rows in enumerate(parts):
            count = rows.stop - rows.start
            source = original[:count].copy_(w[rows])
            if factors is not None:
                torch.addmm(source, factors[0][rows], factors[1], alpha=-1, out=target[:count])
            band = quantize_band(
                source if factors is None else target[:count],
                fmt,
                method,
                steps=DRAFT_STEPS,
                start=self._start[i] if self._start else None,
                original=source,
                residual=residual[:count],
                packed=False,
                weight=self._weight,
            )
            self.lines.append(band.scales)
            yield rows, residual[:count]


def _decomposed(
    residuals: _Residuals, w: Tensor, compensation: Compensation, start: Tensor | None
) -> tuple[Tensor, Tensor, float]:
    """U V of the residuals as `truncated_svd` has it. start: V of a neighbour, where there is one."""
    n, k = w.shape
    if start is not None and min(n, k) > EXACT:
        return followed_svd(residuals, (n, k), start)
    whole = torch.empty(n, k, dtype=torch.float32, device=w.device)
    for rows, e in residuals:
        whole[rows] = e
    power = 1 if compensation.iterations > 1 else POWER_ITERATIONS
    return truncated_svd(whole, compensation.rank, seed=compensation.seed, power=power)


def _stored_factors(
    w: Tensor,
    fmt: AnyFormat,
    method: str,
    factors: Factors,
    compensation: Compensation,
    weight: Tensor | None,
    lines: list[Scales],
) -> tuple[Tensor, Tensor]:
    """Store U and V; 3-bit ones lose enough in it that fitting them to the residual again, in turn, pays.

    lines: of the last residuals, that searches start from
    """
    n, k = w.shape
    compensator = compensation.compensator
    root = torch.ones(1, device=w.device) if weight is None else weight.sqrt()
    lra, lrb = quantize_factors(*factors, compensator)
    if compensator != "int3":
        return lra, lrb
    best = lra, lrb
    least = math.inf
    for step in range(REFITS + 1):
        u, v = decode_factor(lra, n).T, decode_factor(lrb, k)
        residuals = _Residuals(w, fmt, method, (u, v), compensation, weight, lines)
        v = v * root  # as E is
        across = v.new_empty(len(v), n) if step < REFITS else None
        along = _products(residuals, u, v, across)
        error = residuals.energy - _explained(along, u, v)
        if error < least:  # of what is stored: rounding the factors may cost more than a fit wins
            least, best = error, (lra, lrb)
        if across is not None:
            lra = quantize_factor(fit_factor(across, v @ v.T), compensator)
            u = decode_factor(lra, n).T
            residuals = _Residuals(w, fmt, method, (u, v / root), compensation, weight, lines)
            along = _products(residuals, u, v)
            lrb = quantize_factor(fit_factor(along, u.T @ u) / root, compensator)
    return best


def _products(residuals: _Residuals, u: Tensor, v: Tensor, across: Tensor | None = None) -> Tensor:
    """U^T E [R, K]. across: where V E^T [R, N] is put"""
    along = torch.zeros_like(v)
    for rows, e in residuals:
        if across is not None:
            across[:, rows] = v @ e.T
        along.addmm_(u[rows].T, e)
    return along


def _explained(along: Tensor, u: Tensor, v: Tensor) -> float:
    """|E|^2 - |E - U V|^2. along: U^T E."""
    gram = (u.T @ u) * (v @ v.T)
    return float(2 * (along * v).double().sum() - gram.double().sum())
