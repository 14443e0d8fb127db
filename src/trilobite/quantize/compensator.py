"""Quantize a compensator: symmetric codes, V first, then U fitted to the stored V."""

import torch
from torch import Tensor

from trilobite.formats.weight import decode_factor, encode_factor, factor_groups
from trilobite.quantize.rtn import rtn
from trilobite.quantize.search import search
from trilobite.recipe import COMPENSATORS, Format


def quantize_factors(u: Tensor, v: Tensor, compensator: str) -> tuple[Tensor, Tensor]:
    """Store both factors (MiLo section 3.2.5), U after a least-squares fit that makes up for the rounding of V.

    u: [N, R] fp32    v: [R, K] fp32    returns: `lra` and `lrb` as in formats/weight.py
    """
    lrb = quantize_factor(v, compensator)
    stored = decode_factor(lrb, v.shape[1])
    return quantize_factor(_fit_left(u, v, stored).T.contiguous(), compensator), lrb


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
    scale, _ = (search if bits < 8 else rtn)(groups.flatten(0, 1), fmt)
    return encode_factor(factor, scale.view(groups.shape[:2]), compensator)


def _fit_left(u: Tensor, v: Tensor, stored: Tensor) -> Tensor:
    """The U' [N, R] of least |U V - U' V_stored|_F; ridge-regularised, as small terms may round to zero vectors."""
    gram = (stored @ stored.T).double()
    ridge = 1e-6 * gram.diagonal().mean().clamp_min(1e-30)
    gram.diagonal().add_(ridge)
    cross = (stored @ v.T).double()
    fit: Tensor = torch.linalg.solve(gram, cross)
    return u @ fit.T.float()
