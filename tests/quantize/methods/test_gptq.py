"""GPTQ and the Hessian, against textbook code in float64 that shares nothing with them."""

import numpy as np
import pytest
import torch
from torch import Tensor

from trilobite.errors import CalibrationError, ShapeError, WeightError
from trilobite.formats import affine, superscale
from trilobite.formats.bitpack import unpack_blocks
from trilobite.formats.weight import PackedWeight, dequantize
from trilobite.quantize.methods import descent
from trilobite.quantize.methods import gptq as gptq_module
from trilobite.quantize.methods import hessian as hessian_module
from trilobite.quantize.methods.gptq import LAZY
from trilobite.quantize.methods.hessian import (
    DAMPING,
    ENOUGH,
    SMALL,
    damped,
    inverse_factor,
    own_part,
    shrink,
    weighted_error,
)
from trilobite.quantize.methods.quantized import Compensation
from trilobite.quantize.methods.registry import METHODS
from trilobite.quantize.methods.search import search
from trilobite.recipe import Format

SHAPES = [
    (1, 32, "int3-g32"),
    (17, 96, "int3-g32"),
    (16, 64, "int2-g64"),
    (40, 192, "int4-g96"),
    (33, 320, "int3-g64-sym"),
    (20, 384, "int3-g128"),
    (48, 160, "int4-channel"),
    (31, 512, "int2-g256"),
]


