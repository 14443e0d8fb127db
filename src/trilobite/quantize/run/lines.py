"""A line of a plan: read a matrix, quantize it as the line says, measure what came out."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trilobite.checkpoint.roles import Matrix, read_matrix
from trilobite.checkpoint.source import DTYPES, Source
from trilobite.formats.padding import fill_up
from trilobite.formats.weight import PackedWeight, dequantize, with_real_signs
from trilobite.quantize.methods.bands import check_finite
from trilobite.quantize.methods.quantized import Compensation
from trilobite.quantize.methods.registry import METHODS
from trilobite.quantize.naming import naming
from trilobite.quantize.plan.plan import Plan, PlanLine
from trilobite.quantize.plan.statistics import sampled_kurtosis, sampled_residual_share
from trilobite.recipe import Format, LatticeFormat, Recipe

if TYPE_CHECKING:  # brings transformers along
    pass

SLACK = 400 * 2**20
"""Memory for matrices in work beyond twice the largest one; the rest of the promised gigabyte is Python and torch."""

FAINT = 2.0**-10
"""Where all weights of a matrix are below, fp16 scales hold few bits or none: it is quantized times a power of two."""
LOWEST = -120
"""The least exponent: its power of two has an inverse in fp32."""

NTH_EXPERT = 8
"""Of these the residual rank is noted: experts are alike in it, and it takes a tenth of the time of rounding."""

KnownHessian = tuple[Tensor, Mapping[str, Any]]
"""The Hessian of a matrix's inputs, [K, K] fp32 or its diagonal [K], and what the report says of it."""


def pack_line(
    source: Source,
    line: PlanLine,
    recipe: Recipe,
    device: torch.device,
    known: KnownHessian | None = None,
) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors to store for one plan line, in order, and what the report says of them.

    Raises WeightError and CalibrationError that say whose weights they are about.
    """
    w = read_matrix(source, line.matrix)
    if line.format is None:
        stored = w.to(DTYPES[line.stored[0].dtype])
        if stored.is_floating_point() and stored.numel():
            with naming(line.matrix.name):
                check_finite(stored.float() if stored.element_size() == 1 else stored)
        return [stored], {}
    return pack_matrix(w, line, recipe, device, known)


def pack_matrix(
    w: Tensor, line: PlanLine, recipe: Recipe, device: torch.device, known: KnownHessian | None = None
) -> tuple[list[Tensor], dict[str, Any]]:
    """The same for the matrix of a line that is quantized, [N, K] any float dtype."""
    w = w.to(device)
    hessian, note = (None, {}) if known is None else (known[0].to(device), known[1])
    if hessian is not None and line.importance and hessian.dim() == 2:
        hessian = hessian.diagonal()
    with naming(line.matrix.name):
        packed, record = quantize_line(w, line, recipe, hessian)
    packed = with_real_signs(packed) if line.tuned else packed
    return [t.cpu() for t in packed.tensors().values()], {**record, **note}


def quantize_line(
    w: Tensor, line: PlanLine, recipe: Recipe, hessian: Tensor | None = None
) -> tuple[PackedWeight, dict[str, Any]]:
    """Quantize one matrix as its plan line says; also returns what the report notes about the way there.

    w: [N, K] any float dtype    hessian: [K, K] fp32, E[x x^T] of its inputs, for the methods that use one, or [K]
    Raises WeightError for NaN, infinite or out-of-range weights, CalibrationError for a useless Hessian.
    """
    assert line.format is not None
    n, k = line.packed_shape
    exponent = _exponent(w, line)
    w = w.float() * 2.0**-exponent if exponent else w
    hessian = None if hessian is None else fill_up(hessian, *(k,) * hessian.dim())
    quantized = METHODS[line.method](
        fill_up(w, n, k), line.format, hessian=hessian, compensation=_compensation(line, recipe)
    )
    record: dict[str, Any] = {"kurtosis": float(f"{sampled_kurtosis(w):.4g}")}
    if (line.matrix.expert or 0) % NTH_EXPERT == 0:
        record["residual_share"] = float(f"{sampled_residual_share(w):.3g}")
    if quantized.errors:
        record["iterations"] = len(quantized.errors)
        record["errors"] = [float(f"{e:.4g}") for e in quantized.errors]
    error = quantized.error
    if (n, k) != tuple(w.shape):  # what filled it up meets zeros alone, and is no error
        error = float(
            (w.float() - dequantize(quantized.weight)[: w.shape[0], : w.shape[1]]).norm()
            / w.float().norm().clamp(min=1e-38)
        )
    record["error"] = float(f"{error:.6g}")
    if exponent:
        record["exponent"] = exponent
    if quantized.proxy is not None:
        record["proxy"] = float(f"{quantized.proxy:.6g}")
    return replace(quantized.weight, exponent=exponent), record


def _exponent(w: Tensor, line: PlanLine) -> int:
    """Of the power of two that leaves the largest weight between 1/2 and 1, where fp16 would lose scales; else 0."""
    if isinstance(line.format, LatticeFormat) and not line.rank:  # one scale, in fp32
        return 0
    largest = max(abs(float(x)) for x in w.aminmax()) if w.numel() else 0.0
    return max(LOWEST, math.frexp(largest)[1]) if 0 < largest < FAINT else 0


def _compensation(line: PlanLine, recipe: Recipe) -> Compensation:
    """What a line's low rank is like, and the seeds of all that is random in it."""
    m = line.matrix
    return Compensation(
        rank=line.rank,
        compensator=recipe.compensator,
        iterations=recipe.iterations,
        refit=recipe.refit,
        seed=_seed(_without_expert(m) if isinstance(line.format, LatticeFormat) else m.name),
        input_seed=_seed(input_name(m)),
    )


def _without_expert(m: Matrix) -> str:
    """A matrix's name without the number of its expert."""
    return re.sub(r"\.experts\.\w*?\d+\.", ".experts.", m.name)


def input_name(m: Matrix) -> str:
    """What matrices with the same input have in common: the path of the module around them, without the expert.

    So q, k and v rotate their input alike, gate and up too, and these of all experts of a layer: the input is rotated
    once for all. Down projections share the name, too, and need nothing of it.
    """
    return _without_expert(m).removesuffix(".weight").rpartition(".")[0]


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def memory_of(line: PlanLine, source: Source) -> int:
    """Bytes that a line in work holds: the mapped source, the working copy of MiLo, the result, the bands."""
    numel = torch.Size(line.matrix.shape).numel()
    mapped = numel * max(1, DTYPES[source.tensors[line.matrix.source].dtype].itemsize)
    n, k = line.matrix.shape if len(line.matrix.shape) == 2 else (numel, 1)
    low_rank = 4 * numel + 16 * (line.rank + 32) * (n + k) if line.rank else 0
    # Scales and offsets of the best round and of the last.
    lines = 16 * numel // line.format.group_size(k) if line.rank and isinstance(line.format, Format) else 0
    # The whole matrix is rotated; its codes are 64-bit while they are found.
    rotated = 12 * numel if isinstance(line.format, LatticeFormat) else 0
    widened = line.matrix.view.scale or line.matrix.view.transposed or source.rescaling
    converted = 4 * numel if widened else 0
    # H and three copies to factor it; weights, codes, errors.
    against = 16 * k * k + 12 * numel if line.calibrated and not line.importance else 0
    return mapped + low_rank + lines + rotated + converted + against + line.nbytes + 32 * 2**20


def memory_budget(plan: Plan) -> int:
    """Bytes that lines in work may hold together on one machine."""
    largest = max(torch.Size(line.matrix.shape).numel() for line in plan.lines)
    return 2 * 4 * largest + SLACK
