"""Nodes of a decoding step whose tensors keep their places, which the library runs one after the other.

Small operators have the bits of torch's: each rounds its result to its element type, and sums are added up in the order
of torch's kernel on this processor, which `sum_lanes` finds out by trial.
"""

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trilobite.kernels.cpu import native
from trilobite.kernels.cpu.engine import team
from trilobite.kernels.cpu.matrix import DTYPES, dtype_code
from trilobite.kernels.cpu.operands import TYPES, dense_operand, merged, operand

_lib, _ = native.load()


class Kind(IntEnum):
    """`trilobite_step_kind`."""

    COPY = 0
    ADD = 1
    SUBTRACT = 2
    MULTIPLY = 3
    DIVIDE = 4
    NEGATE = 5
    SQUARE = 6
    RSQRT = 7
    SWISH = 8
    LOGISTIC = 9
    FILL = 10
    SUM = 11
    SOFTMAX = 12
    TOP = 13
    NUMBER = 14
    GATHER = 15
    PICK = 16
    SCATTER = 17
    LINEAR = 18
    EXPERTS = 19
    APPEND = 20
    ATTEND = 21
    DENSE = 22
    CONVOLVE = 23
    DELTA = 24
    SCAN = 25


MOST_SUMMED = 1 << 15
"""From so many values on torch shares one sum, and curves, among its threads; of several sums each is one thread's."""
SHORT = 7
"""Values of 16 bits that a row of a softmax may have: torch takes longer ones in vectors, and otherwise."""
SHORT_ROWS = 100_000
"""To tell other sums apart: after the rounding to 16 bits one row of thousands shows them."""
WIDEST = 1024
"""Values of a row of which the library takes the largest."""
FULL = 64
"""Values, or multiples of them, that fill torch's vectors: what is left it computes one by one, and otherwise."""
CURVES: dict[Kind, Callable[[Tensor], Tensor]] = {
    Kind.SWISH: torch.nn.functional.silu,
    Kind.LOGISTIC: torch.sigmoid,
}


def elementwise(
    kind: Kind, out: Tensor, a: Tensor, b: Tensor | float | None = None
) -> native.StepNode | None:
    """out = a op b, a and b broadcast to out; None where the library does not do that with torch's bits.

    Types: fp32, fp16, bf16; numbers beside those that `takes_number`.
    """
    if out.dtype not in DTYPES or a.dtype not in DTYPES:
        return None
    if not isinstance(b, int | float):
        return _mapped(kind, out, a, b)
    return _mapped(kind, out, a, number=float(b)) if takes_number(kind, a.dtype, float(b)) else None


def curve(kind: Kind, out: Tensor, a: Tensor) -> native.StepNode | None:
    """out = one of CURVES of a, both dense and of one type; None where the library has not torch's bits."""
    fits = out.is_contiguous() and a.is_contiguous() and out.dtype == a.dtype and out.dtype in DTYPES
    if not fits or out.numel() % FULL or out.numel() > MOST_SUMMED or not has_curve(kind, out.dtype):
        return None
    return _mapped(kind, out, a)


def truth(out: Tensor, a: Tensor, *, inverted: bool = False) -> native.StepNode | None:
    """out, bool, = a != 0, or inverted a == 0. a: bool, or if not inverted fp32, fp16 or bf16; None for other types."""
    if out.dtype != torch.bool or (inverted and a.dtype != torch.bool):
        return None
    # 1 less than a truth is 0, what is false.
    return _mapped(Kind.SUBTRACT, out, a, number=1.0) if inverted else _mapped(Kind.COPY, out, a)


def fill(out: Tensor, a: Tensor, mask: Tensor, number: float) -> native.StepNode | None:
    """out = a, and `number` where the mask, bool, is true; None for types beside fp32, fp16 and bf16, and mixed ones."""
    if mask.dtype != torch.bool or a.dtype != out.dtype or out.dtype not in DTYPES:
        return None
    return _mapped(Kind.FILL, out, a, mask, number)


def _mapped(
    kind: Kind, out: Tensor, a: Tensor, b: Tensor | None = None, number: float = 0.0
) -> native.StepNode | None:
    operands = [out, a.expand(out.shape), *([] if b is None else [b.expand(out.shape)])]
    if any(t.dtype not in TYPES or not t.is_cpu for t in operands) or not out.numel():
        return None
    sizes, rows = merged(out.shape, [t.stride() for t in operands])
    if len(sizes) > native.DIMENSIONS:
        return None
    missing = native.DIMENSIONS - len(sizes)
    parts = [
        operand(t, (*[0] * missing, *row), TYPES[t.dtype]) for t, row in zip(operands, rows, strict=True)
    ]
    return native.StepNode(kind, (*[1] * missing, *sizes), *parts, number=number)


