"""Products with dense matrices of few rows, against float64, on every instruction set."""

from collections.abc import Iterator

import pytest
import torch
from support.tiers import tiers
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.kernels import ops
from trilobite.kernels.cpu import dense
from trilobite.kernels.cpu import engine as cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the native library is not installed")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 128, 2048), (3, 8, 4096), (16, 60, 100), (1, 1, 7), (2, 17, 33), (64, 3, 777), (37, 13, 1024))
"""Tokens, N, K."""


@pytest.fixture(params=tiers())
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    yield cpu.set_tier(request.param)
    cpu.set_tier(None)


def operands(dtype: torch.dtype, tokens: int, rows: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    return tuple(  # type: ignore[return-value]
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((tokens, k), (rows, k), (rows,))
    )


def close(y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> bool:
    """Within one rounding to the element type, and of each sum in float32 one for every term that a lane adds up."""
    x, w, k = x.double(), w.double(), w.shape[1]
    exact = x @ w.T + (0 if bias is None else bias.double())
    scale = x.abs() @ w.abs().T + (0 if bias is None else bias.double().abs())
    lane = k // 16 + k % 16 + 5
    bound = torch.finfo(y.dtype).eps / 2 * exact.abs() + lane * 2**-24 * 1.01 * scale + 2**-25
    return bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_against_float64(tier: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x, w, bias = operands(dtype, *shape)
        y = ops.dense_linear(x, w)
        assert y.dtype == dtype
        assert close(y, x, w)
        assert close(ops.dense_linear(x, w, bias), x, w, bias)
        assert not close(y + 0.02 * y.abs().max(), x, w)
        dropped = x.clone()
        dropped[:, int(x[0].abs().argmax())] = 0
        assert not close(ops.dense_linear(dropped, w), x, w)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_other_tokens_and_threads_change_no_bit(tier: str, dtype: torch.dtype) -> None:
    """Nor does the way in which it is called: as a node of a step."""
    threads = torch.get_num_threads()
    for shape in SHAPES:
        x, w, _ = operands(dtype, *shape)
        together = ops.dense_linear(x[None], w)[0]
        try:
            torch.set_num_threads(3)
            for one, row in zip(x, together, strict=True):
                assert torch.equal(ops.dense_linear(one, w), row)
        finally:
            torch.set_num_threads(threads)
        out = torch.empty_like(together)
        ops.step.run_nodes(ops.step.program([ops.step.dense_product(out, x, w)]), 1)
        assert torch.equal(out, together)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_matrix_for_each_head(tier: str, dtype: torch.dtype) -> None:
    """Each as if it were alone, also as a node of a step."""
    for heads, shape in ((1, (1, 128, 96)), (5, (3, 17, 33)), (16, (1, 40, 512))):
        parts = [operands(dtype, *shape) for _ in range(heads)]
        x, w = (torch.stack([p[i] * (h + 1) for h, p in enumerate(parts)]) for i in (0, 1))
        y = ops.dense_heads(x, w)
        for h in range(heads):
            assert close(y[h], x[h], w[h])
            assert torch.equal(y[h], ops.dense_linear(x[h], w[h]))
        assert heads == 1 or not close(y[1], x[1], w[0])
        out = torch.empty_like(y)
        ops.step.run_nodes(ops.step.program([ops.step.dense_product(out, x, w)]), 1)
        assert torch.equal(out, y)
    for wrong in (w[:, :, :8], w[1:], w.double(), w.transpose(1, 2)):
        with pytest.raises(ShapeError, match="dense"):
            ops.dense_heads(x, wrong)


@pytest.mark.parametrize("tiles", [True, False])
def test_many_tokens_where_torch_has_no_tiles(monkeypatch: pytest.MonkeyPatch, tiles: bool) -> None:
    """Of 16 bits, and not more than memory should be taken for."""
    monkeypatch.setattr(dense, "TILES", tiles)
    monkeypatch.setattr(dense, "MOST_VALUES", 300 * 32)
    for dtype in (torch.bfloat16, torch.float16):
        x, w, _ = operands(dtype, 300, 8, 32)
        assert ops.multiplies(x, w) is not tiles
        assert not ops.multiplies(torch.cat((x, x[:1])), w)
        if not tiles:
            assert close(ops.dense_linear(x, w), x, w)
    assert not ops.multiplies(*operands(torch.float32, 65, 8, 32)[:2])


def test_what_it_does_not_multiply() -> None:
    x, w = torch.randn(2, 32), torch.randn(8, 32)
    assert ops.multiplies(x, w)
    for other, matrix in (
        (x.half(), w),
        (x[:, :16], w),
        (torch.randn(65, 32), w),
        (x, torch.randn(32, 8).T),
        (x[:0], w),
        (x.double(), w.double()),
        (x.to("meta"), w),
    ):
        assert not ops.multiplies(other, matrix)
    for wrong in (w.half(), w[:, :16]):
        with pytest.raises(ShapeError, match="dense"):
            ops.dense_linear(x, wrong)
    with pytest.raises(ShapeError, match="dense"):
        ops.dense_linear(x, w, torch.zeros(7))
    out, bad = torch.empty(2, 8), torch.randn(2, 32)
    node = ops.step.dense_product(out, bad, w)
    node.shape[3] = 33
    with pytest.raises(ShapeError, match="operand: 264 bytes of 256"):
        ops.step.program([node])


def test_under_the_compiler() -> None:
    x, w = torch.randn(2, 32), torch.randn(8, 32)
    compiled = torch.compile(ops.dense_linear, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, w), ops.dense_linear(x, w))
    x, w = torch.randn(3, 2, 32), torch.randn(3, 8, 32)
    compiled = torch.compile(ops.dense_heads, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, w), ops.dense_heads(x, w))
