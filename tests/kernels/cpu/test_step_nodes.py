"""Small operators of the engine have the bits of torch's, on every instruction set."""

import ctypes
import operator
from collections.abc import Callable, Iterator

import pytest
import torch
from support.tiers import tiers
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.kernels import ops
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.cpu.step import sum_lanes
from trilobite.kernels.ops import Kind

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the native library is not installed")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BINARY = {
    Kind.ADD: operator.add,
    Kind.SUBTRACT: operator.sub,
    Kind.MULTIPLY: operator.mul,
    Kind.DIVIDE: operator.truediv,
}
UNARY: dict[Kind, Callable[[Tensor], Tensor]] = {
    Kind.COPY: torch.clone,
    Kind.NEGATE: torch.neg,
    Kind.SQUARE: lambda x: x.pow(2),
    Kind.RSQRT: lambda x: x.abs().rsqrt(),
}


@pytest.fixture(params=tiers())
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    yield cpu.set_tier(request.param)
    cpu.set_tier(None)


def run(node: ops.StepNode | None) -> None:
    assert node is not None
    ops.run_nodes(ctypes.byref(node), 1)


def layouts(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Results and two operands that are broadcast, turned, cut out, long and short."""
    torch.manual_seed(1)
    for out, a, b in (
        (torch.empty(1, 1, 4099), torch.randn(1, 1, 4099), torch.randn(4099)),
        (torch.empty(1, 6, 1, 40), torch.randn(1, 6, 1, 40), torch.randn(1, 1, 1, 40)),
        (torch.empty(1, 6, 1, 24), torch.randn(1, 6, 1, 40)[..., 16:], torch.randn(1, 6, 1, 1)),
        (torch.empty(3, 5, 7), torch.randn(5, 3, 7).transpose(0, 1), torch.randn(7, 5, 3).permute(2, 1, 0)),
        (torch.empty(9, 3).T, torch.randn(3, 9), torch.randn(3, 1)),
    ):
        yield out.to(dtype), a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_operators_element_by_element(tier: str, dtype: torch.dtype) -> None:
    for out, a, b in layouts(dtype):
        for kind, call in BINARY.items():
            run(ops.elementwise(kind, out, a, b))
            assert torch.equal(out, call(a, b)), (kind, out.shape)
        for kind, call in UNARY.items():
            if kind == Kind.COPY or dtype == torch.float32:
                x = a.abs() if kind == Kind.RSQRT else a
                run(ops.elementwise(kind, out, x))
                assert torch.equal(out, call(x)), (kind, out.shape)


def test_a_number_and_conversions(tier: str) -> None:
    x, out = torch.randn(1000), torch.empty(1000)
    for kind, call in BINARY.items():
        run(ops.elementwise(kind, out, x, 1e-6))
        assert torch.equal(out, call(x, 1e-6)), kind
    wide = torch.cat(
        (torch.randn(5000) * 1e5, torch.tensor([0.0, -0.0, 1e-8, 6e-8, 1e-40, torch.inf, -torch.inf]))
    )
    for source in FLOATS:
        for target in FLOATS:
            a, made = wide.to(source), torch.empty(len(wide), dtype=target)
            run(ops.elementwise(Kind.COPY, made, a))
            assert torch.equal(made, a.to(target)), (source, target)


@pytest.mark.skipif(sum_lanes() is None, reason="torch adds up in an order that the library does not know")
@pytest.mark.parametrize(
    "width", [1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 96, 128, 200, 1000, 1408, 2048, 4096, 5120, 16383]
)
def test_sums_of_rows(tier: str, width: int) -> None:
    torch.manual_seed(width)
    for rows in (1, 2, 32) if width < 1000 else (1, 2):
        x = torch.randn(1, rows, width) * 100
        if x.numel() >= 1 << 15:
            continue
        out = torch.empty(1, rows, 1)
        run(ops.row_sums(out, x, float(width)))
        assert torch.equal(out, x.mean(-1, keepdim=True))
        run(ops.row_sums(out, x, 1.0))
        assert torch.equal(out, x.sum(-1, keepdim=True))


@pytest.mark.skipif(sum_lanes() is None, reason="torch adds up in an order that the library does not know")
def test_another_order_of_sums_is_noticed() -> None:
    torch.manual_seed(0)
    x, out = torch.randn(1, 4096) * 100, torch.empty(1)
    lanes = sum_lanes()
    assert lanes
    made = []
    for other in (4, 8, 16):
        run(ops.row_sums(out, x, 1.0, other))
        made.append(out.item())
    assert len(set(made)) == 3
    assert made[(4, 8, 16).index(lanes)] == x.sum(-1).item()


def test_what_the_library_does_not_do() -> None:
    x = torch.randn(8)
    assert ops.elementwise(Kind.ADD, torch.empty(8, dtype=torch.int64), x, x) is None
    assert (
        ops.elementwise(
            Kind.COPY, torch.empty(3, 3, 3, 3, 3), torch.randn(3, 3, 3, 3, 3).permute(4, 2, 0, 3, 1)
        )
        is None
    )
    assert ops.row_sums(torch.empty(1), torch.randn(1, 1 << 15), 1.0) is None
    assert ops.row_sums(torch.empty(4), torch.randn(8, 4).T, 1.0) is None


def test_rows_of_a_table_and_of_a_cache_are_checked() -> None:
    table, out, index = torch.randn(5, 16), torch.empty(1, 16), torch.tensor([3])
    run(ops.gather(out, table, index))
    assert torch.equal(out[0], table[3])
    for wrong in (-1, 5):
        index.fill_(wrong)
        with pytest.raises(ShapeError, match=f"row {wrong} of 5"):
            run(ops.gather(out, table, index))
    full = ops.StepCache(end=4, capacity=4)
    with pytest.raises(ShapeError, match="row 4 of 4"):
        run(ops.append_row(torch.randn(2, 16), torch.randn(2, 16), full))
    outside = torch.tensor([0, 7])
    pages = ops.StepCache(end=1, capacity=2, limit=7, rows=outside.data_ptr())
    with pytest.raises(ShapeError, match="row 7 of 7"):
        run(ops.append_row(torch.randn(2, 16), torch.randn(2, 16), pages))
    with pytest.raises(ShapeError, match="kind 99"):
        run(ops.StepNode(99))
