"""One line of a plan: read its matrix, quantize it as the line says, measure what came out."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trilobite.checkpoint.roles import Matrix, read_matrix
from trilobite.checkpoint.source import DTYPES, Source
from trilobite.errors import CalibrationError, WeightError
from trilobite.formats.weight import PackedWeight, dequantize, with_real_signs
from trilobite.quantize.methods.bands import check_finite, quantize_measured
from trilobite.quantize.methods.gptq import METHODS as GPTQ_METHODS
from trilobite.quantize.methods.gptq import gptq
from trilobite.quantize.methods.hessian import relative_loss
from trilobite.quantize.methods.ldlq import quantize_lattice
from trilobite.quantize.methods.milo import Compensation, milo
from trilobite.quantize.plan.plan import PlanLine
from trilobite.recipe import Format, LatticeFormat, Recipe

KnownHessian = tuple[Tensor, Mapping[str, Any]]
"""The Hessian of a matrix's inputs, [K, K] fp32, and what the report says of it."""


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
            with _naming(line):
                check_finite(stored.float() if stored.element_size() == 1 else stored)
        return [stored], {}
    w = w.to(device)
    hessian, note = (None, {}) if known is None else (known[0].to(device), known[1])
    with _naming(line):
        packed, record = quantize_line(w, line, recipe, hessian)
    packed = with_real_signs(packed) if line.tuned else packed
    return [t.cpu() for t in packed.tensors().values()], {**record, **note}


def quantize_line(
    w: Tensor, line: PlanLine, recipe: Recipe, hessian: Tensor | None = None
) -> tuple[PackedWeight, dict[str, Any]]:
    """Quantize one matrix as its plan line says; also returns what the report notes about the way there.

    w: [N, K] any float dtype    hessian: [K, K] fp32, E[x x^T] of its inputs, for the methods that use one
    Raises WeightError for NaN, infinite or out-of-range weights, CalibrationError for a useless Hessian.
    """
    fmt, proxy = line.format, None
    assert fmt is not None
    compensation = _compensation(line, recipe)
    record: dict[str, Any] = {}
    if line.method in GPTQ_METHODS:
        assert hessian is not None, f"{line.matrix.name}: {line.method} without a Hessian"
        assert isinstance(fmt, Format)
        against = gptq(w, fmt, line.method, hessian, compensation if line.rank else None)
        packed, error, proxy = against.weight, against.error, against.proxy
    elif line.rank:
        result = milo(w, fmt, line.method, compensation, hessian)
        packed, error = result.weight, result.error
        record["iterations"] = len(result.errors)
    elif isinstance(fmt, LatticeFormat):
        packed, error = quantize_lattice(
            w,
            fmt,
            method=line.method,
            hessian=hessian,
            seed=compensation.seed,
            input_seed=compensation.input_seed,
        )
    else:
        packed, error = quantize_measured(w, fmt, line.method)
    if hessian is not None and proxy is None:
        proxy = relative_loss(w, dequantize(packed), hessian)
    record["error"] = float(f"{error:.6g}")
    if proxy is not None:
        record["proxy"] = float(f"{proxy:.6g}")
    return packed, record


def _compensation(line: PlanLine, recipe: Recipe) -> Compensation:
    """What a line's low rank is like, and the seeds of all that is random in it."""
    m = line.matrix
    return Compensation(
        rank=line.rank,
        compensator=recipe.compensator,
        iterations=recipe.iterations,
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


@contextmanager
def _naming(line: PlanLine) -> Iterator[None]:
    """An error about weights says whose they are."""
    try:
        yield
    except (WeightError, CalibrationError) as e:
        raise type(e)(f"{line.matrix.name}: {e}") from None