def row_sums(out: Tensor, a: Tensor, number: float, lanes: int | None = None) -> native.StepNode | None:
    """out = a.sum(-1) / number with torch's bits; None where the library does not do that.

    out: [..] or [.., 1] and a: [.., N], dense fp32    lanes: default those of torch's kernel
    """
    lanes = lanes or sum_lanes()
    fits = out.numel() * a.shape[-1] == a.numel() > 0 and (out.numel() > 1 or a.numel() < MOST_SUMMED)
    if lanes is None or not fits or not a.is_contiguous() or not out.is_contiguous():
        return None
    if not a.dtype == out.dtype == torch.float32:
        return None
    shape = 1, 1, out.numel(), a.shape[-1]
    operands = (operand(t, (0, 0, step, 1)) for t, step in ((out, 1), (a, a.shape[-1])))
    return native.StepNode(Kind.SUM, shape, *operands, lanes=lanes, number=number)


def softmax_rows(out: Tensor, a: Tensor, lanes: int | None = None) -> native.StepNode | None:
    """out = softmax of a over the last dimension with torch's bits; None where the library does not do that.

    out, a: [.., N], dense fp32, or with N up to SHORT of 16 bits    lanes: default those of torch's kernel
    """
    if a.dtype == torch.float32:
        lanes = lanes or softmax_lanes()
    else:
        known = a.dtype in DTYPES and a.dim() and a.shape[-1] <= SHORT
        lanes = lanes or softmax_lanes(a.dtype) if known else None
    fits = out.shape == a.shape and out.dtype == a.dtype and a.dim() and out.numel()
    if lanes is None or not fits or not a.is_contiguous() or not out.is_contiguous():
        return None
    shape = 1, 1, a.numel() // a.shape[-1], a.shape[-1]
    return native.StepNode(Kind.SOFTMAX, shape, dense_operand(out), dense_operand(a), lanes=lanes)


def top_of_rows(values: Tensor, places: Tensor, a: Tensor, *, ordered: bool) -> native.StepNode | None:
    """values, places = a.topk(k, sorted=ordered); None where the library does not do that.

    values: [.., k], dense    places: [.., k], dense int64    a: [.., N], dense, of the type of values, N up to WIDEST
    """
    dense = values.is_contiguous() and places.is_contiguous() and a.is_contiguous()
    known = a.dtype in DTYPES and values.dtype == a.dtype and a.dim() and a.shape[-1] <= WIDEST
    if not dense or not known or not values.numel() or not _chooses(a.dtype):
        return None
    return _top(values, places, a, ordered)


def _top(values: Tensor, places: Tensor, a: Tensor, ordered: bool) -> native.StepNode:
    shape = 1, 1, a.numel() // a.shape[-1], a.shape[-1]
    parts = dense_operand(values), dense_operand(a), operand(places)
    return native.StepNode(Kind.TOP, shape, *parts, lanes=values.shape[-1], number=float(ordered))


def numbers(out: Tensor, a: Tensor) -> list[native.StepNode] | None:
    """out, dense fp32, = a, as many dense int64; None for other types."""
    fits = out.dtype == torch.float32 and a.dtype == torch.int64 and out.numel() == a.numel() > 0
    if not fits or not (out.is_contiguous() and a.is_contiguous()):
        return None
    pairs = zip(out.view(-1, 1), a.view(-1, 1), strict=True)
    return [
        native.StepNode(Kind.NUMBER, (), dense_operand(to), native.Operand(), operand(t)) for to, t in pairs
    ]


def gather(out: Tensor, table: Tensor, index: Tensor) -> list[native.StepNode]:
    """out [.., width] = the rows of a table [rows, width] that index [..] int64 says; all dense."""
    rows, width = table.shape
    shape = 1, 1, rows, width * out.element_size()
    pairs = zip(out.view(-1, width), index.view(-1, 1), strict=True)
    return [native.StepNode(Kind.GATHER, shape, operand(to), operand(table), operand(i)) for to, i in pairs]


