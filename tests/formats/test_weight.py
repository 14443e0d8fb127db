from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle

from trilobite.errors import ShapeError
from trilobite.formats import affine
from trilobite.formats.weight import (
    PackedWeight,
    check,
    compensator_of,
    decode_factor,
    dequantize,
    encode_factor,
    factor_groups,
    factor_shape,
    low_rank_bytes,
)
from trilobite.quantize.methods.compensator import quantize_factor, quantize_factors
from trilobite.quantize.methods.registry import quantize
from trilobite.quantize.plan.ranks import weight_bytes
from trilobite.recipe import COMPENSATORS, Format


def weights(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def packed(n: int, k: int, *, rank: int = 0, kind: str = "int3", fmt: str = "int3-g32") -> PackedWeight:
    w = quantize(weights(n, k), Format.parse(fmt), "rtn")
    if not rank:
        return w
    lra, lrb = quantize_factors(weights(n, rank, 1), weights(rank, k, 2), kind)
    return replace(w, lra=lra, lrb=lrb)


def slow_dequantize(w: PackedWeight, bits: int, group: int, compensator_bits: int) -> np.ndarray:
    """dequant(codes) + U V from the specification, the product in float64."""
    n, k = w.shape
    base = oracle.decode(w.packed.numpy(), None, bits=bits, group=group, symmetric=False, shape=w.shape)
    if w.lra is None or w.lrb is None:
        return base
    if compensator_bits == 16:
        u, v = w.lra.float().numpy(), w.lrb.float().numpy()
    else:
        u = oracle.decode_factor(w.lra.numpy(), n, compensator_bits)
        v = oracle.decode_factor(w.lrb.numpy(), k, compensator_bits)
    return base + u.T.astype(np.float64) @ v.astype(np.float64)


@pytest.mark.parametrize("kind", COMPENSATORS)
@pytest.mark.parametrize(("n", "k", "rank"), [(17, 96, 1), (33, 64, 3), (16, 32, 0), (70, 160, 2)])
def test_dequantize_against_the_slow_one(kind: str, n: int, k: int, rank: int) -> None:
    w = packed(n, k, rank=rank, kind=kind)
    check(w)
    assert w.rank == rank
    expected = slow_dequantize(w, 3, 32, COMPENSATORS[kind])
    # A float32 sum of `rank` products.
    assert np.abs(dequantize(w).numpy() - expected).max() <= 1e-6 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("kind", COMPENSATORS)
@pytest.mark.parametrize("part", ["packed", "lra", "lrb"])
def test_one_flipped_bit_is_seen(kind: str, part: str) -> None:
    w = packed(20, 96, rank=2, kind=kind)
    whole = dequantize(w)
    stored = getattr(w, part).clone()
    stored.view(torch.uint8).flatten()[3] ^= 16
    assert not torch.equal(dequantize(replace(w, **{part: stored})), whole)


@pytest.mark.parametrize("kind", ["int3", "int8"])
@given(st.integers(1, 3), st.sampled_from([1, 2, 63, 64, 65, 130]), st.integers(0, 1000))
@settings(deadline=None, max_examples=15)
def test_factors_against_the_slow_ones(kind: str, rank: int, length: int, seed: int) -> None:
    bits = COMPENSATORS[kind]
    factor = weights(rank, length, seed)
    stored = quantize_factor(factor, kind)
    assert stored.shape == factor_shape(kind, rank, length)
    decoded = decode_factor(stored, length)
    assert np.array_equal(decoded.numpy(), oracle.decode_factor(stored.numpy(), length, bits))
    step = factor_groups(factor).abs().amax(-1) / 2 ** (bits - 1)
    error = factor_groups(decoded - factor).abs().amax(-1)
    # Within a step of absmax scaling, and what rounding its scale to fp16 moves the largest code; the search at 3 bits
    # may clip a little more than that.
    assert (error <= step * (1.1 if bits == 8 else 2)).all()


def test_fp16_factors_are_halves() -> None:
    factor = weights(3, 70)
    stored = encode_factor(factor, factor[:, :0], "fp16")
    assert stored.shape == factor_shape("fp16", 3, 70)
    assert torch.equal(decode_factor(stored, 70), factor.half().float())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", ["int3", "int8"])
def test_a_negative_largest_value_keeps_its_size(sign: int, kind: str) -> None:
    """Eq. 13 without the absolute value gives a negative group a wrong scale."""
    factor = -sign * torch.rand(1, 64, generator=torch.Generator().manual_seed(0)) * 0.1
    factor[0, 9] = sign * 5.0
    decoded = decode_factor(quantize_factor(factor, kind), 64)
    assert float(decoded[0, 9]) == pytest.approx(sign * 5.0, rel=0.01)


def test_zero_factors_stay_zero() -> None:
    for kind in COMPENSATORS:
        assert (decode_factor(quantize_factor(torch.zeros(2, 70), kind), 70) == 0).all()


@pytest.mark.parametrize("kind", COMPENSATORS)
@pytest.mark.parametrize(
    "fmt", ["int2-g32", "int3-g32-dq", "int4-g64-sym", "int8-g64-sym-dq", "int3-channel"]
)
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_nbytes_is_predicted(kind: str, fmt: str, rank: int) -> None:
    n, k = 50, 320
    w = packed(n, k, rank=rank, kind=kind, fmt=fmt)
    predicted = weight_bytes(Format.parse(fmt), n, k) + (low_rank_bytes(kind, rank, n, k) if rank else 0)
    assert w.nbytes() == predicted == sum(t.numel() * t.element_size() for t in w.tensors().values())
    assert tuple(w.packed.shape) == affine.packed_shape(Format.parse(fmt), n, k)


def test_three_bits_are_three_bits() -> None:
    """int3 g64 costs 3 + 32/64 bits a weight, and a rank of int3 costs 3 + 16/64 bits a value."""
    n, k, r = 256, 512, 4
    assert packed(n, k, fmt="int3-g64").nbytes() * 8 == n * k * 3.5
    assert low_rank_bytes("int3", r, n, k) * 8 == r * (n + k) * 3.25


def test_tensors_come_in_file_order() -> None:
    assert list(packed(16, 64, rank=1).tensors()) == ["packed", "lra", "lrb"]
    assert list(packed(16, 64, rank=1, fmt="int3-g32-dq").tensors()) == ["packed", "scale", "lra", "lrb"]


def test_compensator_formats_are_told_apart() -> None:
    for kind in COMPENSATORS:
        assert compensator_of(quantize_factor(weights(2, 100), kind)) == kind
    with pytest.raises(ShapeError, match="no known format"):
        compensator_of(torch.zeros(2, 2, 27, dtype=torch.uint8))
    with pytest.raises(ShapeError, match="no known format"):
        compensator_of(torch.zeros(2, 100))


WHOLE = packed(40, 128, rank=3, fmt="int3-g32-dq")
FAULTS = {
    "a band too few": {"packed": WHOLE.packed[:-1]},
    "a group too few": {"packed": WHOLE.packed[:, :-1]},
    "a byte too few": {"packed": WHOLE.packed[..., :-1]},
    "two dimensions": {"packed": WHOLE.packed.flatten(1)},
    "codes as int8": {"packed": WHOLE.packed.view(torch.int8)},
    "codes as floats": {"packed": WHOLE.packed.float()},
    "a band of scales too few": {"scale": WHOLE.scale[:-1]},
    "half a pair": {"scale": WHOLE.scale[..., :8]},
    "scales as floats": {"scale": WHOLE.scale.float()},
    "U alone": {"lrb": None},
    "V alone": {"lra": None},
    "ranks that differ": {"lra": WHOLE.lra[:2]},
    "U truncated": {"lra": torch.cat((WHOLE.lra, WHOLE.lra), 1)},
    "V truncated": {"lrb": WHOLE.lrb[:, :-1]},
    "V of another kind": {"lrb": quantize_factor(weights(3, 128), "int8")},
    "V as fp16": {"lrb": weights(3, 128).half()},
    "U as fp32": {"lra": weights(3, 40)},
    "another K": {"shape": (40, 256)},
    "another N": {"shape": (50, 128)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parts_that_do_not_fit_are_refused(fault: str) -> None:
    check(WHOLE)
    with pytest.raises(ShapeError) as e:
        check(replace(WHOLE, **FAULTS[fault]), "layers.0.q_proj")
    assert str(e.value).startswith("layers.0.q_proj: ")
    assert str(e.value).count("q_proj") == 1
    assert "\n" not in str(e.value)


def test_a_missing_second_level_is_refused_where_the_tile_shows_it() -> None:
    """Without `scale` an asymmetric double quantized tile has the size of a symmetric plain one: the index of
    the checkpoint has to notice (test_runtime.py)."""
    w = packed(40, 128, fmt="int3-g32-sym-dq")
    with pytest.raises(ShapeError, match="no known format"):
        check(replace(w, scale=None))


def test_fp16_factor_beside_a_float32_one_is_refused() -> None:
    w = packed(40, 128, rank=3, kind="fp16")
    check(w)
    with pytest.raises(ShapeError):
        check(replace(w, lrb=w.lrb.float()))


def test_second_level_scales_need_no_alignment() -> None:
    """Parts follow each other in a file without padding."""
    assert WHOLE.scale is not None
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), WHOLE.scale.flatten()))[1:].view_as(WHOLE.scale)
    assert shifted.data_ptr() % 4
    assert torch.equal(dequantize(replace(WHOLE, scale=shifted)), dequantize(WHOLE))
