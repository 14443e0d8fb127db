"""The CPU engine against the reference, on every instruction-set tier that this machine has."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packing import packed_weight, relative_error, stored_layer
from support.tiers import tiers

from trilobite.errors import SettingError, ShapeError
from trilobite.formats.weight import PackedWeight
from trilobite.kernels import ops, reference
from trilobite.kernels.activation import NUMBERS, spell, split
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.expert_table import Column
from trilobite.kernels.layer import CpuSettings, ExpertsLayer
from trilobite.recipe import Format

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the native library is not installed")

# fp32 sums in another order, and 2**-22 of a segment's largest activation.
EXACT = 3e-6
# One rounding of the result to its own type (8 or 11 significant bits), where the reference rounds at times the
# other way; intermediate results of 16-bit inputs keep at least 16 bits.
ROUNDED = {torch.float32: EXACT, torch.float16: 6e-4, torch.bfloat16: 5e-3}


@pytest.fixture(params=tiers())
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    yield cpu.set_tier(request.param)
    cpu.set_tier(os.environ.get("TRILOBITE_ISA"))


def _x(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _linear_error(w: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    return relative_error(ops.linear(x, w, bias), reference.linear(x, w, bias))


def _rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


FORMATS = [
    *(f"int{b}-{g}" for b in (2, 3, 4, 8) for g in ("g32", "g64", "g96", "g128", "channel")),
    *(f"int{b}-{g}-sym" for b in (2, 3, 4, 8) for g in ("g64", "g96")),
    *(f"int{b}-{g}-dq" for b in (2, 3, 4, 8) for g in ("g32", "g64", "channel")),
    *(f"int{b}-g16{suffix}" for b in (2, 4, 8) for suffix in ("", "-sym", "-dq", "-sym-dq")),
    *(f"int{b}-{g}-super" for b in (2, 3, 4) for g in ("g16", "g32")),
    "int3-g64-sym-dq",
    "int4-g32-sym-dq",
]


@pytest.mark.parametrize("fmt", FORMATS)
def test_linear_of_every_format(tier: str, fmt: str) -> None:
    w = packed_weight(50, 1152, fmt)  # the last band is partial; 1152 has groups of 32, 64, 96 and 128
    for tokens in (1, 3, 21):
        assert _linear_error(w, _x(tokens, 1152)) < EXACT
    # Bands of whole units, which one token reads apart from each other.
    assert _linear_error(packed_weight(192, 1152, fmt), _x(1, 1152)) < EXACT


@pytest.mark.parametrize("dtype", list(ROUNDED), ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 9, 16, 17, 33])
def test_linear_of_every_type(tier: str, dtype: torch.dtype, tokens: int) -> None:
    for fmt in ("int3-g64", "int2-g16-dq", "int3-g16-super"):
        w = packed_weight(80, 320, fmt)
        assert _linear_error(w, _x(tokens, 320, dtype=dtype), _x(80, dtype=dtype, seed=2)) < ROUNDED[dtype]


@pytest.mark.parametrize("tokens", [1, 3, 6, 40])
def test_nothing_of_a_bfloat16_number_is_lost(tier: str, tokens: int) -> None:
    """But for the rounding of the result, which ends differently only where it is a close call."""
    for fmt in ("int3-g64", "int8-g32", "int4-g32-super"):
        w, x = packed_weight(64, 320, fmt), _x(tokens, 320, dtype=torch.bfloat16)
        expected = reference.linear(x.float(), w).bfloat16()
        assert (ops.linear(x, w) != expected).float().mean() < 2e-3


@pytest.mark.parametrize("share", [0.03, 0.08, 0.3])
@pytest.mark.parametrize("tokens", [4, 7, 17, 67])
def test_nor_of_small_ones_beside_large_ones(tier: str, tokens: int, share: float) -> None:
    """They have lowest digits, in a few columns or in many; weights of the large ones are zero, so that this is seen."""
    some = torch.rand(tokens, 384, generator=torch.Generator().manual_seed(3)) < share
    x = torch.where(some, _x(tokens, 384) * 2**-11, 0.0)
    x[:, ::32] = 1.5
    for fmt in ("int8-g64-sym", "int8-g32-sym", "int8-g96-sym", "int4-g64-sym", "int3-g32-sym"):
        assert _linear_error(packed_weight(80, 384, fmt, zeros=32), x.bfloat16()) < ROUNDED[torch.bfloat16]


@pytest.mark.parametrize("tokens", [1, 3, 7])
@pytest.mark.parametrize("sign", [-1, 1])
def test_every_largest_number_fits_its_digits(tier: str, sign: int, tokens: int) -> None:
    """Three digits reach 8355711, which is 1.99215... times 2**22: the scale of what is larger is twice as much."""
    largest = 8355711 / 2**22
    for top in (1.0, largest, largest + 2**-23, largest + 2**-22, 255 / 128, 2 - 2**-23):
        x = _x(tokens, 128) / 8
        x[:, 7], x[:, 100] = sign * top, sign * top * 2**-20
        for fmt in ("int3-g64", "int4-g32", "int8-g64", "int3-g16-super"):
            assert _linear_error(packed_weight(48, 128, fmt), x) < EXACT


@pytest.mark.parametrize("small", [0.01, 0.2, 1.0])
@pytest.mark.parametrize("tokens", [2, 3, 7, 40])
def test_few_of_a_segments_numbers_need_the_lowest_digit(tier: str, tokens: int, small: float) -> None:
    """In none, some, or most steps of a segment: bfloat16 numbers as fp32, so that the result is not rounded."""
    for fmt in ("int3-g64", "int4-g32", "int4-g64", "int2-g96"):
        x = _x(tokens, 384)
        x *= torch.where(_x(tokens, 384, seed=2) < 1.5, 1.0, small)
        x[tokens // 2, 64:128] = torch.logspace(0, -9, 64)
        assert _linear_error(packed_weight(80, 384, fmt), x.bfloat16().float()) < EXACT


@pytest.mark.parametrize(
    ("rank", "kind"), [(1, "int3"), (5, "int3"), (16, "int8"), (37, "int3"), (3, "fp16")]
)
@pytest.mark.parametrize(
    ("k", "fmt"), [(96, "int3-g32"), (256, "int3-g32"), (96, "int2-g16"), (96, "int3-g16-super")]
)
def test_linear_with_a_compensator(tier: str, rank: int, kind: str, k: int, fmt: str) -> None:
    w = packed_weight(72, k, fmt, rank=rank, kind=kind)
    plain = PackedWeight(shape=w.shape, packed=w.packed, scale=w.scale)
    for tokens in (1, 7, 40):
        x = _x(tokens, k)
        assert _linear_error(w, x) < EXACT
        assert _linear_error(w, x.bfloat16()) < ROUNDED[torch.bfloat16]
        assert (
            relative_error(ops.linear(x, plain), reference.linear(x, w)) > 100 * EXACT
        )  # the compensator matters


def test_many_tokens_and_rows(tier: str) -> None:
    w = packed_weight(400, 640, "int4-g64", rank=20)
    x = _x(530, 640, dtype=torch.bfloat16)  # more than one pass of 512 tokens
    if tier == "scalar":
        x = x[:40]
    assert _linear_error(w, x) < ROUNDED[torch.bfloat16]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_shapes(data: st.DataObject) -> None:
    draw = data.draw
    cpu.set_tier(draw(st.sampled_from(tiers())))
    try:
        group = draw(st.sampled_from(["g16", "g32", "g64", "g96", "channel"]))
        step = {"g64": 64, "g96": 96}.get(group, 32)
        k, n = step * draw(st.integers(1, 9)), draw(st.integers(1, 130))
        suffix = draw(st.sampled_from(["", "-sym", "-dq", "-sym-dq"]))
        fmt = f"int{draw(st.sampled_from([2, 4, 8] if group == 'g16' else [2, 3, 4, 8]))}-{group}{suffix}"
        if draw(st.booleans()):
            fmt = f"int{draw(st.sampled_from([2, 3, 4]))}-{draw(st.sampled_from(['g16', 'g32']))}-super"
        kind = draw(st.sampled_from(["int3", "int8", "fp16"]))
        w = packed_weight(n, k, fmt, rank=draw(st.integers(0, 20)), kind=kind, seed=draw(st.integers(0, 9)))
        dtype = draw(st.sampled_from(list(ROUNDED)))
        x = _x(draw(st.integers(1, 40)), k, dtype=dtype)
        expected = reference.linear(x, w)
        # One element alone, whose terms may cancel, is no measure of its own error.
        usual = max(_rms(expected), _rms(reference.linear(_x(40, k, dtype=dtype, seed=2), w)))
        assert _rms(ops.linear(x, w).double() - expected.double()) < ROUNDED[dtype] * usual
    finally:
        cpu.set_tier(os.environ.get("TRILOBITE_ISA"))


@pytest.mark.parametrize(
    "fmt", ["int3-g64", "int8-g32", "int8-g64", "int4-g16", "int4-g64", "int4-g32-super"]
)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 22])
def test_int8_activations_cost_precision_and_little_of_it(tier: str, fmt: str, tokens: int) -> None:
    w, x = packed_weight(64, 512, fmt), _x(tokens, 512)
    error = relative_error(ops.linear(x, w, settings=CpuSettings("int8")), reference.linear(x, w))
    # 127 steps to a segment's largest of 64: about 0.6 % of rounding. Below 0.1 % the mode would not be int8.
    assert 1e-3 < error < 1.5e-2
    assert _linear_error(w, x) < EXACT


@pytest.mark.parametrize("tokens", [1, 12])
def test_an_outlier_does_not_drown_its_segment(tier: str, tokens: int) -> None:
    w, x = packed_weight(64, 256, "int3-g64"), _x(tokens, 256)
    x[:, 70] = 2e4
    flat = PackedWeight(shape=w.shape, packed=w.packed.clone())
    y = ops.linear(x, flat) - ops.linear(torch.where(x == 2e4, x, 0.0), flat)
    expected = reference.linear(torch.where(x == 2e4, 0.0, x), flat)
    # fp32 itself leaves 6e-8 * 2e4 / 1 of the small ones.
    assert relative_error(y, expected) < 2e-2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("tokens", [2, 11])
@pytest.mark.parametrize("fmt", ["int3-g64", "int2-g16-dq"])
def test_values_that_are_not_finite_stay_with_their_token(
    tier: str, bad: float, tokens: int, fmt: str
) -> None:
    w, x = packed_weight(48, 128, fmt), _x(tokens, 128)
    x[1, 5] = bad
    y = ops.linear(x, w)
    assert not y[1].isfinite().any()
    rest = [t for t in range(tokens) if t != 1]
    assert relative_error(y[rest], reference.linear(x[rest], w)) < EXACT


@pytest.mark.parametrize("fmt", ["int3-g64", "int2-g16", "int4-g16-super"])
def test_extreme_activations(tier: str, fmt: str) -> None:
    w = packed_weight(32, 64, fmt)
    for scale in (1e30, 1e-30, 0.0):
        for tokens in (1, 8):
            x = _x(tokens, 64) * scale
            torch.testing.assert_close(ops.linear(x, w), reference.linear(x, w), rtol=1e-4, atol=1e-5 * scale)


LARGEST = ["int2-g64", "int3-g32", "int3-g64", "int4-g64", "int8-g64"]


@pytest.mark.parametrize("fmt", LARGEST + [f"int{b}-g{g}-super" for b in (2, 3, 4) for g in (16, 32)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
def test_the_largest_sums_fit(tier: str, fmt: str, tokens: int) -> None:
    """All codes are the largest one, all digits but the highest are -128, or 127."""
    w, parsed = packed_weight(32, 128, fmt), Format.parse(fmt)
    codes = 128 // w.packed.shape[1] * parsed.bits * 2
    w.packed[:, :, :codes] = 0xFF
    if parsed.super_scales:  # the largest count that an encoder leaves, 254 or less
        w.packed[:, :, codes:] = 0x1F if parsed.bits == 4 else 0xFF
    for digit in (-128, 127):
        x = torch.full((tokens, 128), 257 * digit / 2**21)
        x[:, ::64] = digit / abs(digit)
        assert _linear_error(w, x) < 10 * EXACT  # scales and offsets cancel; a sum that wraps is off by 1e-3
        ones = torch.full((tokens, 128), float(digit))
        assert (
            relative_error(ops.linear(ones, w, settings=CpuSettings("int8")), reference.linear(ones, w))
            < 1e-4
        )


def test_no_tokens_and_odd_layouts(tier: str) -> None:
    w = packed_weight(32, 64, "int3-g64")
    assert ops.linear(_x(0, 64), w).shape == (0, 32)
    assert ops.linear(_x(2, 3, 64), w).shape == (2, 3, 32)
    x = _x(64, 4).T
    assert not x.is_contiguous()
    assert _linear_error(w, x) < EXACT
    shifted = torch.empty(w.packed.numel() + 3, dtype=torch.uint8)[3:].view_as(w.packed).copy_(w.packed)
    assert (
        relative_error(ops.linear(x, PackedWeight(shape=w.shape, packed=shifted)), reference.linear(x, w))
        < EXACT
    )


def test_a_flipped_bit_is_seen(tier: str) -> None:
    w, x = packed_weight(32, 128, "int3-g64"), _x(1, 128)
    for byte in (0, 63, 191, 384, 447):  # codes, the last plane, a scale, an offset
        packed = w.packed.clone()
        packed[1, 1, byte] ^= 0x40
        y = ops.linear(x, PackedWeight(shape=w.shape, packed=packed))
        assert relative_error(y, reference.linear(x, w)) > 100 * EXACT


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_flipped_bit_under_super_scales_is_seen(tier: str, tokens: int) -> None:
    w, x = packed_weight(32, 320, "int3-g16-super"), _x(tokens, 320)
    assert w.scale is not None
    for byte, bit in ((0, 0x40), (191, 0x40), (383, 0x40), (384, 8), (447, 0x80)):  # codes; bytes of groups
        packed = w.packed.clone()
        packed[1, 4, byte] ^= bit
        y = ops.linear(x, PackedWeight(shape=w.shape, packed=packed, scale=w.scale))
        assert relative_error(y, reference.linear(x, w)) > 100 * EXACT
    for at in (1, 33):  # a row's super-scale of the first and of the last, shorter span
        scale = w.scale.clone()
        scale.view(-1, 32)[at // 32, at % 32] ^= 4
        y = ops.linear(x, PackedWeight(shape=w.shape, packed=w.packed, scale=scale))
        assert relative_error(y, reference.linear(x, w)) > 100 * EXACT


# Experts.

HIDDEN, INTERMEDIATE, EXPERTS = 128, 96, 5


def _layer(formats: list[str], *, rank: int = 0, gated: bool = True) -> ExpertsLayer:
    def one(e: int, p: int, n: int, k: int) -> PackedWeight:
        return packed_weight(n, k, formats[(e + p) % len(formats)], rank=rank, seed=10 * e + p)

    return stored_layer(
        [
            (
                one(e, 0, INTERMEDIATE, HIDDEN) if gated else None,
                one(e, 1, INTERMEDIATE, HIDDEN),
                one(e, 2, HIDDEN, INTERMEDIATE),
            )
            for e in range(EXPERTS)
        ]
    )


def _routing(tokens: int, active: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    index = torch.stack([torch.randperm(EXPERTS + 1, generator=generator)[:active] for _ in range(tokens)])
    return index, torch.rand(tokens, active, generator=generator)


def _both(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    layer: ExpertsLayer,
    **more: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    layer = replace(layer, **more)  # type: ignore[arg-type]
    return ops.experts(x, index, weights, layer), reference.experts(x, index, weights, layer)


@pytest.mark.parametrize(
    "formats",
    [
        ["int3-g32"],
        ["int2-g32-sym", "int4-channel", "int3-g32-dq"],
        ["int2-g16-dq"],
        ["int2-g16-dq", "int3-g32", "int8-g16", "int3-channel"],
        ["int3-g16-super"],
        ["int2-g16-super", "int4-g16", "int3-g32-super", "int8-g32"],
    ],
    ids=["one", "mixed", "g16", "mixed with g16", "super", "mixed with super"],
)
@pytest.mark.parametrize("rank", [0, 6])
@pytest.mark.parametrize("tokens", [1, 2, 7, 60])
def test_experts(tier: str, formats: list[str], rank: int, tokens: int) -> None:
    index, weights = _routing(tokens)
    assert relative_error(*_both(_x(tokens, HIDDEN), index, weights, _layer(formats, rank=rank))) < EXACT


@pytest.mark.parametrize("fmt", ["int3-g64", "int4-g32", "int3-g16-super", "int8-g32"])
@pytest.mark.parametrize("tokens", [1, 2, 5, 40])
def test_what_leaves_the_activation_function_keeps_16_bits(tier: str, fmt: str, tokens: int) -> None:
    """Of 16-bit models: the result rarely rounds another way, as it would for two of five if h had 8."""
    up, gate, down = (
        packed_weight(n, k, fmt, seed=i) for i, (n, k) in enumerate([(192, 512), (192, 512), (512, 192)])
    )
    layer, x = stored_layer([(gate, up, down)]), _x(tokens, 512, dtype=torch.bfloat16)
    index, weights = torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1)
    expected = reference.experts(x.float(), index, weights, layer).bfloat16()
    assert (ops.experts(x, index, weights, layer) != expected).float().mean() < 0.1


@pytest.mark.parametrize("fmt", ["int3-g64", "int4-g64-dq", "int2-g16-dq", "int8-g32", "int4-g32-super"])
@pytest.mark.parametrize("threads", [1, 2])
def test_one_token_of_experts_of_whole_units(tier: str, fmt: str, threads: int) -> None:
    """Their bands lie apart, but for those of a matrix with a compensator, whatever the other experts have."""
    layer = stored_layer(
        [
            tuple(
                packed_weight(n, k, fmt, rank=rank, seed=3 * e + i) for i, (n, k, rank) in enumerate(shapes)
            )
            for e, shapes in enumerate(
                [[(256, 192, 0), (256, 192, 0), (192, 256, 0)], [(256, 192, 0), (256, 192, 5), (192, 256, 3)]]
            )
        ]
    )
    x, index, weights = _x(3, 192), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    expected = reference.experts(x, index, weights, layer)
    together = ops.experts(x, index, weights, layer, settings=CpuSettings(threads=threads))
    alone = ops.experts(x[:1], index[:1], weights[:1], layer, settings=CpuSettings(threads=threads))
    assert relative_error(together, expected) < EXACT
    assert relative_error(alone, expected[:1]) < EXACT
    for index in (torch.tensor([[0], [1]]), torch.tensor([[1], [0], [1]]), torch.tensor([[0]] + [[1]] * 12)):
        x, weights = _x(len(index), 192), torch.rand(len(index), 1)
        made = ops.experts(x, index, weights, layer, settings=CpuSettings(threads=threads))
        assert relative_error(made, reference.experts(x, index, weights, layer)) < EXACT


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", list(ROUNDED), ids=str)
def test_experts_of_every_type_with_biases(tier: str, dtype: torch.dtype, gated: bool) -> None:
    layer = _layer(["int3-g32"], gated=gated)
    for tokens in (1, 30):
        index, weights = _routing(tokens)
        more = {
            "gate_up_bias": _x(EXPERTS, (1 + gated) * INTERMEDIATE, dtype=dtype),
            "down_bias": _x(EXPERTS, HIDDEN, dtype=dtype),
        }
        x = _x(tokens, HIDDEN, dtype=dtype)
        assert relative_error(*_both(x, index.int(), weights.to(dtype), layer, **more)) < ROUNDED[dtype]


@pytest.mark.parametrize(
    "activation",
    [spell(form, *(1.5, 2.5)[: NUMBERS.get(form, 0)]) for form in sorted(cpu.ACTIVATIONS)],
)
def test_every_activation(tier: str, activation: str) -> None:
    index, weights = _routing(9)
    x = 3 * _x(9, HIDDEN)
    # gelu_fast and gelu_new differ from gelu_pytorch_tanh in the last bits only.
    assert relative_error(*_both(x, index, weights, _layer(["int4-g32"]), activation=activation)) < 1e-5
    if split(activation)[0] not in NUMBERS:
        plain = _layer(["int4-g32"], gated=False)
        assert relative_error(*_both(x, index, weights, plain, activation=activation)) < 1e-5


def test_an_activation_of_transformers_only(tier: str) -> None:
    assert "mish" not in cpu.ACTIVATIONS
    index, weights = _routing(3)
    assert (
        relative_error(*_both(_x(3, HIDDEN), index, weights, _layer(["int4-g32"]), activation="mish")) < EXACT
    )


def test_unusual_routing(tier: str) -> None:
    layer, x = _layer(["int3-g32"]), _x(20, HIDDEN)
    weights = _routing(20)[1]
    cases = {
        "all on one": torch.full((20, 2), 3),
        "nobody": torch.full((20, 2), EXPERTS),
        "far above and below": torch.tensor([[EXPERTS + 1000, 1], [-1, 2]] * 10),
    }
    for name, index in cases.items():
        actual, expected = _both(x, index, weights, layer)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=name)
    assert ops.experts(x[:0], cases["nobody"][:0], weights[:0], layer).shape == (0, HIDDEN)


def test_one_bad_token_leaves_the_others(tier: str) -> None:
    layer, x = _layer(["int3-g32"]), _x(12, HIDDEN)
    index, weights = torch.full((12, 2), 1), torch.rand(12, 2)
    index[:, 1] = 2
    x[4] = torch.nan
    actual, expected = _both(x, index, weights, layer)
    assert actual[4].isnan().all()
    rest = [t for t in range(12) if t != 4]
    assert relative_error(actual[rest], expected[rest]) < EXACT


def test_tiers_and_threads_agree() -> None:
    layer = _layer(["int3-g32"], rank=4)
    index, weights = _routing(40)
    x = _x(40, HIDDEN)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(_both(x, index, weights, layer)[0])
    torch.set_num_threads(before)
    assert torch.equal(*results)


# What cannot be right is refused before native code sees it.


def _refused(call: object, text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        call()  # type: ignore[operator]


def test_linear_refuses_what_does_not_fit() -> None:
    w, x = packed_weight(48, 128, "int3-g64", rank=4), _x(2, 128)

    def run(
        x: torch.Tensor = x, bias: torch.Tensor | None = None, rows: int = 48, **parts: torch.Tensor | None
    ) -> None:
        t = {"packed": w.packed, "scale": None, "lra": w.lra, "lrb": w.lrb, **parts}
        torch.ops.trilobite.linear(x, t["packed"], t["scale"], t["lra"], t["lrb"], bias, rows)

    run()
    assert w.lra is not None
    _refused(lambda: run(x.double()), "float64")
    _refused(lambda: run(_x(2, 64)), "K=64|\\[48, 64\\]|tiles of")
    _refused(lambda: run(packed=w.packed[:-1]), "needs")
    _refused(lambda: run(packed=w.packed[:, :, :-1]), "no known format")
    _refused(lambda: run(packed=w.packed.view(torch.int8)), "int8")
    _refused(lambda: run(rows=80), "needs")
    _refused(lambda: run(bias=torch.zeros(47)), "bias")
    _refused(lambda: run(lrb=None), "missing")
    _refused(lambda: run(lra=w.lra[:3]), "do not fit")
    _refused(lambda: run(scale=torch.zeros(3, 1, 16, dtype=torch.uint8)), "no known format|second-level")


def test_experts_refuse_what_does_not_fit() -> None:
    layer = _layer(["int3-g32"], rank=2)
    slab, table = layer.slab, layer.table
    x, (index, weights) = _x(3, HIDDEN), _routing(3)
    index[0, 0] = 1

    def run(
        x: torch.Tensor = x, index: torch.Tensor = index, weights: torch.Tensor = weights, **more: object
    ) -> None:
        ops.experts(x, index, weights, replace(layer, **more))  # type: ignore[arg-type]

    run()
    _refused(lambda: run(x=x[0]), "expected \\[T, H\\]")
    _refused(lambda: run(weights=weights[:, :1]), "expected \\[T, H\\]")
    _refused(lambda: run(index=index.float()), "top_k_index")
    _refused(lambda: run(slab=slab[:100]), "does not fit a slab of 100 bytes")
    _refused(lambda: run(slab=slab.float()), "slab")
    _refused(lambda: run(table=table[..., :9]), "table")
    _refused(lambda: run(x=_x(3, 100), hidden=100), "does not divide")
    wrong = {
        Column.PACKED: slab.numel() - 10,
        Column.LRA: slab.numel(),
        Column.LRB: -5,
        Column.RANK: 1 << 40,
        Column.RANK_BITS: 5,
        Column.BITS: 7,
        Column.GROUP: 48,
    }
    for column, value in wrong.items():
        bad = table.clone()
        bad[1, :, column] = value
        _refused(lambda bad=bad: run(table=bad), "experts|bits|divide|compensator")
    bad = table.clone()
    bad[1, 2, Column.PACKED] = -1
    _refused(lambda: run(table=bad), "no up or down")
    biases = {"gate_up_bias": torch.zeros(EXPERTS, INTERMEDIATE)}
    _refused(lambda: _both(x, index, weights, layer, **biases), "gate_up_bias")
    bad = table.clone()
    bad[1, 0, Column.PACKED] = -1
    _refused(lambda: run(table=bad), "expected all or none")


# Processes and threads.


def test_python_threads_share_the_engine() -> None:
    layer = _layer(["int3-g32"], rank=4)
    index, weights = _routing(40)
    x = _x(40, HIDDEN)
    expected = _both(x, index, weights, layer)[1]
    errors: list[float] = []

    def work() -> None:
        for _ in range(20):
            y = ops.experts(x, index, weights, layer)
            errors.append(relative_error(y, expected))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    torch.set_num_threads(before)
    assert len(errors) == 80
    assert max(errors) < EXACT


def _python(code: str, **variables: str) -> str:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_a_forked_child_starts_its_own_threads() -> None:
    w, x = packed_weight(512, 1024, "int8-g64"), _x(4, 1024)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    expected = ops.linear(x, w)  # the pool runs now
    pid = os.fork()
    if pid == 0:
        os._exit(0 if torch.equal(ops.linear(x, w), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(ops.linear(x, w), expected)
    torch.set_num_threads(before)


INFO = "from trilobite.kernels.cpu import engine as cpu; i = cpu.info(); print(i['available'], i['tier'], i['threads'])"
WITHOUT = """
import torch
from support.packing import packed_weight, relative_error, stored_layer
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels import ops, reference
w, x = packed_weight(32, 64, "int3-g64"), torch.randn(2, 64)
assert torch.equal(ops.linear(x, w), reference.linear(x, w))
print(cpu.info()["available"], cpu.info()["tier"])
"""


def test_the_instruction_set_can_be_capped() -> None:
    assert _python(INFO, TRILOBITE_ISA="scalar", TRILOBITE_THREADS="1") == "True scalar 1"


def test_why_there_is_no_better_instruction_set() -> None:
    *capped, best = tiers()
    try:
        for name in capped:
            cpu.set_tier(name)
            assert cpu.info()["better_tier"].endswith(" is there, but TRILOBITE_ISA caps it")
        cpu.set_tier(best)
        better = cpu.info()["better_tier"]
        assert better == "none" or cpu.TIERS.index(better.split()[0]) > cpu.TIERS.index(best)
        assert better == "none" or " needs " in better
    finally:
        cpu.set_tier(os.environ.get("TRILOBITE_ISA"))


def test_without_the_library_the_reference_runs() -> None:
    assert _python(WITHOUT, TRILOBITE_LIBRARY="/nonexistent") == "False reference"


def test_an_unknown_cap_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRILOBITE_ISA", "sse9")
    assert "sse9" in cpu.info()["reason"]
    with pytest.raises(ValueError, match="sse9"):
        cpu.set_tier("sse9")


def test_threads_of_a_call_have_limits() -> None:
    with pytest.raises(SettingError, match="at least 1"):
        CpuSettings(threads=0)
    with pytest.raises(SettingError, match="int9"):
        CpuSettings("int9")
    assert cpu.team(1) == 1
    assert cpu.team(1 << 20) == library_threads()
    assert 1 <= cpu.team(None) <= torch.get_num_threads()


def library_threads() -> int:
    """As many as affinity, the quota and TRILOBITE_THREADS allow."""
    return int(cpu.library().trilobite_max_threads())


def test_probes_measure_something() -> None:
    assert cpu.measure_read_bandwidth(torch.ones(1 << 20, dtype=torch.uint8), 2) > 0.01
    assert cpu.measure_peak("int8", 1, repeats=1) > 0.01
    assert cpu.measure_peak("exact", 1, repeats=1) > 0.003
