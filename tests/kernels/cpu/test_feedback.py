"""GPTQ's native loops against the reference in PyTorch, on every instruction set of this machine."""

import os
from collections.abc import Iterator

import pytest
import torch
from support.tiers import tiers
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.formats import affine, superscale
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.cpu import feedback
from trilobite.quantize.methods import gptq
from trilobite.quantize.methods.descent import _Block
from trilobite.quantize.methods.hessian import damped
from trilobite.recipe import Format

pytestmark = pytest.mark.skipif(not tiers(), reason="no native library")


@pytest.fixture(params=tiers())
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    yield cpu.set_tier(request.param)
    cpu.set_tier(os.environ.get("TRILOBITE_ISA"))


def matrix(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)) * 0.02


def hessian(k: int) -> Tensor:
    x = torch.randn(3 * k, k, generator=torch.Generator().manual_seed(k)) * torch.linspace(0.2, 3, k)
    x[:, 1:] += 0.7 * x[:, :-1]
    return x.T @ x / len(x)


def rounded(
    w: Tensor, fmt: Format, monkeypatch: pytest.MonkeyPatch, *, ordered: bool, natively: bool
) -> tuple[Tensor, affine.Grid]:
    """By the loops under test, everything before them the same."""
    order = gptq._order(hessian(w.shape[1]), ordered=ordered)
    joined = fmt.double_quant or fmt.super_scales
    known = None if order.natural and not joined else gptq._grid(w, fmt, order.cost)
    with monkeypatch.context() as patch:
        if not natively:
            patch.setattr(feedback, "supports", lambda *_: False)
        return gptq._round_columns(w, fmt, order, known)


SHAPES = [
    (1, 32, "int2-g16-super"),
    (7, 96, "int3-g32-super"),
    (33, 320, "int4-g16-super"),
    (16, 288, "int3-g16-super"),
    (17, 64, "int3-g64"),
    (40, 192, "int4-g96"),
    (19, 384, "int3-g64-sym"),
    (5, 256, "int2-g16-dq"),
    (23, 512, "int2-g256"),
    (9, 320, "int8-channel"),
]


@pytest.mark.parametrize("ordered", [False, True], ids=["natural", "ordered"])
@pytest.mark.parametrize(("n", "k", "name"), SHAPES)
def test_blocks(n: int, k: int, name: str, ordered: bool, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A code differs where fp32 rounding decides, and then a few of that row."""
    fmt, w = Format.parse(name), matrix(n, k)
    wanted, by_wanted = rounded(w, fmt, monkeypatch, ordered=ordered, natively=False)
    found, by_found = rounded(w, fmt, monkeypatch, ordered=ordered, natively=True)
    same = (wanted == found).all(1)
    assert float(same.float().mean()) > 0.75
    assert torch.equal(by_wanted.scale[same], by_found.scale[same])
    assert torch.equal(by_wanted.offset[same], by_found.offset[same])
    assert float((wanted != found).float().mean()) < 0.1


def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of U is off by a little."""
    w, fmt = matrix(40, 256), Format.parse("int3-g16-super")
    wanted, _ = rounded(w, fmt, monkeypatch, ordered=False, natively=False)
    real = feedback.feed_back

    def faulty(block: Tensor, upper: Tensor, *args: object, **kwargs: object) -> None:
        upper = upper.clone()
        upper[3, 4] += upper[3, 3]
        real(block, upper, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(feedback, "feed_back", faulty)
    found, _ = rounded(w, fmt, monkeypatch, ordered=False, natively=True)
    assert float((wanted == found).all(1).float().mean()) < 0.5


@pytest.mark.parametrize(
    ("n", "columns", "name"),
    [
        (1, 32, "int2-g16-super"),
        (7, 96, "int3-g32-super"),
        (33, 256, "int4-g16-super"),
        (48, 256, "int3-g16-super"),
    ],
)
def test_a_span_once_more(n: int, columns: int, name: str, tier: str) -> None:
    """Of a span inside of a wider matrix, for its rows of H are no contiguous block."""
    fmt, w, whole = Format.parse(name), matrix(n, columns), damped(hessian(columns + 64))
    h = whole[32 : 32 + columns, 32 : 32 + columns]
    grid = gptq._grid(w, fmt, torch.ones(columns))
    assert grid.super is not None
    parts = [p.T.contiguous() for p in superscale.parts(grid.stored, grid.super, n)]
    codes = affine.round_to_grid(w, grid, fmt).T.float().contiguous()
    blocks = [
        _Block(codes.clone(), parts[0].clone(), parts[1].clone(), parts[2][0].clone(), fmt) for _ in (0, 1)
    ]
    errors = [w.T.contiguous() - block.decoded() for block in blocks]
    slope = h @ errors[0]
    blocks[0].descend(errors[0], slope.clone(), h)
    blocks[1].descend_natively(errors[1], slope, h)
    same = (blocks[0].codes == blocks[1].codes).all(0)
    assert float(same.float().mean()) > 0.85
    for one, other in zip((blocks[0].s, blocks[0].o), (blocks[1].s, blocks[1].o), strict=True):
        assert torch.equal(one[:, same], other[:, same])
    # A unit lies between two numbers of fp16 now and then.
    assert torch.allclose(blocks[0].unit[same], blocks[1].unit[same], rtol=2e-3, atol=0)
    assert torch.allclose(errors[1], w.T - blocks[1].decoded(), atol=1e-6)
    losses = [((h @ e) * e).sum() for e in errors]
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=1e-3)
    before = w.T - _Block(codes, parts[0], parts[1], parts[2][0], fmt).decoded()
    assert float(losses[0]) < 0.95 * float(((h @ before) * before).sum())


def test_spans_of_zeros_stay(tier: str) -> None:
    fmt = Format.parse("int3-g16-super")
    zeros = torch.zeros(64, 3)
    lines, units = (torch.ones(4, 3), torch.full((4, 3), 15.0)), torch.zeros(3)
    error = zeros.clone()
    feedback.descend(
        fmt,
        codes=zeros,
        lines=lines,
        units=units,
        error=error,
        slope=torch.zeros(64, 3),
        hessian=damped(hessian(64)),
    )
    assert not units.any()
    assert not error.any()
    assert torch.equal(lines[0], torch.ones(4, 3))


def test_what_does_not_fit_is_refused() -> None:
    w, upper = torch.zeros(48, 4), torch.eye(48)
    codes, errors = torch.zeros(48, 4, dtype=torch.uint8), torch.zeros(48, 4)
    lines = torch.ones(2, 4), torch.zeros(2, 4)
    with pytest.raises(ShapeError, match="group 20 of 48 columns"):
        feedback.feed_back(w, upper, Format.parse("int3-g64"), 20, lines=lines, codes=codes, errors=errors)
    wide = torch.zeros(288, 4)
    with pytest.raises(ShapeError, match="288 columns under super-scales"):
        feedback.descend(
            Format.parse("int3-g16-super"),
            codes=wide,
            lines=(torch.ones(18, 4), torch.ones(18, 4)),
            units=torch.ones(4),
            error=wide,
            slope=wide,
            hessian=torch.eye(288),
        )
