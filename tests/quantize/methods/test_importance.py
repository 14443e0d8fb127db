"""Search and MiLo by the importance of columns, the diagonal of a Hessian."""

import pytest
import torch
from torch import Tensor

from trilobite.formats.weight import dequantize
from trilobite.kernels.cpu import quantize as cpu_quantize
from trilobite.quantize.methods.bands import quantize_band
from trilobite.quantize.methods.hessian import (
    DIAGONAL_ENOUGH,
    DiagonalSum,
    HessianSum,
    own_part,
    relative_loss,
    shrink,
)
from trilobite.quantize.methods.quantized import Compensation
from trilobite.quantize.methods.registry import METHODS
from trilobite.recipe import Format, parse_format

FORMATS = ("int2-g64", "int3-g64", "int4-g32", "int3-g64-sym", "int2-g32-dq", "int3-g16-super")


def matrix(n: int = 48, k: int = 256) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.02


def importance(k: int = 256) -> Tensor:
    """Of very different columns, some of which nothing enters."""
    h = torch.randn(k, generator=torch.Generator().manual_seed(1)).mul(1.5).exp()
    h[5::50] = 0
    return h


def fmt_of(name: str) -> Format:
    fmt = parse_format(name)
    assert isinstance(fmt, Format)
    return fmt


@pytest.mark.parametrize("name", FORMATS)
def test_weighted_search_loses_less_of_what_counts(name: str) -> None:
    w, h = matrix(), importance()
    weighted = METHODS["search"](w, fmt_of(name), hessian=h)
    plain = dequantize(METHODS["search"](w, fmt_of(name)).weight)
    assert weighted.proxy is not None
    assert weighted.proxy == pytest.approx(relative_loss(w, dequantize(weighted.weight), h), rel=1e-4)
    assert weighted.proxy < 0.95 * relative_loss(w, plain, h)
    full = relative_loss(w, plain, h.diag())
    assert relative_loss(w, plain, h) == pytest.approx(full, rel=1e-4)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rank", [0, 4])
def test_equal_importance_is_none(name: str, rank: int) -> None:
    """To the byte: one loop finds both."""
    w, compensation = matrix(), Compensation(rank=rank, iterations=3)
    same = METHODS["search"](w, fmt_of(name), hessian=torch.full((256,), 4.0), compensation=compensation)
    none = METHODS["search"](w, fmt_of(name), compensation=compensation)
    if cpu_quantize.supports(w, fmt_of(name), "search"):
        for suffix, part in none.weight.tensors().items():
            assert torch.equal(part, same.weight.tensors()[suffix])
    assert same.error == pytest.approx(none.error, rel=1e-3)


@pytest.mark.parametrize(
    "name", ["int2-g64", "int3-g64", "int4-g32", "int3-g64-sym", "int3-g16-super", "int2-g32-super"]
)
def test_native_search_is_the_one_in_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w, h, fmt = matrix(), importance().clamp_min(1e-3), fmt_of(name)
    if not cpu_quantize.supports(w, fmt, "search"):
        pytest.skip("no native library")
    native = quantize_band(w, fmt, "search", weight=h)
    monkeypatch.setattr(cpu_quantize, "supports", lambda *_: False)
    torch_ = quantize_band(w, fmt, "search", weight=h)

    def loss(residual: Tensor) -> float:
        return float((residual.square() @ h).sum())

    assert loss(native.residual) == pytest.approx(loss(torch_.residual), rel=2e-3)
    scales = zip(native.scales, torch_.scales, strict=True)
    for mine, theirs in scales:
        if mine is not None and theirs is not None:
            assert float((mine - theirs).abs().median()) < 1e-6


def test_the_low_rank_goes_where_it_counts() -> None:
    """With outliers in columns that nothing enters, importance spends the rank on the others."""
    w = matrix(128, 256)
    h = torch.ones(256)
    h[:8], w[:, :8] = 1e-3, w[:, :8] * 8
    h[128:136], w[:, 128:136] = 50, w[:, 128:136] * 4
    compensation = Compensation(rank=8, compensator="int8", iterations=5)
    fmt = fmt_of("int3-g64")
    weighted = METHODS["search"](w, fmt, hessian=h, compensation=compensation)
    plain = METHODS["search"](w, fmt, compensation=compensation)
    assert weighted.proxy is not None
    assert weighted.proxy < 0.9 * relative_loss(w, dequantize(plain.weight), h)
    assert weighted.errors[weighted.best] < 0.995 * weighted.errors[0]


def test_a_diagonal_is_that_of_the_hessian() -> None:
    x = torch.randn(300, 32, generator=torch.Generator().manual_seed(2))
    full, diagonal = HessianSum(), DiagonalSum()
    for part in torch.split(x, 70):
        full.add(part)
        diagonal.add(part)
    assert torch.allclose(full.mean().diagonal(), diagonal.mean(), rtol=1e-5)
    assert diagonal.tokens == 300


def test_scarce_tokens_lean_on_the_average() -> None:
    own, average = torch.full((4,), 2.0), torch.full((4,), 6.0)
    assert own_part(DIAGONAL_ENOUGH, 4096, DiagonalSum) == 1
    part = own_part(DIAGONAL_ENOUGH // 4, 4096, DiagonalSum)
    assert part == 0.25
    assert torch.equal(shrink(own, average, part, 4, DiagonalSum), torch.full((4,), 5.0))
    assert torch.equal(shrink(None, None, 0.0, 4, DiagonalSum), torch.ones(4))
    assert torch.equal(shrink(own, None, part, 4, DiagonalSum), own)
