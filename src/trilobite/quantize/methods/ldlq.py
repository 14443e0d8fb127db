"""QuIP# without fine-tuning: rotate a matrix, round it eight columns at a time with feedback, store lattice codes.

Rounding minimises the proxy loss tr((W - W_q) H (W - W_q)^T), H = E[x x^T] of the layer's inputs (QuIP# eq. 2):
`ldlq` by BlockLDLQ (section 4.1), `rtn` and `search` for H = I, where every vector goes to its nearest point. The loss
and H are rotated with the matrix, so all of it happens in rotated coordinates.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trilobite.errors import CalibrationError, ShapeError, WeightError
from trilobite.formats import lattice
from trilobite.formats.incoherence import Spin, draw_signs, read_signs
from trilobite.formats.lattice import DIM, RHO, LatticeRecord
from trilobite.formats.weight import PackedWeight
from trilobite.kernels.cpu import lattice as cpu
from trilobite.quantize.methods.hessian import check, given
from trilobite.quantize.methods.quantized import Quantized
from trilobite.recipe import LatticeFormat

SIGMA = 1e-2
"""Share of the mean diagonal that is added to the diagonal of H."""
LAZY = 128
"""Columns whose feedback from all earlier columns is one product."""
BAND = 1 << 22
"""Weights that are rounded with feedback at a time; rows do not depend on each other."""
SAMPLE = 1 << 12
"""Vectors that a scale is tried on."""
SAMPLE_ROWS = 32
"""Rows that a scale is tried on with feedback."""
FACTORS = (0.85, 0.9, 0.95, 1.0, 1.05, 1.1)
"""Scales to try, times that of least error on a Gaussian source."""
FEEDBACK_FACTORS = (0.7, 0.76, 0.82, 0.88, 0.94, 1.0)
"""The same with feedback, which widens what is rounded: section F.5 has 0.9 in the place of 1.03."""
LARGEST, SMALLEST = 1e30, 1e-35
"""Standard deviations of weights: beyond the one they are damaged, below the other they count as zero."""
PASSES = 2
"""Times that every block is rounded once more, given all others, after BlockLDLQ."""

Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Vectors [M, 8] -> (codes [M] int64, the points [M, 8] that they stand for)."""


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """What a scale gives, for weights of unit variance. codes: [N, K/8] int64    error: squared, of all weights."""

    record: LatticeRecord
    codes: Tensor
    error: float


def quantize_lattice(
    w: Tensor,
    fmt: LatticeFormat,
    *,
    method: str,
    hessian: Tensor | None = None,
    seed: int = 0,
    input_seed: int = 0,
) -> Quantized:
    """Quantize a matrix to a lattice format (Algorithm 1).

    w: [N, K] any float dtype    method: rtn, search, or ldlq    hessian: [K, K] fp32, E[x x^T], for ldlq
    seed, input_seed: of the random vectors of the outputs and of the inputs; matrices with one input share the latter,
    so that the input is rotated once for all of them
    Raises WeightError for NaN, infinite or out-of-range weights, CalibrationError for such a Hessian, RecipeError for
    ldlq without a Hessian, ShapeError when K is no multiple of 8 or the Hessian is not [K, K].
    """
    n, k = w.shape
    lattice.packed_shape(fmt, n, k)
    signs_in, signs_out = (
        draw_signs(fmt.transform, m, s).to(w.device) for m, s in ((k, input_seed), (n, seed))
    )
    # Both sides: one alone would leave outliers in whole rows, or in whole columns.
    spin_in, spin_out = read_signs(signs_in, fmt.transform, k), read_signs(signs_out, fmt.transform, n)
    rotated = spin_out.forward(spin_in.forward(w.float()).T.contiguous()).T.contiguous()
    total = float(sum(part.double().square().sum() for part in torch.split(rotated, 1024)))
    unit = math.sqrt(total / (n * k))
    if not unit < LARGEST:
        raise WeightError("weights are NaN, infinite or out of range; the source checkpoint is damaged")
    rotated *= 1 / unit if unit > SMALLEST else 0.0  # from here on in units of the standard deviation
    if method == "ldlq":
        rounded = _feedback(rotated, fmt, _rotated_hessian(given(hessian, method), spin_in, k))
    else:
        rounded = _nearest(rotated, _scaled(rotated, fmt) if method == "search" else _record(fmt))
    record = rounded.record.times(unit if unit > SMALLEST else 0.0)
    packed = PackedWeight(
        shape=(n, k),
        packed=lattice.pack(rounded.codes, fmt),
        lattice=record.to_tensor().to(w.device),
        signs_in=signs_in,
        signs_out=signs_out,
    )
    return Quantized(weight=packed, error=math.sqrt(rounded.error / (n * k)) if unit > SMALLEST else 0.0)


