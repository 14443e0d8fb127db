"""Quantize a compensator: symmetric codes, V first, then U fitted to the stored V."""

import torch
from torch import Tensor

from trilobite.formats.weight import decode_factor, encode_factor, factor_groups
from trilobite.quantize.methods.bands import quantize_band
from trilobite.recipe import COMPENSATORS, Format


def quantize_factors(u: Tensor, v: Tensor, compensator: str) -> tuple[Tensor, Tensor]:
    """Store both factors (MiLo section 3.2.5), U after a least-squares fit that makes up for the rounding of V.

    u: [N, R] fp32    v: [R, K] fp32    returns: `lra` and `lrb` as in formats/weight.py
    """
    lrb = quantize_factor(v, compensator)
    stored = decode_factor(lrb, v.shape[1])
    fitted = fit_factor((stored @ v.T) @ u.T, stored @ stored.T)
    return quantize_factor(fitted, compensator), lrb


def quantize_factor(factor: Tensor, compensator: str) -> Tensor:
    """Store one factor with signed absmax scales, at 3 bits improved to the scale of least error per group.

    Eq. 13 takes the largest value for the scale; the published code takes it without the absolute value, which gives
    a negative group a wrong scale and is the likely cause of the error surges that the paper mentions.

    factor: [R, L] fp32
    """
    if compensator == "fp16":
        return encode_factor(factor, factor[:, :0], compensator)
    bits = COMPENSATORS[compensator]
    fmt = Format(bits=bits, group=64, symmetric=True)
    groups = factor_groups(factor)
    found = quantize_band(
        groups.flatten(0, 1).contiguous(), fmt, "search" if bits < 8 else "rtn", packed=False
    )
    return encode_factor(factor, found.scales[0].view(groups.shape[:2]), compensator)


def quantize_absmax(factor: Tensor, compensator: str) -> Tensor:
    """Store one factor by eq. 13 alone: 2^b - 1 steps from minus to plus the largest size in a group.

    factor: [R, L] fp32
    """
    groups = factor_groups(factor)
    steps = 2 ** COMPENSATORS[compensator] - 1
    return encode_factor(factor, groups.abs().amax(-1) * 2 / steps, compensator)


def fit_factor(cross: Tensor, gram: Tensor) -> Tensor:
    """The least-squares factor gram^-1 cross [R, L]; ridge-regularised, as small terms may round to zero vectors.

    cross: [R, L] fp32, products of the other factor with the residual    gram: [R, R] fp32, with itself
    """
    gram64 = gram.double()
    ridge = 1e-6 * gram64.diagonal().mean().clamp_min(1e-30)
    regular = gram64 + ridge * torch.eye(len(gram), dtype=torch.float64, device=gram.device)
    fitted: Tensor = torch.linalg.solve(regular, cross.double())
    return fitted.float()
