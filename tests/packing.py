"""Random packed weights for tests of the kernels: min-max lines on Gaussian matrices."""

import torch
from torch import Tensor

from trilobite.formats import affine
from trilobite.formats.weight import PackedWeight, encode_factor, factor_groups
from trilobite.recipe import Format

ABSMAX_CODE = {"int3": 3, "int8": 127, "fp16": 1}


def factor(rank: int, length: int, kind: str, generator: torch.Generator) -> Tensor:
    """A random stored compensator factor."""
    values = torch.randn(rank, length, generator=generator) * 0.05
    return encode_factor(values, factor_groups(values).abs().amax(-1) / ABSMAX_CODE[kind], kind)


def packed_weight(
    n: int, k: int, fmt: Format | str, *, rank: int = 0, kind: str = "int3", seed: int = 0
) -> PackedWeight:
    """A random packed weight [n, k]."""
    fmt = Format.parse(fmt) if isinstance(fmt, str) else fmt
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=generator) * 0.05
    groups = w.view(n, -1, fmt.group_size(k))
    low, high = groups.amin(-1), groups.amax(-1)
    if fmt.symmetric:
        grid = affine.make_grid(groups.abs().amax(-1) / 2 ** (fmt.bits - 1), None, fmt)
    else:
        grid = affine.make_grid((high - low) / (2**fmt.bits - 1), low, fmt)
    tiles = affine.encode(affine.round_to_grid(w, grid, fmt), grid, fmt)
    lra = factor(rank, n, kind, generator) if rank else None
    lrb = factor(rank, k, kind, generator) if rank else None
    return PackedWeight(shape=(n, k), packed=tiles, scale=grid.super, lra=lra, lrb=lrb)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
