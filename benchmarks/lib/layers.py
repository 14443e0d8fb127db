"""Layers of random packed experts in the shapes of real models, as the CPU engine takes them."""

from dataclasses import replace

import torch
from torch import Tensor

from trilobite.formats.affine import packed_shape, scale_shape
from trilobite.formats.incoherence import draw_signs
from trilobite.formats.lattice import DIM, LatticeRecord
from trilobite.formats.weight import factor_shape, stored_shapes
from trilobite.huge_pages import ones
from trilobite.kernels.expert_table import Column, metadata_kind
from trilobite.kernels.layer import ExpertsLayer
from trilobite.measure.shapes import DEEPSEEK as ROUTED
from trilobite.measure.shapes import MIXTRAL as MIXTRAL
from trilobite.measure.shapes import ExpertsShape
from trilobite.recipe import COMPENSATORS, Format, LatticeFormat

# Its two shared experts work on every token; as routed ones they cost the same bytes.
DEEPSEEK = replace(ROUTED, active=8)
QWEN3 = ExpertsShape(name="Qwen3-30B-A3B", experts=128, active=8, hidden=2048, intermediate=768)


def fill(part: Tensor, fmt: Format) -> None:
    """Random codes; scales and offsets of an ordinary weight matrix."""
    noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    flat = part.flatten()
    for at in range(0, flat.numel(), noise.numel()):
        piece = flat[at : at + noise.numel()]
        piece.copy_(noise[: piece.numel()])
    if fmt.super_scales:
        return
    codes = fmt.group * fmt.bits * 2
    meta = torch.cat((torch.full((16,), 0.01), torch.full((16,), -0.005 * (2**fmt.bits - 1)))).half()
    part[..., codes:] = meta.view(torch.uint8)


def _fill_factor(part: Tensor) -> None:
    part.random_(0, 256)
    part[..., -2:] = torch.tensor([0.01]).half().view(torch.uint8)


def make_layer(
    layer: ExpertsShape, fmt: Format, rank: int = 0, *, down: Format | None = None
) -> tuple[ExpertsLayer, float]:
    """Random experts as stored, and the bytes of one of them. down: its format, where it is another."""
    h, i = layer.hidden, layer.intermediate
    shapes, formats = ((i, h), (i, h), (h, i)), (fmt, fmt, down or fmt)
    sizes = [torch.Size(packed_shape(f, *s)).numel() for f, s in zip(formats, shapes, strict=True)]
    supers = [torch.Size(scale_shape(f, *s) or (0,)).numel() for f, s in zip(formats, shapes, strict=True)]
    factors = [[torch.Size(factor_shape("int3", rank, m)).numel() for m in shape] for shape in shapes]
    per_expert = sum(sizes) + sum(supers) + sum(map(sum, factors))
    slab = ones(layer.experts * per_expert)  # as models have them
    data = torch.full((layer.experts, 3, len(Column)), -1, dtype=torch.int64)
    at = 0
    for e in range(layer.experts):
        for p, ((n, k), of_part) in enumerate(zip(shapes, formats, strict=True)):
            second = at + sizes[p]
            after = second + supers[p]
            offsets = [at, second if supers[p] else -1, after, after + factors[p][0]]
            fill(slab[at : at + sizes[p]].view(packed_shape(of_part, n, k)), of_part)
            slab[second:after].view(torch.float16).fill_(0.001)
            at = after
            if rank:
                for length, size in zip((n, k), factors[p], strict=True):
                    _fill_factor(slab[at : at + size].view(factor_shape("int3", rank, length)))
                    at += size
            bits = COMPENSATORS["int3"]
            data[e, p, : Column.LATTICE] = torch.tensor(
                [*offsets, rank, bits, of_part.bits, of_part.group, 0, metadata_kind(of_part)]
            )
    return _experts(layer, slab, data), per_expert


def make_lattice_layer(layer: ExpertsShape, fmt: LatticeFormat) -> tuple[ExpertsLayer, float]:
    """As `make_layer`, with random codewords; signs of a side depend on its length alone, as in checkpoints."""
    h, i = layer.hidden, layer.intermediate
    noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    record = LatticeRecord(format=fmt, scale=0.01, second=0.003 if fmt.two_stages else 0.0).to_tensor()
    shapes = [stored_shapes(fmt, n, k) for n, k in ((i, h), (i, h), (h, i))]
    per_expert = sum(torch.Size(s).numel() for parts in shapes for s in parts.values())
    slab = ones(layer.experts * per_expert)  # as models have them
    data = torch.full((layer.experts, 3, len(Column)), -1, dtype=torch.int64)
    at = 0
    for e in range(layer.experts):
        for p, parts in enumerate(shapes):
            row = data[e, p]
            for suffix, shape in parts.items():
                row[Column[suffix.upper()]], size = at, torch.Size(shape).numel()
                part, at = slab[at : at + size], at + size
                if suffix == "packed":
                    for start in range(0, size, noise.numel()):
                        part[start : start + noise.numel()] = noise[: min(noise.numel(), size - start)]
                else:
                    part.copy_(record if suffix == "lattice" else draw_signs(fmt.transform, 8 * size, size))
            row[Column.RANK] = row[Column.RANK_BITS] = row[Column.TUNED] = 0
            row[Column.CODEBOOK] = row[Column.TRANSFORM] = 0
            row[Column.BITS], row[Column.GROUP] = fmt.bits, DIM
    return _experts(layer, slab, data), per_expert


def _experts(layer: ExpertsShape, slab: Tensor, table: Tensor) -> ExpertsLayer:
    return ExpertsLayer(
        slab=slab,
        table=table,
        hidden=layer.hidden,
        intermediate=layer.intermediate,
        activation="silu",
    )


def routing(layer: ExpertsShape, tokens: int) -> tuple[Tensor, Tensor]:
    """Random distinct experts for every token."""
    index = torch.stack([torch.randperm(layer.experts)[: layer.active] for _ in range(tokens)])
    return index, torch.rand(tokens, layer.active)
