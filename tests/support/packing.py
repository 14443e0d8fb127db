"""Random packed weights for tests of the kernels, min-max lines on Gaussian matrices; and layers of experts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trilobite.formats import affine, lattice
from trilobite.formats.incoherence import draw_signs, store_signs
from trilobite.formats.weight import PackedWeight, encode_factor, factor_groups
from trilobite.kernels import ops
from trilobite.kernels.expert_table import DOWN, build
from trilobite.kernels.layer import ExpertsLayer
from trilobite.recipe import Format, LatticeFormat, parse_format

ABSMAX_CODE = {"int3": 3, "int8": 127, "fp16": 1}


def factor(rank: int, length: int, kind: str, generator: torch.Generator) -> Tensor:
    """A random stored compensator factor."""
    values = torch.randn(rank, length, generator=generator) * 0.05
    return encode_factor(values, factor_groups(values).abs().amax(-1) / ABSMAX_CODE[kind], kind)


def packed_weight(
    n: int, k: int, fmt: Format | str, *, rank: int = 0, kind: str = "int3", seed: int = 0, zeros: int = 0
) -> PackedWeight:
    """A random packed weight [n, k]. zeros: every so many columns one has no weights; 0 = none has."""
    fmt = Format.parse(fmt) if isinstance(fmt, str) else fmt
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=generator) * 0.05
    if zeros:
        w[:, ::zeros] = 0
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


def lattice_weight(
    n: int, k: int, name: str = "e8p-2", *, seed: int = 0, rank: int = 0, tuned: bool = False
) -> PackedWeight:
    """Random codewords, so that all entries of the codebooks are met; signs of a side depend on its length alone."""
    fmt = parse_format(name)
    assert isinstance(fmt, LatticeFormat)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << 8 * fmt.bits, (n, k // 8), generator=generator)
    record = lattice.LatticeRecord(format=fmt, scale=0.037, second=0.011 if fmt.two_stages else 0.0)
    signs_in, signs_out = draw_signs("hadamard", k, k), draw_signs("hadamard", n, n + 1)
    if tuned:
        signs_in, signs_out = (store_signs(1 + torch.randn(m, generator=generator) / 4) for m in (k, n))
    return PackedWeight(
        shape=(n, k),
        packed=lattice.pack(codes, fmt),
        lattice=record.to_tensor(),
        signs_in=signs_in,
        signs_out=signs_out,
        lra=factor(rank, n, "int3", generator) if rank else None,
        lrb=factor(rank, k, "int3", generator) if rank else None,
    )


Experts = Sequence[tuple[PackedWeight | None, PackedWeight, PackedWeight]]


def stored_layer(
    weights: Experts,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> ExpertsLayer:
    """(gate, up, down) of every expert as the operator takes them."""
    slab, table = build(weights)
    hidden, intermediate = weights[0][DOWN].shape
    return ExpertsLayer(
        slab=slab,
        table=table,
        hidden=hidden,
        intermediate=intermediate,
        activation=activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


def gpu_layer(
    weights: Experts,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> ExpertsLayer:
    """The same in the GPU layout."""
    pack = ops.repack(weights)
    hidden, intermediate = pack.shapes[DOWN]
    return ExpertsLayer(
        slab=pack.slab,
        table=pack.table,
        codings=pack.codings,
        hidden=hidden,
        intermediate=intermediate,
        activation=activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
