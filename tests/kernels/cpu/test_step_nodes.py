"""Small operators of the engine have the bits of torch's, on every instruction set."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.packing import lattice_weight, packed_weight, relative_error
from support.tiers import tiers
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.kernels import ops, reference
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.cpu.step import CURVES, FULL, Kind, has_curve, softmax_lanes, sum_lanes, takes_number

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


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def run(*nodes: ops.StepNode | None) -> None:
    made = [node for node in nodes if node is not None]
    assert len(made) == len(nodes) > 0
    ops.step.run_nodes(ops.step.program(made), len(made))


def layouts(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Results and two operands that are broadcast, turned, cut out, long and short; and as many as threads share."""
    torch.manual_seed(1)
    for out, a, b in (
        (torch.empty(1, 1, 4099), torch.randn(1, 1, 4099), torch.randn(4099)),
        (torch.empty(1, 6, 1, 40), torch.randn(1, 6, 1, 40), torch.randn(1, 1, 1, 40)),
        (torch.empty(1, 6, 1, 24), torch.randn(1, 6, 1, 40)[..., 16:], torch.randn(1, 6, 1, 1)),
        (torch.empty(3, 5, 7), torch.randn(5, 3, 7).transpose(0, 1), torch.randn(7, 5, 3).permute(2, 1, 0)),
        (torch.empty(9, 3).T, torch.randn(3, 9), torch.randn(3, 1)),
        (torch.empty(1, 50021), torch.randn(1, 50021), torch.randn(50021)),
        (torch.empty(33, 1, 1040), torch.randn(33, 1, 1200)[..., 160:], torch.randn(33, 1, 1)),
        (
            torch.empty(1, 3, 7, 2000),
            torch.randn(7, 3, 2000).transpose(0, 1)[None],
            torch.randn(1, 3, 1, 2000),
        ),
    ):
        yield out.to(dtype), a.to(dtype), b.to(dtype)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_operators_element_by_element(tier: str, dtype: torch.dtype) -> None:
    for out, a, b in layouts(dtype):
        for kind, call in BINARY.items():
            run(ops.step.elementwise(kind, out, a, b))
            assert torch.equal(out, call(a, b)), (kind, out.shape)
        for kind, call in UNARY.items():
            if kind == Kind.COPY or dtype == torch.float32:
                x = a.abs() if kind == Kind.RSQRT else a
                run(ops.step.elementwise(kind, out, x))
                assert torch.equal(out, call(x)), (kind, out.shape)


def test_a_number_and_conversions(tier: str) -> None:
    x, out = torch.randn(1000), torch.empty(1000)
    for kind, call in BINARY.items():
        run(ops.step.elementwise(kind, out, x, 1e-6))
        assert torch.equal(out, call(x, 1e-6)), kind
    wide = torch.cat(
        (torch.randn(5000) * 1e5, torch.tensor([0.0, -0.0, 1e-8, 6e-8, 1e-40, torch.inf, -torch.inf]))
    )
    for source in FLOATS:
        for target in FLOATS:
            a, made = wide.to(source), torch.empty(len(wide), dtype=target)
            run(ops.step.elementwise(Kind.COPY, made, a))
            assert torch.equal(made, a.to(target)), (source, target)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.skipif(sum_lanes() is None, reason="torch adds up in an order that the library does not know")
@pytest.mark.parametrize(
    "width", [1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 96, 128, 200, 1000, 1408, 2048, 4096, 5120, 16383]
)
def test_sums_of_rows(tier: str, width: int) -> None:
    torch.manual_seed(width)
    for rows in (1, 2, 5, 32):
        x = torch.randn(1, rows, width) * 100
        out = torch.empty(1, rows, 1)
        run(ops.step.row_sums(out, x, float(width)))
        assert torch.equal(out, x.mean(-1, keepdim=True))
        run(ops.step.row_sums(out, x, 1.0))
        assert torch.equal(out, x.sum(-1, keepdim=True))


