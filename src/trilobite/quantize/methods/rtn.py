"""Round to nearest on the min-max grid: the baseline every other method starts from."""

import torch
from torch import Tensor

from trilobite.recipe import Format


def rtn(groups: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    """Scale and offset that map each group's range onto all codes (MiLo eq. 2-3 before optimisation).

    groups: [M, G] fp32    returns: scale [M], offset [M] or None for a symmetric format
    A symmetric group's largest value, with its sign, maps to code 0, the one code without a mirror image.
    """
    low, high = groups.amin(-1), groups.amax(-1)
    if fmt.symmetric:
        return torch.where(-low >= high, -low, -high) / 2 ** (fmt.bits - 1), None
    return (high - low) / (2**fmt.bits - 1), low