def pick(out: Tensor, a: Tensor, index: Tensor) -> native.StepNode | None:
    """out = a.gather(-1, index). out, index: [.., k]    a: [.., N], of the type of out, N up to WIDEST

    All dense, index int64; None for others.
    """
    known = out.dtype == a.dtype and a.dtype in DTYPES and out.shape == index.shape
    return _at_places(Kind.PICK, dense_operand(a), out, a, index) if known and _fit(out, a, index) else None


def scatter(out: Tensor, index: Tensor, number: float) -> native.StepNode | None:
    """out.scatter_(-1, index, number). out: [.., N], fp32, N up to WIDEST    index: [.., k], int64; both dense."""
    if out.dtype != torch.float32 or not _fit(out, out, index):
        return None
    return _at_places(Kind.SCATTER, native.Operand(), out, out, index, number)


def _fit(out: Tensor, a: Tensor, index: Tensor) -> bool:
    dense = all(t.is_contiguous() and t.dim() and t.numel() for t in (out, a, index))
    wide = max(a.shape[-1], index.shape[-1]) <= WIDEST if dense else False
    return wide and index.dtype == torch.int64 and index.shape[:-1] == a.shape[:-1]


def _at_places(
    kind: Kind, source: native.Operand, out: Tensor, wide: Tensor, index: Tensor, number: float = 0.0
) -> native.StepNode:
    shape = 1, 1, wide.numel() // wide.shape[-1], wide.shape[-1]
    parts = dense_operand(out), source, operand(index)
    return native.StepNode(kind, shape, *parts, lanes=index.shape[-1], number=number)


