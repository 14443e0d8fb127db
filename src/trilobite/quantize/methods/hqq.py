"""Half-quadratic zero points: MiLo's subproblem 1 (eq. 4-9), after Badri & Shaji 2023."""

import torch
from torch import Tensor

from trilobite.quantize.methods.rtn import rtn
from trilobite.recipe import Format

P = 0.7
"""Exponent of the l_p loss (eq. 4)."""
BETA = 10.0
KAPPA = 1.01
"""Weight of the quadratic term and its growth per iteration."""
ITERATIONS = 20


def hqq(groups: Tensor, fmt: Format, *, published: bool = False) -> tuple[Tensor, Tensor | None]:
    """The min-max scale, and the offset that minimises the l_p loss of the rounding error.

    Alternates M = shrink(W - W_dq) (eq. 6-7) and the zero point z = mean(W_q - (W - M) / s) (eq. 8-9) as published,
    with two repairs. Groups are divided by their standard deviation first: eq. 7 shrinks to exactly zero every error
    below beta**(-1/(2-p)) = 0.17, and real weights (sigma near 0.02) never reach that. And each group keeps its best
    iterate, where the published code returns the last.

    published: without both, `hqq-paper` in recipes
    groups: [M, G] fp32    returns: scale [M], offset [M]; a symmetric format has no zero point and stays as rtn
    """
    scale, offset = rtn(groups, fmt)
    if offset is None:
        return scale, None
    sigma = groups.std(-1, unbiased=False).clamp_min(1e-30)
    if published:
        sigma = torch.ones_like(sigma)
    # Measured from the lowest weight, where z is 0: far from zero, z would be large and rounding would eat the codes.
    w = (groups - offset[:, None]) / sigma[:, None]
    s = (scale / sigma).clamp_min(1e-30)[:, None]
    z = torch.zeros_like(s)
    top, beta = 2**fmt.bits - 1, BETA
    best_loss, best_z = torch.full_like(sigma, torch.inf), z
    for step in range(ITERATIONS + 1):
        codes = (w / s + z).round_().clamp_(0, top)
        error = w - (codes - z) * s
        size = error.abs().clamp_min_(1e-12)
        power = size.pow(P - 1)
        loss = (size * power).sum(-1)
        better = (loss < best_loss) | published
        best_loss = torch.where(better, loss, best_loss)
        best_z = torch.where(better[:, None], z, best_z)
        if step == ITERATIONS:
            break
        m = error.sign() * (size - power / beta).clamp_min_(0)
        z = (codes - (w - m) / s).mean(-1, keepdim=True)
        beta *= KAPPA
    return scale, offset - best_z[:, 0] * scale
