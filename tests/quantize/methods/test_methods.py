import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from trilobite.checkpoint.roles import identify
from trilobite.checkpoint.source import open_source
from trilobite.errors import ShapeError, WeightError
from trilobite.formats.weight import dequantize
from trilobite.kernels.cpu import quantize as cpu_quantize
from trilobite.quantize.methods import search as search_module
from trilobite.quantize.methods.bands import SCALES, bands, find_scales, quantize_band, relative_error
from trilobite.quantize.methods.hqq import BETA, ITERATIONS, KAPPA, P, hqq
from trilobite.quantize.methods.registry import quantize
from trilobite.quantize.methods.rtn import rtn
from trilobite.quantize.methods.search import search
from trilobite.quantize.plan.statistics import kurtosis, residual_rank, sample_roles, sampled_residual_share
from trilobite.recipe import Format

INT3, INT2 = Format(bits=3, group=64), Format(bits=2, group=64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nmse(w: Tensor, fmt: Format, method: str) -> float:
    return relative_error(w, quantize(w, fmt, method)) ** 2


def sum_of_squares(groups: Tensor, line: tuple[Tensor, Tensor | None], fmt: Format) -> Tensor:
    """Error of a line with its nearest codes, per group."""
    scale, offset = line
    low, high = (
        (0, 2**fmt.bits - 1) if offset is not None else (-(2 ** (fmt.bits - 1)), 2 ** (fmt.bits - 1) - 1)
    )
    base = torch.zeros_like(scale) if offset is None else offset
    levels = torch.arange(low, high + 1) * scale[:, None] + base[:, None]
    return (groups[..., None] - levels[:, None, :]).square().amin(-1).sum(-1)


@pytest.fixture(params=["native", "torch"])
def inner_loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both twins of every method: csrc/kernel/quantize.h and quantize/*.py."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_quantize, "supports", lambda *_: False)
    elif not cpu_quantize.supports(torch.zeros(1, 64), INT3, "rtn"):
        pytest.skip("no native library here")


@pytest.fixture(scope="module")
def gaussian() -> Tensor:
    return normal(512, 1024)


@pytest.mark.usefixtures("inner_loops")
@pytest.mark.parametrize(
    ("fmt", "method", "low", "high"),
    [
        (INT3, "rtn", 0.0353, 0.0391),
        (INT3, "hqq", 0.0300, 0.0345),
        (INT3, "search", 0.0260, 0.0280),
        (INT2, "rtn", 0.190, 0.210),
        (INT2, "hqq", 0.170, 0.195),
        (INT2, "search", 0.0950, 0.108),
    ],
)
@pytest.mark.parametrize("sigma", [1.0, 0.02])
def test_error_on_gaussian_weights(
    gaussian: Tensor, fmt: Format, method: str, low: float, high: float, sigma: float
) -> None:
    """Published figures; at sigma 0.02 the l_p shrink of HQQ would be zero without normalisation.

    The lower ends are there too: an error below them means a bug in the measure.
    """
    assert low <= nmse(gaussian * sigma, fmt, method) <= high


@pytest.mark.parametrize(
    "text",
    [
        "int3-g64",
        "int2-g32",
        "int2-g16-dq",
        "int4-g128",
        "int3-g64-sym",
        "int3-g64-dq",
        "int8-channel",
        "int2-g16-super",
    ],
)
@pytest.mark.parametrize("method", SCALES)
def test_relative_error_is_that_of_the_decoded_matrix(text: str, method: str) -> None:
    w = normal(37, 256).bfloat16()
    packed = quantize(w, Format.parse(text), method)
    decoded = dequantize(packed)
    assert decoded.shape == w.shape
    exact = float((w.float() - decoded).norm() / w.float().norm())
    assert relative_error(w, packed) == pytest.approx(exact, rel=1e-5)
    assert exact < 0.6


@pytest.mark.usefixtures("inner_loops")
def test_methods_order() -> None:
    """search < hqq < rtn wherever there is a zero point, on heavy tails too."""
    heavy = normal(64, 512) * torch.rand(64, 512, generator=torch.Generator().manual_seed(1)).pow(-0.3)
    for w in (normal(64, 512), heavy):
        for fmt in (INT3, INT2):
            assert nmse(w, fmt, "search") < nmse(w, fmt, "hqq") < nmse(w, fmt, "rtn")


def test_relative_error_notices_a_zeroed_tile() -> None:
    w = normal(64, 128)
    packed = quantize(w, INT3, "rtn")
    before = relative_error(w, packed)
    packed.packed[2, 1] = 0
    assert relative_error(w, packed) > 2 * before


@pytest.mark.parametrize(
    "fmt", [INT3, INT2, Format(bits=3, group=64, symmetric=True), Format(bits=8, group=64)], ids=str
)
def test_search_is_never_worse_than_its_start(fmt: Format) -> None:
    groups = normal(300, 64) * normal(300, 1, seed=3).exp()
    start = rtn(groups, fmt)
    before = sum_of_squares(groups, start, fmt)
    for steps in (0, 1, 8):
        after = sum_of_squares(groups, search(groups, fmt, steps), fmt)
        assert (after <= before * (1 + 1e-5)).all()
        assert float(after.sum()) < 0.999 * float(before.sum()) or fmt.bits == 8


def test_more_steps_of_search_are_better() -> None:
    groups = normal(200, 64)
    errors = [
        float(sum_of_squares(groups, search(groups, INT2, steps), INT2).sum()) for steps in (0, 1, 4, 8)
    ]
    assert errors == sorted(errors, reverse=True)


def test_search_beats_a_fine_grid_of_clipped_ranges() -> None:
    """The local minima that it finds are at least as good as plain clipping searches."""
    groups = normal(100, 64, seed=5)
    scale, offset = rtn(groups, INT2)
    assert offset is not None
    middle = offset + 1.5 * scale
    clipped = [
        sum_of_squares(groups, (scale * f, middle - 1.5 * scale * f), INT2)
        for f in torch.linspace(0.3, 1, 71)
    ]
    assert float(sum_of_squares(groups, search(groups, INT2), INT2).sum()) < float(
        torch.stack(clipped).amin(0).sum()
    )


def literal_hqq(w: list[float], bits: int) -> tuple[float, float]:
    """MiLo eq. 6-9 for one group, word by word, on weights over their standard deviation: (scale, z)."""
    mean = sum(w) / len(w)
    sigma = math.sqrt(sum((x - mean) ** 2 for x in w) / len(w))
    w = [x / sigma for x in w]
    top = 2**bits - 1
    s = (max(w) - min(w)) / top
    z, beta = -min(w) / s, BETA
    best = (math.inf, z)
    for step in range(ITERATIONS + 1):
        q = [min(max(round(x / s + z), 0), top) for x in w]  # eq. 9
        error = [x - s * (c - z) for x, c in zip(w, q, strict=True)]
        best = min(best, (sum(abs(e) ** P for e in error), z), key=lambda b: b[0])
        if step == ITERATIONS:
            break
        m = [  # eq. 6-7
            math.copysign(1, e) * max(abs(e) - max(abs(e), 1e-12) ** (P - 1) / beta, 0) for e in error
        ]
        z = sum(c - (x - y) / s for c, x, y in zip(q, w, m, strict=True)) / len(w)  # eq. 8
        beta *= KAPPA
    return s * sigma, best[1]


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("sigma", [1.0, 0.02])
def test_hqq_is_equations_6_to_9(bits: int, sigma: float) -> None:
    groups = normal(4, 64, seed=bits) * sigma + 0.3 * sigma
    scale, offset = hqq(groups, Format(bits=bits, group=64))
    assert offset is not None
    for i, group in enumerate(groups.double().tolist()):
        s, z = literal_hqq(group, bits)
        assert float(scale[i]) == pytest.approx(s, rel=1e-5)
        # Rounding ties may part the iterates of float32 and float64; the zero point stays close.
        assert -float(offset[i]) / s == pytest.approx(z, abs=1e-3)


def test_hqq_does_not_depend_on_the_size_of_weights() -> None:
    groups = normal(50, 64)
    scale, offset = hqq(groups, INT3)
    small, moved = hqq(groups * 2.0**-20, INT3)
    assert offset is not None
    assert moved is not None
    assert torch.equal(small * 2.0**20, scale)
    assert torch.equal(moved * 2.0**20, offset)
    assert not torch.equal(offset, rtn(groups, INT3)[1])


def test_hqq_far_from_zero() -> None:
    """Offsets a hundred times the spread: z is large, and must not eat the codes."""
    spread = normal(50, 64)
    near = sum_of_squares(spread, hqq(spread, INT3), INT3)
    far = sum_of_squares(spread + 100, hqq(spread + 100, INT3), INT3)
    assert float(far.sum()) == pytest.approx(float(near.sum()), rel=0.01)


@pytest.mark.usefixtures("inner_loops")
@pytest.mark.parametrize("method", SCALES)
@pytest.mark.parametrize(
    "text",
    [
        "int3-g64",
        "int2-g64-sym",
        "int3-g64-dq",
        "int8-g64",
        "int2-channel",
        "int3-g16-super",
        "int4-g32-super",
    ],
)
@pytest.mark.parametrize("value", [0.0, 0.5, 0.3, -0.3, 1e-3, 1e4])
def test_constant_groups_are_exact_within_fp16(method: str, text: str, value: float) -> None:
    w = torch.full((17, 128), value)
    w[3] = 0
    decoded = dequantize(quantize(w, Format.parse(text), method))
    # Double quantized scales span the values 0 and `value` in 255 steps, both ends exact.
    assert ((decoded - w).abs() <= 2**-11 * w.abs() + 1e-30).all()


@pytest.mark.usefixtures("inner_loops")
@pytest.mark.parametrize("method", SCALES)
@pytest.mark.parametrize("sigma", [1e-7, 1e-5, 1e3, 1e4])
def test_tiny_and_large_weights(method: str, sigma: float) -> None:
    w = normal(20, 128) * sigma
    decoded = dequantize(quantize(w, INT3, method))
    assert decoded.isfinite().all()
    assert nmse(w, INT3, method) < (0.045 if sigma > 1e-6 else 0.08)  # fp16 scales end at 6e-8


@pytest.mark.usefixtures("inner_loops")
@pytest.mark.parametrize("method", SCALES)
def test_weights_beyond_every_fp16_scale_are_refused(method: str) -> None:
    with pytest.raises(WeightError, match="out of range"):
        quantize(normal(16, 64).bfloat16() * 1e30, INT3, method)


@pytest.mark.usefixtures("inner_loops")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("method", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinity_are_refused(bad: float, method: str, dtype: torch.dtype) -> None:
    w = normal(33, 64).to(dtype)
    w[32, 63] = bad
    with pytest.raises(WeightError):
        quantize(w, INT3, method)


def test_bf16_and_fp32_input_give_the_same_bytes() -> None:
    w = normal(40, 128).bfloat16()
    for method in SCALES:
        assert torch.equal(quantize(w, INT3, method).packed, quantize(w.float(), INT3, method).packed)


def test_bands_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w = normal(100, 128)
    whole = {m: quantize(w, INT3, m).packed for m in SCALES}
    monkeypatch.setattr("trilobite.quantize.methods.bands.BAND", 16 * 128)
    assert len(list(bands(100, 128))) == 7
    for method, packed in whole.items():
        assert torch.equal(quantize(w, INT3, method).packed, packed)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 32), (16, 32), (17, 2**18), (1000, 4096), (64, 2**20)])
def test_bands_cover_every_row_once(n: int, k: int) -> None:
    rows = [r for band in bands(n, k) for r in range(band.start, band.stop)]
    assert rows == list(range(n))
    assert all(band.start % 16 == 0 for band in bands(n, k))


@pytest.mark.parametrize(
    "text",
    [
        "int3-g64",
        "int2-g32",
        "int4-g128",
        "int8-channel",
        "int3-g64-sym",
        "int2-g16",
        "int4-g16-sym",
        "int8-g16",
        "int2-g16-super",
        "int3-g16-super",
        "int3-g32-super",
        "int4-g32-super",
    ],
)
@pytest.mark.parametrize("method", SCALES)
def test_twins_agree(text: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for weights in the middle between two codes."""
    w, fmt = normal(48, 256) * 0.02 + 0.01, Format.parse(text)
    if not cpu_quantize.supports(w, fmt, method):
        pytest.skip("no native library here")
    native = dequantize(quantize(w, fmt, method))
    monkeypatch.setattr(cpu_quantize, "supports", lambda *_: False)
    plain = dequantize(quantize(w, fmt, method))
    assert float((native - plain).norm() / w.norm()) < 0.02
    errors = [float((x - w).norm()) for x in (native, plain)]
    assert errors[0] == pytest.approx(errors[1], rel=2e-3)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("text", ["int3-g64", "int2-g16", "int4-g128", "int3-g64-sym", "int3-g16-super"])
def test_a_search_starts_from_the_lines_that_it_is_given(
    text: str, weighted: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, fmt = normal(21, 256) * 0.02 + 0.01, Format.parse(text)
    weight = torch.linspace(0.5, 1.5, 256) if weighted else None
    if native and not cpu_quantize.supports(w, fmt, "search"):
        pytest.skip("no native library here")
    monkeypatch.setattr(cpu_quantize, "supports", lambda *_: native)
    given = find_scales(w, fmt, "rtn")
    kept = [None if t is None else t.clone() for t in given]
    found = quantize_band(w, fmt, "search", steps=1, start=given, weight=weight).scales
    monkeypatch.setitem(search_module.SHRINKS, fmt.bits, (1.0,))
    by_hand = find_scales(w, fmt, "search", 1, weight)
    for line, before, after, expected in zip(given, kept, found, by_hand, strict=True):
        if before is None:
            continue
        assert torch.equal(line, before)
        assert float((after - expected).abs().median()) < 1e-6
        assert float((after - before).abs().max()) > 1e-4
    if native:
        same = quantize_band(w, fmt, "search", steps=0, start=given).scales
        for line, before in zip(same, kept, strict=True):
            assert before is None or torch.allclose(line, before, atol=1e-7)


def test_k_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ShapeError, match="K=96"):
        quantize(normal(16, 96), INT3, "rtn")


def test_kurtosis() -> None:
    assert kurtosis(normal(500, 500)) == pytest.approx(0, abs=0.08)
    assert kurtosis(torch.rand(500, 500, generator=torch.Generator().manual_seed(0))) == pytest.approx(
        -1.2, abs=0.02
    )
    w = normal(20, 30, seed=2).double()
    by_hand = float(((w - w.mean()) ** 4).mean() / ((w - w.mean()) ** 2).mean() ** 2 - 3)
    assert kurtosis(w.float()) == pytest.approx(by_hand, rel=1e-4)
    assert kurtosis(torch.ones(4, 32)) == 0


def test_residual_rank_counts_small_singular_values() -> None:
    w = normal(64, 64)
    residual = w - dequantize(quantize(w, INT3, "rtn"))
    sigma = torch.linalg.svd(residual).S
    assert residual_rank(w) == int((sigma < 0.5 * sigma.max()).sum()) > 0


def test_a_sample_of_rows_and_columns_has_the_rank_of_the_whole() -> None:
    small = normal(100, 200)
    assert sampled_residual_share(small) == pytest.approx(residual_rank(small) / 100)
    wide = normal(600, 1040, seed=1)
    assert sampled_residual_share(wide) == pytest.approx(residual_rank(wide) / 600, abs=0.08)
    leaning = wide.clone()
    leaning[::7] *= 30  # what these rows lose has all the large singular values
    assert sampled_residual_share(leaning) == pytest.approx(residual_rank(leaning) / 600, abs=0.05)
    assert sampled_residual_share(leaning) > sampled_residual_share(wide) + 0.3
    assert sampled_residual_share(normal(40, 40) * 0) == 0


def test_a_sample_names_the_matrix_that_is_damaged(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    w = torch.ones(16, 64)
    w[3, 5] = float("nan")
    save_file({name: w}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    source = open_source(str(tmp_path))
    with pytest.raises(WeightError, match=rf"{name}: 1 of 1024 weights are NaN"):
        sample_roles(source, identify(source), samples=None)