def dense_product(out: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> native.StepNode:
    """out = x W^T + bias. x: [..., K], w: [N, K], bias: [N], out: [..., N], or those of heads; dense, of one dtype.

    Of heads: x [heads, T, K], w [heads, N, K] and out [heads, T, N]. Raises ShapeError.
    """
    heads, (rows, k) = (len(w) if w.dim() == 3 else 1), w.shape[-2:]
    shape = heads, x.numel() // (heads * k), rows, k
    given = (out, x, w) if bias is None else (out, x, w, bias)
    return native.StepNode(Kind.DENSE, shape, *map(dense_operand, given))


def append_row(key: Tensor, value: Tensor, rows: native.StepCache) -> native.StepNode:
    """The next row of a cache. key: [heads, width]    value: [heads, width or less], of the same dtype."""
    parts = (operand(t, (0, 0, t.stride(0), 1), dtype_code(t, "step")) for t in (key, value))
    shape = 1, 1, *key.shape
    return native.StepNode(
        Kind.APPEND, shape, native.Operand(), *parts, lanes=value.shape[1], call=ctypes.addressof(rows)
    )


def attend_cached(
    out: Tensor,
    query: Tensor,
    kv_heads: int,
    rows: native.StepCache,
    scale: float,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> native.StepNode:
    """Attention over a cache. out, query: [heads, width], dense

    sinks: [heads] fp32, scores of nothing    bias: [heads, distances] fp32, as of `attend`
    """
    heads, width = query.shape
    return native.StepNode(
        Kind.ATTEND,
        (1, heads, kv_heads, width),
        dense_operand(out),
        dense_operand(query),
        *(native.Operand() if t is None else dense_operand(t) for t in (sinks, bias)),
        lanes=0 if bias is None else bias.shape[1],
        number=scale,
        call=ctypes.addressof(rows),
    )


def with_state(arguments: native.ConvolutionArgs | native.DeltaArgs | native.ScanArgs) -> native.StepNode:
    """A token of a layer with a state, as `cpu/states.py` has it."""
    kinds = {native.ConvolutionArgs: Kind.CONVOLVE, native.DeltaArgs: Kind.DELTA, native.ScanArgs: Kind.SCAN}
    return pointing(kinds[type(arguments)], arguments)


def pointing(kind: Kind, arguments: ctypes.Structure, threads: int = 0) -> native.StepNode:
    """A node that is a call with arguments of its own."""
    node = native.StepNode(kind, threads=threads, call=ctypes.addressof(arguments))
    node.arguments = arguments
    return node


def program(nodes: Sequence[native.StepNode]) -> Any:
    """An array of nodes that may run, with what they alone hold.

    Raises ShapeError for what the library does not do, or what leaves its memory.
    """
    assert _lib is not None
    made: Any = (native.StepNode * len(nodes))(*nodes)
    made.arguments = [n.arguments for n in nodes]
    _lib.trilobite_step_check(made, len(made))
    return made


def run_nodes(nodes: Any, count: int) -> None:
    """Run `count` nodes of a program. Raises ShapeError, or ResourceError where memory or threads end."""
    assert _lib is not None
    _lib.trilobite_step(nodes, count, team(None))


def _makes(node: Callable[[Tensor], native.StepNode | None], expected: Tensor) -> bool:
    """Whether the node that writes to a tensor makes the same bits."""
    out = torch.empty_like(expected)
    made = node(out)
    assert made is not None
    run_nodes(program([made]), 1)
    return torch.equal(out.nan_to_num(1), expected.nan_to_num(1))


def _lanes(
    node: Callable[[Tensor, Tensor, int], native.StepNode | None],
    call: Callable[[Tensor], Tensor],
    rows: Sequence[Tensor],
) -> int | None:
    """How many values side by side give torch's bits on all of these rows; None where no number does."""
    for lanes in (16, 8, 4) if _lib is not None else ():
        if all(_makes(lambda out, x=x, n=lanes: node(out, x, n), call(x)) for x in rows):  # type: ignore[misc]
            return lanes
    return None


@cache
def softmax_lanes(dtype: torch.dtype = torch.float32) -> int | None:
    """How many values torch's softmax adds up side by side on this processor; None where its bits are other ones."""
    generator = torch.Generator().manual_seed(0)
    widths = (1, 2, 4, 6, 8, 10, 16, 24, 32, 60, 64, 72, 128, 160, 256, 384, 512)
    shapes = (
        [(20, w) for w in widths] if dtype == torch.float32 else [(SHORT_ROWS, w + 1) for w in range(SHORT)]
    )
    rows = [torch.randn(*shape, generator=generator).mul_(4).to(dtype) for shape in shapes]
    return _lanes(softmax_rows, lambda x: x.softmax(-1), rows)


@cache
def sum_lanes() -> int | None:
    """How many values torch's kernel adds up side by side on this processor; None where it adds up otherwise."""
    generator = torch.Generator().manual_seed(0)
    widths = (2, 8, 10, 33, 60, 64, 128, 517, 1000, 2048, 4096, 5120, 7168, 16000)
    rows = [torch.randn(2, width, generator=generator).mul_(1 << 10) for width in widths]
    one_and_more = [part for x in rows for part in (x, x[:1])]
    one_and_more += [
        torch.randn(*shape, generator=generator) for shape in ((2, 33000), (8, 5120), (64, 1000))
    ]
    return _lanes(lambda out, x, n: row_sums(out, x, 1.0, n), lambda x: x.sum(-1), one_and_more)


@cache
def takes_number(kind: Kind, dtype: torch.dtype, number: float) -> bool:
    """Whether an operator on values of a type and a Python number has torch's bits."""
    calls: dict[Kind, Callable[..., Tensor]] = {
        Kind.ADD: torch.add,
        Kind.SUBTRACT: torch.sub,
        Kind.MULTIPLY: torch.mul,
        Kind.DIVIDE: torch.div,
    }
    if dtype == torch.float32:
        return True
    x = _all_values(dtype)
    return _makes(lambda out: _mapped(kind, out, x, number=number), calls[kind](x, number))


def _all_values(dtype: torch.dtype) -> Tensor:
    """Finite ones of a type of 16 bits."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.where(x.isfinite(), x, 0)


@cache
def has_curve(kind: Kind, dtype: torch.dtype) -> bool:
    """Whether one of CURVES, of so many values as fill torch's vectors, has torch's bits."""
    x = torch.randn(1 << 15, generator=torch.Generator().manual_seed(0)).mul_(8).to(dtype)
    if dtype != torch.float32:
        x = _all_values(dtype)
    expected = torch.cat([CURVES[kind](part) for part in x.view(-1, FULL)])
    return _makes(lambda out: _mapped(kind, out, x), expected)


@cache
def _chooses(dtype: torch.dtype) -> bool:
    """Whether torch's `topk` takes equal values in the library's order."""
    generator = torch.Generator().manual_seed(0)
    for width, k in ((8, 2), (64, 1), (64, 6), (64, 64), (128, 8), (256, 4), (512, 8), (513, 8)):
        for levels in (3, width, 1 << 20):
            x = torch.randint(levels, (20, width), generator=generator).to(dtype)
            for ordered in (True, False):
                expected = x.topk(k, sorted=ordered)
                places = torch.empty_like(expected.indices)
                same = _makes(lambda out, at=places, x=x, o=ordered: _top(out, at, x, o), expected.values)  # type: ignore[misc]
                if not same or not torch.equal(places, expected.indices):
                    return False
    return True