def weights(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02


def hessian(k: int, seed: int = 0, tokens: int = 4000) -> Tensor:
    """Of correlated inputs whose scales differ by two orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=generator) / k**0.5 + torch.eye(k)
    x = torch.randn(tokens, k, generator=generator) @ mix * torch.logspace(0, -2, k)
    return x.T @ x / tokens


def downdated(inverse: np.ndarray, j: int) -> np.ndarray:
    """The inverse of what is left of H when column j is done."""
    inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    inverse[j, :] = inverse[:, j] = 0
    return inverse


def costs(inverse: np.ndarray, columns: np.ndarray) -> Tensor:
    """What an error of each column costs when the columns behind it have made up for it."""
    cost = np.zeros(len(inverse))
    for j in columns:
        cost[j] = 1 / inverse[j, j]
        inverse = downdated(inverse, j)
    return torch.from_numpy(cost / cost.mean()).float()


def textbook(w: Tensor, h: Tensor, fmt: Format, *, ordered: bool = False) -> np.ndarray:
    """One column at a time, the inverse Hessian downdated after each (Frantar et al. 2023, eq. 2-3), in float64."""
    work = w.double().numpy().copy()
    k = len(h)
    damped = h.double().numpy() + DAMPING * float(h.double().diagonal().mean()) * np.eye(k)
    inverse = np.linalg.inv(damped)
    cost = costs(
        inverse, columns := np.argsort(-h.diagonal().numpy(), kind="stable") if ordered else np.arange(k)
    )
    group, top = fmt.group_size(k), 2**fmt.bits - 1
    grids: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    result = np.zeros_like(work)
    for j in columns:
        g = j // group
        if g not in grids:
            now = w if ordered else torch.from_numpy(work)
            here = slice(g * group, (g + 1) * group)
            scale, offset = search(now[:, here].float().contiguous(), fmt, weight=cost[here])
            grid = affine.make_grid(scale[:, None], None if offset is None else offset[:, None], fmt)
            grids[g] = grid.scale[:, 0].double().numpy(), grid.offset[:, 0].double().numpy()
        scale, offset = grids[g]
        safe = np.where(scale == 0, 1, scale)
        code = np.clip(np.round(np.where(scale == 0, 0, (work[:, j] - offset) / safe)), 0, top)
        result[:, j] = code * scale + offset
        error = (work[:, j] - result[:, j]) / inverse[j, j]
        left = [c for c in range(k) if inverse[c, c] > 0 and c != j]
        work[:, left] -= np.outer(error, inverse[j, left])
        inverse = downdated(inverse, j)
    return result


@pytest.mark.parametrize(("n", "k", "name"), SHAPES)
@pytest.mark.parametrize("method", ["gptq", "gptq-order"])
def test_against_the_textbook(n: int, k: int, name: str, method: str) -> None:
    """Few codes differ, where a weight lies within fp32 rounding of the middle; they change what follows a little."""
    fmt, w, h = Format.parse(name), weights(n, k), hessian(k)
    wanted = torch.from_numpy(textbook(w, h, fmt, ordered=method != "gptq"))
    result = METHODS[method](w, fmt, hessian=h)
    got = dequantize(result.weight).double()
    assert float(((got - wanted).abs() > 1e-6).double().mean()) < 0.03
    e, v = (w.double() - wanted), w.double()
    proxy = float((e @ h.double() * e).sum() / (v @ h.double() * v).sum())
    assert result.proxy == pytest.approx(proxy, rel=0.02)
    assert result.weight.format == (fmt if fmt.group else Format(bits=fmt.bits, group=k))


def test_the_textbook_would_notice_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without feedback from one lazy block to the next."""
    fmt, w, h = Format.parse("int3-g64"), weights(20, 3 * LAZY), hessian(3 * LAZY)
    wanted = torch.from_numpy(textbook(w, h, fmt))
    real = torch.Tensor.addmm_
    monkeypatch.setattr(
        torch.Tensor, "addmm_", lambda t, a, b, alpha=1: t if alpha == -1 else real(t, a, b, alpha=alpha)
    )
    got = dequantize(METHODS["gptq"](w, fmt, hessian=h).weight).double()
    assert float(((got - wanted).abs() > 1e-6).double().mean()) > 0.1


@pytest.mark.parametrize(
    "name",
    ["int2-g64", "int3-g64", "int4-g64", "int3-g64-dq", "int4-g32-sym-dq", "int2-g16-dq", "int3-g16-super"],
)
def test_better_than_search_where_it_counts(name: str) -> None:
    fmt, w, h = Format.parse(name), weights(64, 256), hessian(256)
    plain = METHODS["search"](w, fmt).weight
    e = w - dequantize(plain)
    for method in ("gptq", "gptq-order"):
        result = METHODS[method](w, fmt, hessian=h)
        assert result.proxy < 0.7 * weighted_error(e, h) / weighted_error(w, h)
        found = w - dequantize(result.weight)
        assert result.error == pytest.approx(float(found.norm() / w.norm()), rel=1e-4)
        assert result.weight.format == fmt


def test_an_identity_feeds_nothing_back() -> None:
    fmt, w = Format.parse("int3-g64"), weights(40, 192)
    result = METHODS["gptq"](w, fmt, hessian=torch.eye(192))
    error = METHODS["search"](w, fmt).error
    assert result.error == pytest.approx(error, rel=1e-3)
    assert result.proxy == pytest.approx(error**2, rel=2e-3)


@pytest.mark.parametrize("name", ["int2-g64", "int3-g64", "int3-g64-sym", "int4-g64"])
def test_a_weight_of_three_is_a_column_three_times(name: str) -> None:
    fmt, w = Format.parse(name), weights(50, 64)
    weight = torch.arange(64) % 3 + 1
    scale, offset = search(w, fmt, weight=weight.float())
    repeated = search(w.repeat_interleave(weight, 1), fmt)
    assert torch.allclose(scale, repeated[0], rtol=1e-3)
    assert (offset is None) == (repeated[1] is None)
    if offset is not None and repeated[1] is not None:
        assert torch.allclose(offset, repeated[1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["int2-g16-super", "int2-g32-super", "int3-g16-super", "int4-g32-super"])
@pytest.mark.parametrize("k", [256, 320])
def test_no_other_code_nor_line_is_better(name: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once descent has settled: by the loss in float64, code by code, and pair of sub-scale and offset code by pair."""
    monkeypatch.setattr(descent, "PASSES", 60)
    fmt, w, h = Format.parse(name), weights(5, k), hessian(k)
    packed = METHODS["gptq"](w, fmt, hessian=h).weight
    assert packed.scale is not None
    split = affine.code_bytes(fmt, k)
    tiles = packed.packed
    codes = unpack_blocks(tiles[..., :split].reshape(1, k // 32, -1), fmt.bits).view(16, k)[:5]
    stored, second = superscale.stored_parts(tiles[..., split:], packed.scale)
    s, o, units = superscale.parts(stored, second.contiguous().view(torch.uint8), 5)
    loss_h = damped(h).double().numpy()

    def losses(codes: Tensor, s: Tensor, o: Tensor) -> np.ndarray:
        scale, offset = superscale.line(s, o, superscale.by_group(units, s.shape[1], fmt), fmt.bits)
        decoded = codes.view(5, -1, fmt.group) * scale[..., None] + offset[..., None]
        e = (w - decoded.view(5, k)).double().numpy()
        found: np.ndarray = np.einsum("nk,kl,nl->n", e, loss_h, e)
        return found

    least = losses(codes, s, o)
    better = 0.0
    for j in range(0, k, 3):
        for step in (-1, 1):
            other = codes.clone().int()
            other[:, j] = (other[:, j] + step).clamp(0, 2**fmt.bits - 1)
            better = max(better, float((1 - losses(other, s, o) / least).max()))
    for g in range(s.shape[1]):
        for more, further in ((-1, 0), (1, 0), (0, -1), (0, 1), (1, -1)):
            s2, o2 = s.clone(), o.clone()
            s2[:, g] = (s2[:, g] + more).clamp(1, superscale.SCALES)
            o2[:, g] = torch.minimum(
                (o2[:, g] + further).clamp(min=0), superscale.most_offset(s2[:, g], fmt.bits)
            )
            better = max(better, float((1 - losses(codes, s2, o2) / least).max()))
    assert better < 1e-3


@pytest.mark.parametrize("method", ["gptq", "gptq-order"])
@pytest.mark.parametrize("name", ["int2-g16-super", "int3-g32-super"])
def test_passes_lower_the_loss(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, w, h = Format.parse(name), weights(33, 288), hessian(288)
    proxies = []
    for passes in (0, 1, 2):
        monkeypatch.setattr(descent, "PASSES", passes)
        proxies.append(METHODS[method](w, fmt, hessian=h).proxy or 0.0)
    assert proxies[2] < proxies[1] < proxies[0]


def test_lines_are_found_when_a_group_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """They fit what feedback has made of the weights, not what the weights were."""
    monkeypatch.setattr(descent, "PASSES", 0)
    fmt, w, h = Format.parse("int2-g16-super"), weights(48, 256), hessian(256)
    found = METHODS["gptq"](w, fmt, hessian=h).proxy
    made = gptq_module._Lines.__init__

    def known(self: gptq_module._Lines, *args: object) -> None:
        made(self, *args)  # type: ignore[arg-type]
        self.found = False

    monkeypatch.setattr(gptq_module._Lines, "__init__", known)
    assert (found or 1) < 0.9 * (METHODS["gptq"](w, fmt, hessian=h).proxy or 0)


def test_bands_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, w, h = Format.parse("int3-g64-dq"), weights(70, 192), hessian(192)
    whole = METHODS["gptq"](w, fmt, hessian=h).weight
    monkeypatch.setattr("trilobite.quantize.methods.gptq.BAND", 192 * 33)
    monkeypatch.setattr(hessian_module, "BAND", 192 * 7)
    parts = METHODS["gptq"](w, fmt, hessian=h).weight
    assert torch.equal(whole.packed, parts.packed)
    assert whole.scale is not None
    assert parts.scale is not None
    assert torch.equal(whole.scale, parts.scale)


@pytest.mark.parametrize("compensator", ["int3", "int8", "fp16"])
def test_with_a_compensator(compensator: str) -> None:
    fmt, w, h = Format.parse("int2-g64"), weights(96, 128), hessian(128)
    plain = METHODS["gptq"](w, fmt, hessian=h)
    result = METHODS["gptq"](
        w, fmt, hessian=h, compensation=Compensation(rank=8, compensator=compensator, iterations=20)
    )
    assert result.weight.rank == 8
    assert result.proxy < plain.proxy
    assert result.proxy == min(result.proxies)
    e = w - dequantize(result.weight)
    assert result.proxy == pytest.approx(weighted_error(e, h) / weighted_error(w, h), rel=1e-4)


def test_the_low_rank_is_the_best_in_the_norm_of_h() -> None:
    """A residual of rank 3 in the directions that H weighs is found whole, whatever else there is."""
    from trilobite.quantize.methods.gptq import _low_rank, _order

    k, h = 96, hessian(96)
    vectors = torch.linalg.eigh(h).eigenvectors
    e = weights(40, 3) @ vectors[:, -3:].T + 1e-3 * weights(40, k - 3) @ vectors[:, :-3].T
    lra, lrb = _low_rank(e, h, _order(h, ordered=True), Compensation(rank=3, compensator="fp16"))
    left = e - lra.float().T @ lrb.float()
    assert weighted_error(left, h) < 1e-3 * weighted_error(e, h)


@pytest.mark.parametrize("k", [65, 2 * SMALL + 35])
def test_inverse_factor(k: int) -> None:
    h = hessian(k)
    upper = inverse_factor(h).double()
    damped = h.double() + DAMPING * float(h.diagonal().double().mean()) * torch.eye(k)
    assert torch.equal(upper, upper.triu())
    assert torch.allclose(upper.T @ upper @ damped, torch.eye(k, dtype=torch.float64), atol=1e-3)


@pytest.mark.parametrize("k", [96, SMALL, 2 * SMALL + 32])
def test_weighted_error(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessian_module, "BAND", 7 * k)
    e, h = weights(20, k), hessian(k)
    wanted = float((e.double() @ h.double() * e.double()).sum())
    assert weighted_error(e, h) == pytest.approx(wanted, rel=1e-5)
    assert weighted_error(e, h.diagonal()) == pytest.approx(
        float((e.double().square() * h.diagonal().double()).sum()), rel=1e-5
    )


def test_dead_columns_round_to_nearest() -> None:
    fmt, w, h = Format.parse("int3-g32"), weights(20, 64), hessian(64)
    for dead in (3, 40):
        h[dead] = h[:, dead] = 0
    result = METHODS["gptq"](w, fmt, hessian=h)
    back = dequantize(result.weight)
    assert float((w - back)[:, [3, 40]].norm() / w[:, [3, 40]].norm()) < 0.3
    assert METHODS["gptq"](w, fmt, hessian=torch.zeros(64, 64)).proxy == 0


def test_a_singular_hessian_is_damped() -> None:
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    result = METHODS["gptq"](weights(20, 128), Format.parse("int3-g64"), hessian=x.T @ x / 5)
    assert 0 < result.proxy < 0.03


def test_an_indefinite_hessian_is_damped_more() -> None:
    h = hessian(64)
    values, vectors = torch.linalg.eigh(h)
    values[0] = -0.05 * float(h.diagonal().mean())
    upper = inverse_factor(vectors @ torch.diag(values) @ vectors.T)
    assert bool(torch.isfinite(upper).all())
    with pytest.raises(CalibrationError, match="not positive definite"):
        inverse_factor(torch.full((64, 64), 5.0).fill_diagonal_(1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_input(bad: float) -> None:
    fmt, w, h = Format.parse("int3-g32"), weights(16, 64), hessian(64)
    with pytest.raises(CalibrationError, match="NaN or infinity") as e:
        METHODS["gptq"](w, fmt, hessian=h.clone().fill_diagonal_(bad))
    assert "\n" not in str(e.value)
    with pytest.raises(WeightError, match="NaN or infinite"):
        METHODS["gptq"](w.clone().fill_diagonal_(bad), fmt, hessian=h)
    with pytest.raises(ShapeError):
        METHODS["gptq"](w, Format.parse("int3-g128"), hessian=h)


def test_zero_weights() -> None:
    result = METHODS["gptq"](torch.zeros(16, 64), Format.parse("int3-g32"), hessian=hessian(64))
    assert (result.error, result.proxy) == (0, 0)
    assert isinstance(result.weight, PackedWeight)


def test_shrinking() -> None:
    k = 8
    own, average = 3 * torch.eye(k), torch.ones(k, k)
    assert own_part(0, k) == 0
    assert own_part(ENOUGH * k, k) == own_part(99 * k, k) == 1
    assert own_part(k // 2, k) == pytest.approx(0.25)
    assert torch.equal(shrink(own, average, 1.0, k), own)
    assert torch.allclose(shrink(own, average, 0.25, k), 0.25 * own + 0.75 * average)
    assert torch.equal(shrink(None, average, 0.0, k), average)
    assert torch.equal(shrink(None, None, 0.0, k), torch.eye(k))
    assert torch.allclose(shrink(own + 1, None, 0.5, k), (own + 1) / 2 + 2 * torch.eye(k))