@pytest.mark.skipif(sum_lanes() is None, reason="torch adds up in an order that the library does not know")
def test_rows_whose_sums_torch_shares_among_threads() -> None:
    """As many values as make torch do so: each sum is still one thread's, however few they are."""
    threads = torch.get_num_threads()
    try:
        for torchs in (1, 2, 3):
            torch.set_num_threads(torchs)
            for rows, width in ((2, 16384), (2, 40000), (8, 4096), (33, 5121)):
                x, out = torch.randn(rows, width) * 100, torch.empty(rows, 1)
                run(ops.step.row_sums(out, x, float(width)))
                assert torch.equal(out, x.mean(-1, keepdim=True)), (torchs, rows, width)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(sum_lanes() is None, reason="torch adds up in an order that the library does not know")
def test_another_order_of_sums_is_noticed() -> None:
    torch.manual_seed(0)
    x, out = torch.randn(1, 4096) * 100, torch.empty(1)
    lanes = sum_lanes()
    assert lanes
    made = []
    for other in (4, 8, 16):
        run(ops.step.row_sums(out, x, 1.0, other))
        made.append(out.item())
    assert len(set(made)) == 3
    assert made[(4, 8, 16).index(lanes)] == x.sum(-1).item()


@pytest.mark.skipif(softmax_lanes() is None, reason="torch's softmax has bits that the library does not know")
@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 9, 15, 16, 17, 60, 64, 128, 160, 500])
def test_softmax_of_rows(tier: str, width: int) -> None:
    torch.manual_seed(width)
    x = torch.cat([torch.randn(40, width) * scale for scale in (1, 10, 80)])
    x[5] = 2.5
    if width > 1:
        x[3, width // 2] = -torch.inf
    out = torch.empty_like(x)
    run(ops.step.softmax_rows(out, x))
    assert torch.equal(out, x.softmax(-1))


@pytest.mark.skipif(softmax_lanes() is None, reason="torch's softmax has bits that the library does not know")
def test_another_order_of_a_softmax_is_noticed() -> None:
    torch.manual_seed(0)
    x, out = torch.randn(100, 96) * 4, torch.empty(100, 96)
    same = []
    for lanes in (4, 8, 16):
        run(ops.step.softmax_rows(out, x, lanes))
        same.append(torch.equal(out, x.softmax(-1)))
    assert same == [lanes == softmax_lanes() for lanes in (4, 8, 16)]


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_softmax_of_short_rows(tier: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for width in range(1, 8):
        x = torch.randn(20_000, width).mul_(5).to(dtype)
        out = torch.empty_like(x)
        node = ops.step.softmax_rows(out, x)
        if node is None:
            pytest.skip("torch's softmax has bits that the library does not know")
        run(node)
        assert torch.equal(out, x.softmax(-1))


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("number", [12.0, 0.22, 3, 1e-6])
def test_numbers_beside_16_bits(tier: str, dtype: torch.dtype, number: float) -> None:
    """Where the library says that it has torch's bits; products and quotients are among them."""
    x = torch.randn(1000).mul_(10).to(dtype)
    for kind, call in BINARY.items():
        if takes_number(kind, dtype, number):
            out = torch.empty_like(x)
            run(ops.step.elementwise(kind, out, x, number))
            assert torch.equal(out, call(x, number)), kind
        else:
            assert kind in (Kind.ADD, Kind.SUBTRACT)
            assert ops.step.elementwise(kind, torch.empty_like(x), x, number) is None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_dense_product_with_a_bias(tier: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, bias = (torch.randn(*shape).to(dtype) for shape in ((1, 1, 96), (32, 96), (32,)))
    out = torch.empty(1, 1, 32, dtype=dtype)
    node = ops.step.dense_product(out, x, w, bias)
    run(node)
    assert torch.equal(out, ops.dense_linear(x, w, bias))
    node.c.bytes -= 1
    with pytest.raises(ShapeError, match="bias"):
        ops.step.program([node])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("width", "k"), [(1, 1), (8, 2), (60, 4), (64, 6), (128, 8), (600, 9), (600, 600)])
def test_largest_of_rows(width: int, k: int, ordered: bool, dtype: torch.dtype) -> None:
    """Equal values, and what is no number, in torch's order."""
    torch.manual_seed(width)
    x = torch.cat((torch.randn(9, width), torch.randint(4, (9, width)), torch.zeros(1, width))).to(dtype)
    x[2, width // 2] = torch.nan
    values, places = torch.empty(len(x), k, dtype=dtype), torch.empty(len(x), k, dtype=torch.int64)
    node = ops.step.top_of_rows(values, places, x, ordered=ordered)
    if node is None:
        pytest.skip("torch chooses in an order that the library does not know")
    run(node)
    expected = x.topk(k, sorted=ordered)
    assert torch.equal(places, expected.indices)
    assert torch.equal(values.nan_to_num(7), expected.values.nan_to_num(7))


@pytest.mark.parametrize("kind", CURVES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_curves(tier: str, dtype: torch.dtype, kind: Kind) -> None:
    if not has_curve(kind, dtype):
        pytest.skip("torch's has bits that the library does not know")
    torch.manual_seed(0)
    x = torch.randn(7, FULL * 5).mul_(20).to(dtype)
    x[0, :4] = torch.tensor([0.0, -0.0, -1000.0, 1000.0])
    out = torch.empty_like(x)
    run(ops.step.curve(kind, out, x))
    assert torch.equal(out, CURVES[kind](x))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_truths_and_what_fills_their_places(tier: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 700).to(dtype)
    x[:, ::3], x[0, 1], x[0, 2] = 0, torch.nan, -0.0
    found, inverted, filled = (
        torch.empty_like(x, dtype=torch.bool),
        torch.empty(5, 700, dtype=torch.bool),
        x + 1,
    )
    run(ops.step.truth(found, x))
    assert torch.equal(found, x != 0)
    run(ops.step.truth(inverted, found, inverted=True))
    assert torch.equal(inverted, ~found)
    for number in (0.0, -torch.inf, 0.3):
        run(ops.step.fill(filled, x, found[:, :1], number))
        assert torch.equal(filled.nan_to_num(7), x.masked_fill(found[:, :1], number).nan_to_num(7))
    assert ops.step.fill(filled, x, x, 0.0) is None
    assert ops.step.truth(inverted, x, inverted=True) is None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("lead", [(), (1,), (3, 2)])
def test_values_at_places(dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(*lead, 70).to(dtype)
    index = torch.randint(70, (*lead, 9))
    out, wide = torch.empty(*lead, 9, dtype=dtype), torch.randn(*lead, 70)
    run(ops.step.pick(out, x, index))
    assert torch.equal(out, x.gather(-1, index))
    expected = wide.scatter(-1, index, 0.5)
    run(ops.step.scatter(wide, index, 0.5))
    assert torch.equal(wide, expected)
    for wrong in (-1, 70):
        index[..., 4] = wrong
        before = wide.clone()
        for node in (ops.step.pick(out, x, index), ops.step.scatter(wide, index, 1.0)):
            with pytest.raises(ShapeError, match=f"value {wrong} of 70"):
                run(node)
        assert torch.equal(wide, before)
    assert ops.step.scatter(wide.double(), index, 1.0) is None
    assert ops.step.pick(out, x, index[..., :3]) is None


def test_positions_become_numbers() -> None:
    x = torch.tensor([[0, 1, 4097, (1 << 24) + 1, (1 << 40) + 12345]])
    for positions in (x, x[:, :1, None], x[0, 3]):
        out = torch.empty(positions.shape)
        run(*ops.step.numbers(out, positions) or [])
        assert torch.equal(out, positions.float())
    assert ops.step.numbers(torch.empty(5), x[0].flip(0)[::2]) is None


def test_rows_outside_of_their_memory_are_refused() -> None:
    x, values, places = torch.randn(3, 64), torch.empty(3, 6), torch.empty(3, 6, dtype=torch.int64)
    for node, wrong in (
        (ops.step.softmax_rows(torch.empty(3, 64), x, 8), {"lanes": 5}),
        (ops.step.softmax_rows(torch.empty(3, 64), x, 8), {"shape": (1, 1, 4, 64)}),
        (ops.step.top_of_rows(values, places, x, ordered=True), {"lanes": 65}),
        (ops.step.top_of_rows(values, places, x, ordered=True), {"shape": (1, 1, 1, 1025)}),
        (ops.step.top_of_rows(values, places, x, ordered=True), {"lanes": 7}),
        (ops.step.top_of_rows(values, places, x, ordered=True), {"shape": (1, 1, 1 << 61, 64)}),
        ((ops.step.numbers(torch.empty(1), torch.tensor(3)) or [])[0], {"out": ops.StepNode().out}),
        (ops.step.pick(values, x, places), {"lanes": 7}),
        (ops.step.pick(values, x, places), {"shape": (1, 1, 4, 64)}),
        (ops.step.scatter(x, places, 1.0), {"shape": (1, 1, 3, 65)}),
        (ops.step.fill(x + 1, x, x > 0, 1.0), {"b": ops.StepNode().b}),
    ):
        assert node is not None
        ops.step.program([node])
        for name, value in wrong.items():
            setattr(node, name, value)
        with pytest.raises(ShapeError, match="node 0"):
            ops.step.program([node])


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX2", reason="another kernel of torch's")
def test_trials_find_the_bits_of_torch_on_avx2(tier: str) -> None:
    """Where a trial fails, torch's operators stay and tests skip: so a wrong node would go unseen."""
    for trial in (softmax_lanes, sum_lanes, has_curve, takes_number):
        trial.cache_clear()
    assert softmax_lanes() == sum_lanes() == 8
    assert softmax_lanes(torch.bfloat16)
    assert softmax_lanes(torch.float16)
    assert all(takes_number(Kind.MULTIPLY, dtype, 0.22) for dtype in FLOATS)
    assert all(has_curve(kind, dtype) for kind in CURVES for dtype in FLOATS)


def test_what_the_library_does_not_do() -> None:
    x = torch.randn(8)
    assert (
        ops.step.softmax_rows(torch.empty(2, 8, dtype=torch.bfloat16), torch.randn(2, 8).bfloat16(), 8)
        is None
    )
    assert ops.step.numbers(torch.empty(1, dtype=torch.float64), torch.tensor(3)) is None
    places = torch.empty(2, 3, dtype=torch.int64)
    assert ops.step.top_of_rows(torch.empty(2, 3), places, torch.randn(2, 8).half(), ordered=True) is None
    assert ops.step.top_of_rows(torch.empty(2, 3), places, torch.randn(2, 1025), ordered=True) is None
    assert ops.step.elementwise(Kind.ADD, x.double(), x.double(), 1.0) is None
    assert ops.step.curve(Kind.SWISH, torch.empty(FULL - 1), torch.randn(FULL - 1)) is None
    assert ops.step.elementwise(Kind.ADD, torch.empty(8, dtype=torch.int64), x, x) is None
    assert (
        ops.step.elementwise(
            Kind.COPY, torch.empty(3, 3, 3, 3, 3), torch.randn(3, 3, 3, 3, 3).permute(4, 2, 0, 3, 1)
        )
        is None
    )
    assert ops.step.row_sums(torch.empty(1), torch.randn(1, 1 << 15), 1.0) is None
    assert ops.step.row_sums(torch.empty(4), torch.randn(8, 4).T, 1.0) is None


def test_rows_of_a_table_and_of_a_cache_are_checked() -> None:
    table, out, index = torch.randn(5, 16), torch.empty(3, 1, 16), torch.tensor([[3], [0], [4]])
    run(*ops.step.gather(out, table, index))
    assert torch.equal(out, table[index])
    for wrong in (-1, 5):
        index[2] = wrong
        with pytest.raises(ShapeError, match=f"row {wrong} of 5"):
            run(*ops.step.gather(out, table, index))
    full = ops.StepCache(end=4, capacity=4)
    with pytest.raises(ShapeError, match="row 4 of 4"):
        run(ops.step.append_row(torch.randn(2, 16), torch.randn(2, 16), full))
    outside, keys = torch.tensor([0, 7]), torch.zeros(7, 2, 16)
    pages = ops.StepCache(
        keys.data_ptr(), keys.data_ptr(), outside.data_ptr(), 0, 1, 2, 7, 32, 16, keys.nbytes
    )
    with pytest.raises(ShapeError, match="row 7 of 7"):
        run(ops.step.append_row(torch.randn(2, 16), torch.randn(2, 16), pages))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": 99}, "kind 99"),
        ({"kind": -1}, "kind -1"),
        ({"kind": Kind.LINEAR, "digits": 3}, "no matrix"),
        ({"kind": Kind.EXPERTS}, "no arguments"),
        ({"shape": (1, 1, 0, 24)}, "operand"),
        ({"shape": (1, 1, 6, -1)}, "operand"),
        ({"shape": (1, 1, 7, 24)}, "of 576"),
        ({"shape": (1 << 40, 1 << 40, 6, 24)}, "too many elements"),
        ({"out.stride": (0, 0, 24, 2)}, "result: 668 bytes of 576"),
        ({"a.stride": (0, 0, 1 << 62, 1)}, "operand"),
        ({"a.stride": (0, 0, -24, 1)}, "operand"),
        ({"a.bytes": 575}, "operand: 576 bytes of 575"),
        ({"a.dtype": 4}, "element type 4"),
        ({"a.data": None}, "operand"),
        ({"out.data": 1}, "result"),
        ({"out.data": "a", "out.stride": (0, 0, 24, 1)}, None),
        ({"out.data": "b"}, "shares memory"),
    ],
    ids=str,
)
def test_broken_nodes_are_refused(change: dict[str, Any], why: str | None) -> None:
    """Before anything is touched; in place is no fault."""
    out, a, b = torch.zeros(6, 24), torch.randn(6, 24), torch.randn(6, 1)
    node = ops.step.elementwise(Kind.ADD, out, a.as_strided((6, 24), (24, 1)), b)
    assert node is not None
    node.shape, node.out.stride, node.a.stride = (1, 1, 6, 24), (0, 0, 24, 1), (0, 0, 24, 1)
    node.b.stride = (0, 0, 1, 0)
    for name, value in change.items():
        holder, _, field = name.rpartition(".")
        value = getattr(node, value).data if isinstance(value, str) else value
        setattr(getattr(node, holder) if holder else node, field, value)
    if why is None:
        ops.step.program([node])
        return
    with pytest.raises(ShapeError, match=f"node 1 of 2: .*{why}"):
        ops.step.program([ops.step.elementwise(Kind.COPY, torch.empty(2), torch.ones(2)), node])
    assert not out.any()


def test_a_cache_has_room_for_its_rows() -> None:
    keys, rows = torch.zeros(8, 2, 16), torch.arange(8)
    cache = ops.StepCache(keys.data_ptr(), keys.data_ptr(), rows.data_ptr(), 0, 3, 8, 8, 32, 16, keys.nbytes)
    one, out = torch.ones(2, 16), torch.empty(2, 16)
    node = ops.step.append_row(one, one, cache)
    run(node)
    assert keys[3].all()
    assert keys.sum() == 32
    for name, wrong in (
        ("limit", 9),
        ("row_stride", 33),
        ("head_stride", 1 << 61),
        ("k", None),
        ("rows", None),
    ):
        right = getattr(cache, name)
        setattr(cache, name, wrong)
        for made in (node, ops.step.attend_cached(out, one, 2, cache, 1.0)):
            with pytest.raises(ShapeError, match="cache"):
                run(made)
        setattr(cache, name, right)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_texts_that_attend_side_by_side(tier: str, dtype: torch.dtype) -> None:
    """Neighbours are one call, on threads, with the bits that each has alone; what reads a result waits for it."""
    heads, kv_heads, width, lengths = 6, 2, 48, (700, 1, 33, 256, *range(2, 66))
    memory, caches, held = torch.randn(2, 5000, kv_heads, width).to(dtype), [], []
    for i, length in enumerate(lengths):
        rows = torch.randperm(5000)[:length]
        held.append(rows)
        keys, values = memory
        native = ops.StepCache(keys.data_ptr(), values.data_ptr(), rows.data_ptr(), 0, length, length)
        native.limit, native.row_stride, native.head_stride = 5000, kv_heads * width, width
        native.first, native.bytes = min(i, length - 1), keys.nbytes
        caches.append(native)
    sinks, bias = torch.randn(len(lengths), heads), torch.randn(heads, 9)
    query = torch.randn(len(lengths), heads, width).to(dtype)
    made, alone = torch.zeros_like(query), torch.zeros_like(query)

    def nodes(out: torch.Tensor) -> list[Any]:
        return [
            ops.step.attend_cached(
                out[i],
                query[i],
                kv_heads,
                caches[i],
                0.1 + i / 100,
                sinks[i] if i % 3 else None,
                bias if i % 2 else None,
            )
            for i in range(len(lengths))
        ]

    run(*nodes(made))
    for node in nodes(alone):
        run(node)
    assert torch.equal(made, alone)
    keys, values = (t[held[0]].float().repeat_interleave(heads // kv_heads, 1) for t in memory)
    scores = torch.einsum("hd,shd->hs", query[0].float(), keys) * 0.1
    expected = torch.einsum("hs,shd->hd", scores.softmax(-1), values)
    assert (made[0].float() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)
    chain = torch.zeros(2, heads, width).to(dtype)
    run(
        ops.step.attend_cached(chain[0], query[0], kv_heads, caches[0], 0.1),
        ops.step.attend_cached(chain[1], chain[0], kv_heads, caches[2], 0.1),
    )
    first, after = chain[0].clone(), torch.zeros_like(chain[1])
    run(ops.step.attend_cached(after, first, kv_heads, caches[2], 0.1))
    assert torch.equal(chain[1], after)
    caches[1].rows = None
    with pytest.raises(ShapeError, match="cache"):
        run(*nodes(made))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matrices_that_read_the_same(tier: str, dtype: torch.dtype) -> None:
    """Neighbours are one call, on threads: each as the reference says, with the bits that it has alone."""
    k = 192
    weights = [
        packed_weight(1200, k, "int8-g64"),
        packed_weight(16, k, "int4-g64-sym", rank=3),
        packed_weight(130, k, "int3-g64-dq", rank=20, kind="int8"),
        packed_weight(33, k, "int3-g64"),
        lattice_weight(64, k, "e8p-3", rank=5),
        packed_weight(900, k, "int4-g32"),
        packed_weight(50, k, "int8-g32", rank=40),
        packed_weight(48, k, "int2-g16"),
        *(packed_weight(16 * i, k, "int3-g64", rank=i % 2, seed=i) for i in range(1, 12)),
    ]
    biases = [torch.randn(w.shape[0]) if i % 2 else None for i, w in enumerate(weights)]
    calls = [ops.bind_linear(w, bias) for w, bias in zip(weights, biases, strict=True)]
    for tokens in (1, 3):
        x = torch.randn(tokens, k).to(dtype)
        made = [torch.full((tokens, w.shape[0]), 7.0, dtype=dtype) for w in weights]
        nodes = [call.node(x, y) for call, y in zip(calls, made, strict=True) if call is not None]
        ops.step.run_nodes(ops.step.program(nodes), len(weights))
        for y, w, bias, call in zip(made, weights, biases, calls, strict=True):
            assert call is not None
            assert torch.equal(y, call(x))
            assert relative_error(y, reference.linear(x, w, bias)) < (
                1e-5 if dtype == torch.float32 else 6e-3
            )