def block_ldl(h: Tensor, g: int = DIM) -> tuple[Tensor, Tensor]:
    """H = L^T D L with L unit lower triangular and D diagonal, in blocks of g (section 4.1).

    h: [K, K] positive definite    returns: L [K, K], D [K/g, g, g], in the dtype of h, or fp64 where fp32 failed
    Raises CalibrationError when H is not positive definite.
    """
    k = h.shape[0]
    factor, failed = torch.linalg.cholesky_ex(h.flip(0, 1))
    if failed:  # fp32 halves the time, and is enough for all but nearly singular H
        factor, failed = torch.linalg.cholesky_ex(h.double().flip(0, 1))
    if failed:
        raise CalibrationError("the Hessian is not positive definite; calibrate with more text (--samples)")
    upper = factor.flip(0, 1)  # H = R R^T, R upper triangular
    blocks = _diagonal_blocks(upper, g)
    columns = upper.T.reshape(k // g, g, k)  # R^T, block row by block row
    lower = torch.linalg.solve_triangular(blocks.mT, columns, upper=False)
    return lower.reshape(k, k), blocks @ blocks.mT


def block_ldlq(w: Tensor, lower: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Round eight columns at a time, each with linear feedback from the errors before it (section 4.1).

    w: [N, K] fp32    lower: [K, K], L of `block_ldl`    returns: codes [N, K/8] int64, W - W_q [N, K]
    """
    n, k = w.shape
    error = torch.empty_like(w)
    codes = torch.empty(n, k // DIM, dtype=torch.int64, device=w.device)
    for start in range(0, k, LAZY):
        stop = min(k, start + LAZY)
        target = torch.addmm(w[:, start:stop], error[:, :start], lower[start:stop, :start].T)
        for first in range(start, stop, DIM):
            columns, done = slice(first, first + DIM), slice(start, first)
            here = target[:, first - start : first - start + DIM]
            here = torch.addmm(here, error[:, done], lower[columns, done].T)
            codes[:, first // DIM], points = quantizer(here)
            torch.sub(w[:, columns], points, out=error[:, columns])
    return codes, error


def retouch(error: Tensor, codes: Tensor, w: Tensor, hessian: Tensor, quantizer: Quantizer) -> None:
    """Round every block once more, given all others, and keep what lowers the proxy loss; in place.

    Block k of a row is moved to the point nearest to where the loss has its minimum, W_k - E_k + (E H)_k H_kk^-1.

    error: [N, K] W - W_q    codes: [N, K/8]    w: [N, K]    hessian: [K, K]
    """
    k = w.shape[1]
    blocks = _diagonal_blocks(hessian, DIM)
    inverses = torch.linalg.inv(blocks)
    for start in range(0, k, LAZY):
        span = slice(start, start + LAZY)
        gradient = error @ hessian[:, span]
        now, near = w[:, span] - error[:, span], hessian[span, span]
        for first in range(0, now.shape[1], DIM):
            columns, number = slice(first, first + DIM), (start + first) // DIM
            slope = gradient[:, columns].contiguous()
            nearest, points = quantizer(now[:, columns] + slope @ inverses[number])
            step = points - now[:, columns]
            curved = step @ blocks[number]
            # Above zero: between points that are equally good fp32 noise would decide, differently on each machine.
            better = (step * (2 * slope - curved)).sum(-1) > 1e-6 * (curved * step).sum(-1)
            step *= better[:, None]
            codes[:, number] = torch.where(better, nearest, codes[:, number])
            now[:, columns] += step
            # At once, not after the pass: a block that is moved given old errors of others may raise the loss.
            behind = slice(first + DIM, None)
            gradient[:, behind].addmm_(step, near[columns, behind], alpha=-1)
        torch.sub(w[:, span], now, out=error[:, span])


def _diagonal_blocks(matrix: Tensor, g: int) -> Tensor:
    """[K, K] -> [K/g, g, g]."""
    return torch.stack([matrix[i : i + g, i : i + g] for i in range(0, len(matrix), g)])


def _record(fmt: LatticeFormat, factor: float = 1.0, ratio: float = 1.0) -> LatticeRecord:
    """Scales for weights of unit variance; factors are relative to those of RHO."""
    rho, second = RHO[fmt.codebook, fmt.bits]
    scale = 1 / (rho * factor)
    return LatticeRecord(format=fmt, scale=scale, second=scale / (second * ratio) if fmt.two_stages else 0.0)


def _quantizer(record: LatticeRecord) -> Quantizer:
    return lambda vectors: _find(vectors, record)


def _find(vectors: Tensor, record: LatticeRecord) -> tuple[Tensor, Tensor]:
    """`lattice.nearest`, natively where that can be."""
    search = cpu.nearest if cpu.supports(vectors, record.format) else lattice.nearest
    return search(vectors, record.format, record.ratio)


def _nearest(rotated: Tensor, record: LatticeRecord) -> Rounded:
    """Every vector to its nearest point."""
    k = rotated.shape[1]
    codes, error = [], 0.0
    for rows in torch.split(rotated, max(1, BAND // k)):
        nearest, points = _find(rows.reshape(-1, DIM) / record.scale, record)
        codes.append(nearest.view(-1, k // DIM))
        error += float((rows.reshape(-1, DIM) - points * record.scale).square_().sum(dtype=torch.float64))
    return Rounded(record=record, codes=torch.cat(codes), error=error)


def _scaled(rotated: Tensor, fmt: LatticeFormat) -> LatticeRecord:
    """The scales of least error on a sample: first the first stage's, then the second's."""
    vectors = rotated.view(-1, DIM)
    sample = vectors[:: -(-len(vectors) // SAMPLE)].contiguous()

    def best(records: list[LatticeRecord]) -> LatticeRecord:
        return min(records, key=lambda record: _nearest(sample, record).error)

    record = best([_record(fmt, factor) for factor in FACTORS])
    if not record.second:
        return record
    factor = 1 / (RHO[fmt.codebook, fmt.bits][0] * record.scale)
    return best([_record(fmt, factor, ratio) for ratio in FACTORS])


def _rotated_hessian(hessian: Tensor, spin: Spin, k: int) -> Tensor:
    """T H T^T in units of its mean diagonal, plus SIGMA on the diagonal."""
    if hessian.shape != (k, k):
        raise ShapeError(f"Hessian is {list(hessian.shape)}, the matrix has K={k}; expected [{k}, {k}]")
    check(hessian)
    h = hessian.float()
    mean = float(h.diagonal().mean())
    h = h / mean if mean > 0 else torch.eye(k, device=h.device)
    rotated = spin.forward(spin.forward(h).T.contiguous())
    # fp32 leaves it slightly askew, of which Cholesky would read one half.
    rotated = (rotated + rotated.T) / 2
    rotated.diagonal().add_(SIGMA)
    return rotated


def _feedback(rotated: Tensor, fmt: LatticeFormat, hessian: Tensor) -> Rounded:
    """BlockLDLQ at the scale of least proxy loss on a sample of rows, then the second look at every block."""
    n, k = rotated.shape
    lower = block_ldl(hessian)[0].float()
    # By the loss before the second look: six scales of that would cost more than the matrix.
    sample = rotated[:: -(-n // SAMPLE_ROWS)]
    records = [_record(fmt, factor) for factor in FEEDBACK_FACTORS]
    _, error = block_ldlq(torch.cat([sample / r.scale for r in records]), lower, _quantizer(records[0]))
    losses = ((error @ hessian) * error).sum(-1).view(len(records), -1).sum(-1).tolist()
    record = min(zip(records, losses, strict=True), key=lambda pair: pair[0].scale ** 2 * pair[1])[0]
    quantizer = _quantizer(record)
    codes, squared = [], 0.0
    for rows in torch.split(rotated, max(1, BAND // k)):
        target = rows / record.scale
        of_rows, error = block_ldlq(target, lower, quantizer)
        for _ in range(PASSES):
            retouch(error, of_rows, target, hessian, quantizer)
        codes.append(of_rows)
        squared += float(error.square_().sum(dtype=torch.float64)) * record.scale**2
    return Rounded(record=record, codes=torch.cat(codes), error=squared)
