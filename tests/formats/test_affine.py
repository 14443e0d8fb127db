import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle

from trilobite.errors import ShapeError, WeightError
from trilobite.formats import affine
from trilobite.quantize.methods.registry import quantize
from trilobite.recipe import Format, is_group

BITS = (2, 3, 4, 8)
FORMATS = [
    Format(bits=b, group=g, symmetric=s, double_quant=d)
    for b in BITS
    for g in (16, 32, 64, 128, 0)
    for s in (False, True)
    for d in (False, True)
    if b != 3 or g != 16
]


def weights(n: int, k: int, *, seed: int = 0, sigma: float = 0.02) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * sigma


def random_tiles(fmt: Format, n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Arbitrary code bytes with sensible metadata: what no encoder makes, but a decoder must read."""
    rng = np.random.default_rng(seed)
    bands, groups, tile = affine.packed_shape(fmt, n, k)
    packed = rng.integers(0, 256, (bands, groups, tile), dtype=np.uint8)
    second = affine.scale_shape(fmt, n, k)
    if second is None:
        meta = 16 if fmt.symmetric else 32
        packed[..., -2 * meta :] = rng.normal(size=(bands, groups, meta)).astype(np.float16).view(np.uint8)
        return torch.from_numpy(packed), None
    pairs = rng.normal(size=(*second[:2], second[2] // 4)).astype(np.float32)
    return torch.from_numpy(packed), torch.from_numpy(pairs.view(np.uint8))


@given(
    st.sampled_from([f for f in FORMATS if f.group in (16, 32, 64)]),
    st.sampled_from([1, 15, 16, 17, 33]),
    st.sampled_from([1, 2, 9]),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=25)
def test_decode_is_what_the_specification_says(fmt: Format, n: int, groups: int, seed: int) -> None:
    k = groups * max(fmt.group, 32)
    packed, scale = random_tiles(fmt, n, k, seed)
    expected = oracle.decode(
        packed.numpy(),
        None if scale is None else scale.numpy(),
        bits=fmt.bits,
        group=fmt.group,
        symmetric=fmt.symmetric,
        shape=(n, k),
    )
    assert np.array_equal(affine.decode(packed, scale, fmt, (n, k)).numpy(), expected)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("n", [1, 17])
def test_round_trip_of_values_on_the_grid(fmt: Format, n: int) -> None:
    """Rounding decoded weights again finds the same codes: encode and decode agree on what the codes mean."""
    k = 256
    w = quantize(weights(n, k), fmt, "rtn")
    decoded = affine.decode(w.packed, w.scale, fmt, (n, k))
    groups = k // fmt.group_size(k)
    split = fmt.group_size(k) * 2 * fmt.bits
    step, base = affine.read_metadata(w.packed[..., split:], w.scale, fmt)
    line = (t.permute(0, 2, 1).reshape(-1, groups)[:n] for t in (step, base))
    grid = affine.Grid(scale=next(line), offset=next(line), stored=w.packed[..., split:], super=w.scale)
    again = affine.encode(affine.round_to_grid(decoded, grid, fmt), grid, fmt)
    assert torch.equal(affine.decode(again, w.scale, fmt, (n, k)), decoded)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_error_is_at_most_half_a_step(fmt: Format) -> None:
    k = 256
    w = weights(33, k)
    packed = quantize(w, fmt, "rtn")
    decoded = affine.decode(packed.packed, packed.scale, fmt, (33, k))
    group = w.view(33, -1, fmt.group_size(k))
    if fmt.symmetric:
        step = group.abs().amax(-1) / 2 ** (fmt.bits - 1)
        # The code that has no mirror image belongs to the largest weight: the other side ends a step earlier.
        slack = 1.0
    else:
        step = (group.amax(-1) - group.amin(-1)) / (2**fmt.bits - 1)
        slack = 0.5
    error = (decoded - w).abs().view_as(group).amax(-1)
    metadata = group.abs().amax(-1) * (0.012 if fmt.double_quant else 0.001) * (4 if fmt.bits == 8 else 2)
    assert (error <= slack * step + metadata).all()


def test_tile_sizes_by_hand() -> None:
    by_hand = {
        "int3-g64": 64 * 16 * 3 // 8 + 64,
        "int3-g64-sym": 64 * 16 * 3 // 8 + 32,
        "int3-g64-dq": 64 * 16 * 3 // 8 + 32,
        "int3-g64-sym-dq": 64 * 16 * 3 // 8 + 16,
        "int2-g32": 32 * 16 * 2 // 8 + 64,
        "int8-g128": 128 * 16 + 64,
        "int4-channel": 256 * 16 // 2 + 64,
    }
    for text, size in by_hand.items():
        assert affine.packed_shape(Format.parse(text), 33, 256) == (
            3,
            256 // Format.parse(text).group_size(256),
            size,
        )


@pytest.mark.parametrize(("bits", "values"), [(4, 256), (3, 128), (2, 128), (8, 256)])
def test_double_quantization_shares_a_scale_among(bits: int, values: int) -> None:
    """256 / 128 / 128 first-level scales for 4 / 3 / 2 bits, as in the offloading paper."""
    fmt = Format(bits=bits, group=32, double_quant=True)
    groups = values // 16
    assert affine.supergroup(fmt) * 16 == values
    assert affine.scale_shape(fmt, 16, 32 * groups) == (1, 1, 16)
    assert affine.scale_shape(fmt, 17, 32 * (groups + 1)) == (2, 2, 16)
    k = 32 * groups * 2
    w = quantize(weights(16, k), fmt, "rtn")
    assert w.scale is not None
    broken = w.scale.clone()
    broken[0, 1].view(torch.float32)[0] *= 2
    changed = affine.decode(w.packed, broken, fmt, (16, k)) != affine.decode(w.packed, w.scale, fmt, (16, k))
    assert not changed[:, : k // 2].any()
    assert changed[:, k // 2 :].any(1).all()


def test_every_tile_size_belongs_to_one_format() -> None:
    for group in (16, *range(32, 4097, 32)):
        for double in (False, True):
            sizes = [
                affine.tile_bytes(Format(bits=b, group=group, symmetric=s, double_quant=double), group)
                for b in BITS
                for s in (False, True)
                if is_group(group, b)
            ]
            assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("k", [128, 384])
def test_format_is_read_off_the_shapes(fmt: Format, k: int) -> None:
    w = quantize(weights(5, k), fmt, "rtn")
    found = affine.format_of(tuple(w.packed.shape), None if w.scale is None else tuple(w.scale.shape), k)
    assert (found.bits, found.group_size(k), found.symmetric, found.double_quant) == (
        fmt.bits,
        fmt.group_size(k),
        fmt.symmetric,
        fmt.double_quant,
    )


@pytest.mark.parametrize(
    "shape", [(1, 2), (1, 0, 448), (1, 3, 448), (1, 2, 447), (1, 2, 449), (1, 2, 0), (1, 4, 448)]
)
def test_shapes_of_no_format_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError):
        affine.format_of(shape, None, 128)


@pytest.mark.parametrize(("group", "k"), [(64, 96), (128, 64), (0, 48), (48, 96)])
def test_groups_that_do_not_divide_are_refused(group: int, k: int) -> None:
    with pytest.raises(ShapeError, match=f"K={k}"):
        affine.packed_shape(Format(bits=3, group=group), 16, k)


def test_rows_past_the_end_are_zero() -> None:
    for fmt in FORMATS[:4]:
        w = quantize(weights(17, 64), Format(bits=fmt.bits, group=32, symmetric=fmt.symmetric), "rtn")
        assert (affine.decode(w.packed, None, w.format, (32, 64))[17:] == 0).all()


@pytest.mark.parametrize("bad", [7e4, float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["scale", "offset"])
def test_metadata_beyond_fp16_is_refused(bad: float, where: str) -> None:
    scale, offset = torch.zeros(4, 2), torch.zeros(4, 2)
    (scale if where == "scale" else offset)[2, 1] = bad
    with pytest.raises(WeightError, match="out of range"):
        affine.make_grid(scale, offset, Format(bits=3, group=32))


def test_double_quantized_scales_stay_within_a_255th_of_their_range() -> None:
    fmt = Format(bits=3, group=32, double_quant=True)
    scale, offset = weights(40, 12, seed=1).abs(), weights(40, 12, seed=2)
    grid = affine.make_grid(scale, offset, fmt)
    for stored, wanted in ((grid.scale, scale), (grid.offset, offset)):
        assert float((stored - wanted).abs().max()) <= float(wanted.max() - wanted.min()) / 255 / 2 * 1.01


def test_flipping_any_code_bit_changes_one_weight() -> None:
    w = quantize(weights(16, 32), Format(bits=3, group=32), "rtn")
    decoded = affine.decode(w.packed, None, w.format, (16, 32))
    for byte in range(0, 192, 7):
        broken = w.packed.clone()
        broken[0, 0, byte] ^= 1 << byte % 8
        assert int((affine.decode(broken, None, w.format, (16, 32)) != decoded).sum()) == 1


def test_a_zeroed_tile_changes_its_weights_and_no_other() -> None:
    w = quantize(weights(48, 128), Format(bits=3, group=64), "rtn")
    broken = w.packed.clone()
    broken[1, 0] = 0
    changed = affine.decode(broken, None, w.format, (48, 128)) != affine.decode(
        w.packed, None, w.format, (48, 128)
    )
    assert changed[16:32, :64].float().mean() > 0.99
    changed[16:32, :64] = False
    assert not changed.any()
