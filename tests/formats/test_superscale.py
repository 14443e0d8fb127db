"""Scales of 4 bits under super-scales: bytes, what they mean, and how they are found."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle_super
from support.golden import make, make_super
from support.packing import packed_weight
from support.paths import ROOT
from torch import Tensor

from trilobite.errors import RecipeError, ShapeError, WeightError
from trilobite.formats import affine, superscale
from trilobite.formats.weight import PackedWeight, check, dequantize, stored_shapes
from trilobite.quantize.methods.refine import refined
from trilobite.quantize.methods.registry import quantize
from trilobite.recipe import Format

GOLDEN = json.loads((ROOT / "tests/support/golden/v1-super.json").read_text())
FORMATS = [Format(bits=b, group=g, super_scales=True) for b in (2, 3, 4) for g in (16, 32)]


def weights(n: int, k: int, *, seed: int = 0, sigma: float = 0.02) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * sigma


def golden_weight(case: dict) -> PackedWeight:
    packed, scale = (torch.from_numpy(make.unpack(case[part])) for part in ("packed", "scale"))
    return PackedWeight(shape=tuple(case["shape"]), packed=packed, scale=scale)


def test_golden_bytes_are_what_the_specification_says() -> None:
    assert make_super.cases() == GOLDEN


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['format']} {c['shape']}")
def test_golden_bytes_decode_to_the_golden_values(case: dict) -> None:
    w = golden_weight(case)
    assert str(w.format) == case["format"]
    check(w)
    assert np.array_equal(dequantize(w).numpy(), make.unpack(case["values"]))


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['format']} {c['shape']}")
def test_golden_values_encode_to_the_golden_bytes(case: dict) -> None:
    w, codes = golden_weight(case), torch.from_numpy(make.unpack(case["codes"]))
    fmt, (n, _) = w.format, w.shape
    assert isinstance(fmt, Format)
    assert w.scale is not None
    stored, supers = superscale.stored_parts(w.packed[..., affine.code_bytes(fmt, w.shape[1]) :], w.scale)
    rows = [part.transpose(1, 2).reshape(-1, part.shape[1])[:n] for part in (stored, supers)]
    grid = affine.super_grid(*superscale.split(rows[0]), rows[1].float() / 128, fmt)
    assert torch.equal(affine.encode(codes, grid, fmt), w.packed)
    assert grid.super is not None
    assert torch.equal(grid.super, w.scale)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['format']} {c['shape']}")
def test_every_part_of_the_metadata_matters(case: dict) -> None:
    """A flipped bit of a group's byte changes that group; a lost super-scale changes its span; nothing else."""
    w = golden_weight(case)
    fmt, (_, k) = w.format, w.shape
    assert isinstance(fmt, Format)
    assert w.scale is not None
    before = dequantize(w)
    broken = w.packed.clone()
    broken[0, -1, -1 - 13 * (affine.tile_columns(fmt, k) // fmt.group)] ^= 0x10  # row 2, last group
    changed = dequantize(PackedWeight(shape=w.shape, packed=broken, scale=w.scale)) != before
    assert changed[2, k - fmt.group :].all()
    assert int(changed.sum()) == fmt.group
    scale = w.scale.clone()
    scale[0, -1, 2:4] = 0
    changed = dequantize(PackedWeight(shape=w.shape, packed=w.packed, scale=scale)) != before
    assert int(changed.sum()) == int((before[1, (k - 1) // 256 * 256 :] != 0).sum()) > 0


@given(
    st.sampled_from(FORMATS), st.sampled_from([1, 15, 16, 17, 33]), st.integers(1, 18), st.integers(0, 1000)
)
@settings(deadline=None, max_examples=20)
def test_what_is_stored_decodes_as_the_specification_says(
    fmt: Format, n: int, blocks: int, seed: int
) -> None:
    k = 32 * blocks
    w = packed_weight(n, k, fmt, seed=seed)
    check(w)
    assert w.format == fmt
    assert w.scale is not None
    expected = oracle_super.decode(
        w.packed.numpy(), w.scale.numpy(), bits=fmt.bits, group=fmt.group, shape=(n, k)
    )
    assert np.array_equal(dequantize(w).numpy(), expected)


@given(
    st.sampled_from(FORMATS),
    st.sampled_from(["rtn", "search"]),
    st.sampled_from([0.0, 1e-9, 1e-4, 1.0, 300.0]),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=25)
def test_no_code_counts_more_than_a_byte(fmt: Format, method: str, skew: float, seed: int) -> None:
    """Whatever the weights: shifted, of very different size within a span, zero."""
    w = weights(5, 320, seed=seed)
    w[0] += skew
    w[1] -= skew
    w[2, 32:] *= skew
    w[3] = 0
    q = quantize(w, fmt, method)
    assert q.scale is not None
    stored, _ = superscale.stored_parts(q.packed[..., affine.code_bytes(fmt, 320) :], q.scale)
    s, o = superscale.split(stored)
    assert float((s * (2**fmt.bits - 1) + superscale.UNITS[fmt.bits] * o).max()) <= 254
    decoded = dequantize(q)
    assert decoded.isfinite().all()
    assert (decoded[3] == 0).all()
    span = w[:, :256].abs().amax(1)
    assert ((decoded - w)[:, :256].abs().amax(1) <= 0.6 * span).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_search_wins_against_the_nearest_grid_and_against_groups_of_64(fmt: Format) -> None:
    w = weights(64, 512)
    w[:, ::37] *= 6
    nearest, found = (float((dequantize(quantize(w, fmt, m)) - w).norm()) for m in ("rtn", "search"))
    plain = float((dequantize(quantize(w, Format(bits=fmt.bits, group=64), "search")) - w).norm())
    assert found < 0.97 * nearest
    if fmt.group == 16 or fmt.bits == 2:  # coarse scales cost 4 bits in groups of 32 what these win
        assert found < 0.95 * plain


def test_costs_of_columns_move_the_error_to_cheap_ones() -> None:
    w, fmt = weights(16, 256), FORMATS[2]
    cost = torch.ones(256)
    cost[:8] = 100
    scale, offset = (t.view(16, -1) for t in _lines(w, fmt))
    errors = []
    for costs in (None, cost):
        grid = refined(w, scale, offset, fmt, weight=costs)
        codes = affine.round_to_grid(w, grid, fmt)
        decoded = affine.decode(affine.encode(codes, grid, fmt), grid.super, fmt, (16, 256))
        errors.append(float((decoded - w)[:, :8].norm()))
    assert errors[1] < 0.8 * errors[0]


def _lines(w: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    groups = w.reshape(-1, fmt.group)
    low, high = groups.amin(-1), groups.amax(-1)
    return (high - low) / (2**fmt.bits - 1), low


@pytest.mark.parametrize("k", [32, 64, 96, 128, 704, 1408, 4096])
def test_bytes_by_hand(k: int) -> None:
    for fmt in FORMATS:
        shapes = stored_shapes(fmt, 33, k)
        total = sum(math.prod(shape) for shape in shapes.values())
        assert total == 48 * k * fmt.bits // 8 + 48 * k // fmt.group + 48 * 2 * -(-k // 256)
        assert affine.format_of(shapes["packed"], shapes["scale"], k) == fmt
    # 3 bits, half a bit of scales, a sixteenth of super-scales.
    assert (
        math.prod(stored_shapes(FORMATS[2], 16, 4096)["packed"]) * 8
        + math.prod(stored_shapes(FORMATS[2], 16, 4096)["scale"]) * 8
        == 3.5625 * 16 * 4096
    )


def test_no_two_formats_have_tiles_of_one_size() -> None:
    for k in (96, 256):
        assert len({stored_shapes(fmt, 16, k)["packed"] for fmt in FORMATS}) == len(FORMATS)


@pytest.mark.parametrize("k", [16, 48, 100])
def test_columns_that_do_not_fill_a_block_are_refused(k: int) -> None:
    with pytest.raises(ShapeError, match=f"K={k}"):
        affine.packed_shape(FORMATS[0], 16, k)


@pytest.mark.parametrize(
    "text", ["int8-g16-super", "int3-g64-super", "int3-g16-sym-super", "int3-channel-super"]
)
def test_formats_that_there_are_not(text: str) -> None:
    with pytest.raises(RecipeError, match=r"int\{2,3,4\}-\{g16,g32\}-super"):
        Format.parse(text)


def test_names_and_wider_formats() -> None:
    for fmt in FORMATS:
        assert Format.parse(str(fmt)) == fmt
    assert str(FORMATS[2].with_bits(4)) == "int4-g16-super"
    assert str(FORMATS[2].with_bits(8)) == "int8-g16"


@pytest.mark.parametrize("method", ["rtn", "search"])
def test_weights_beyond_fp16_are_refused(method: str) -> None:
    with pytest.raises(WeightError):
        quantize(weights(4, 64) * 1e7, FORMATS[2], method)
