"""Torch's small operators as nodes of the engine, where these have the same bits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trilobite.kernels import ops

aten = torch.ops.aten
Kind = ops.step.Kind
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ZERO = {dtype: torch.zeros(1, dtype=dtype) for dtype in FLOATS}
Nodes = list[Any] | None


def small_nodes(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[Tensor, ...]
) -> Nodes:
    """Nodes that do what an operator did, on these places; None where the engine does not do that with the same bits."""
    if operator == aten.topk.default:
        return _top(outputs, args, kwargs)
    found = _OPERATORS.get(operator)
    if found is None or len(outputs) != 1:
        return None
    return found(outputs[0], args, kwargs)


def _one(node: Any) -> Nodes:
    return None if node is None else [node]


def _lies_across(out: Tensor, *operands: Any) -> bool:
    """Whether an operand shares memory with the result without lying exactly on it."""
    return any(
        isinstance(t, Tensor)
        and t.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        and _meet(t, out)
        and _place(t) != _place(out)
        for t in operands
    )


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def _meet(a: Tensor, b: Tensor) -> bool:
    ends = [
        t.data_ptr()
        + t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
        for t in (a, b)
    ]
    return a.data_ptr() < ends[1] and b.data_ptr() < ends[0]


def _top(outputs: tuple[Tensor, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    x, dim, largest, ordered = args[0], *(*args[2:], *(-1, True, True)[len(args) - 2 :])
    if kwargs or dim not in (-1, x.dim() - 1) or not largest:
        return None
    values, places = outputs
    return _one(ops.step.top_of_rows(values, places, x, ordered=ordered))


def _softmax(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    x, dim, *half = args
    return None if any(half) or dim not in (-1, x.dim() - 1) else _one(ops.step.softmax_rows(out, x))


def _curve(kind: Kind) -> Callable[..., Nodes]:
    def nodes(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
        return None if _lies_across(out, args[0]) else _one(ops.step.curve(kind, out, args[0]))

    return nodes


def _to_copy(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    if args[0].dtype == torch.int64:
        return ops.step.numbers(out, args[0])
    if out.dtype == torch.bool:
        return None if _lies_across(out, args[0]) else _one(ops.step.truth(out, args[0]))
    return _copy(out, args, kwargs)


def _not(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    return None if _lies_across(out, args[0]) else _one(ops.step.truth(out, args[0], inverted=True))


def _zeros(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    return _one(ops.step.elementwise(Kind.COPY, out, ZERO[out.dtype])) if out.dtype in ZERO else None


def _fill(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    x, mask, number = args
    return None if _lies_across(out, x, mask) else _one(ops.step.fill(out, x, mask, float(number)))


def _pick(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    x, dim, index = args
    if kwargs.get("sparse_grad") or dim not in (-1, x.dim() - 1) or _lies_across(out, x, index):
        return None
    return _one(ops.step.pick(out, x, index))


def _index(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    """Numbers of a table at places: `table[places]`."""
    table, (places, *others) = args
    if others or places is None or table.dim() != 1 or places.dtype != torch.int64:
        return None
    if not (out.is_contiguous() and places.is_contiguous()) or _lies_across(out, table, places):
        return None
    return _one(ops.step.pick(out.view(1, -1), table[None], places.view(1, -1)))


def _scatter(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    x, dim, index, number = args
    last = dim in (-1, x.dim() - 1) and not _lies_across(out, index)
    return _one(ops.step.scatter(out, index, float(number))) if last else None


def _copy(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    if out.dtype not in FLOATS or args[0].dtype not in FLOATS or _lies_across(out, args[0]):
        return None
    return _one(ops.step.elementwise(Kind.COPY, out, args[0]))


def _copy_into(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    other = args[1]
    if _place(other) == _place(out):
        return []  # a state that was changed where it lies
    return _copy(out, (other,), kwargs)


def _binary(kind: Kind) -> Callable[..., Nodes]:
    def nodes(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
        a, b = args[:2]
        if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None or len(args) > 2:
            return None
        if not isinstance(a, Tensor) or out.dtype not in FLOATS or _lies_across(out, a, b):
            return None
        if isinstance(b, Tensor):
            # Numbers in tensors without dimensions are converted by rules of their own.
            same = a.dtype == b.dtype == out.dtype
            wider = out.dtype == torch.float32 and {a.dtype, b.dtype} <= set(FLOATS) and a.dim() and b.dim()
            if not (same or wider):
                return None
        elif a.dtype != out.dtype or not isinstance(b, int | float):
            return None
        return _one(ops.step.elementwise(kind, out, a, b))

    return nodes


def _unary(kind: Kind) -> Callable[..., Nodes]:
    def nodes(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
        if args[0].dtype != out.dtype or out.dtype not in FLOATS or _lies_across(out, args[0]):
            return None
        return _one(ops.step.elementwise(kind, out, args[0]))

    return nodes


def _power(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    kind = {2: Kind.SQUARE, -0.5: Kind.RSQRT}.get(args[1])
    if kind is None or args[0].dtype != torch.float32:
        return None
    return _unary(kind)(out, args, kwargs)


def _rsqrt(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    return _unary(Kind.RSQRT)(out, args, kwargs) if out.dtype == torch.float32 else None


def _sum(mean: bool) -> Callable[..., Nodes]:
    def nodes(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
        x, dims = args[:2]
        if kwargs.get("dtype") not in (None, torch.float32) or list(dims) not in ([-1], [x.dim() - 1]):
            return None
        return _one(ops.step.row_sums(out, x, float(x.shape[-1]) if mean else 1.0))

    return nodes


def _cat(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    parts, dim, at, nodes = args[0], args[1] if len(args) > 1 else 0, 0, []
    for t in parts:
        if t.dim() != out.dim() or t.dtype != out.dtype:
            return None
        made = _copy(out.narrow(dim, at, t.shape[dim]), (t,), kwargs)
        if made is None:
            return None
        nodes += made
        at += t.shape[dim]
    return nodes


def _dense(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    x, w, bias = (*args, None)[:3]
    if not all(t.is_contiguous() for t in (out, x, w, bias) if t is not None):
        return None
    return [ops.step.dense_product(out, x, w, bias)]


def _convolve(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    x, state, w, bias, silu = args
    if not _are_dense(out, x, state, w):
        return None
    calls = [ops.states.convolution(out[i], x[i], state[i], w, bias, silu) for i in range(len(out))]
    return list(map(ops.step.with_state, calls))


def _delta(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    q, k, v, decay, beta, state, normed = args
    if not _are_dense(out, q, k, v, decay, beta, state):
        return None
    calls = [
        ops.states.delta(out[i], q[i], k[i], v[i], decay[i], beta[i], state[i], normed)
        for i in range(len(out))
    ]
    return list(map(ops.step.with_state, calls))


def _scan(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    x, b, c, step, decay, skip, state = args
    if not _are_dense(out, x, b, c, step, state):
        return None
    calls = [
        ops.states.scan(out[i], x[i], b[i], c[i], step[i], decay, skip, state[i]) for i in range(len(out))
    ]
    return list(map(ops.step.with_state, calls))


def _are_dense(*tensors: Tensor) -> bool:
    return all(t.is_contiguous() for t in tensors)


def _embedding(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nodes:
    table, index = args[:2]
    if index.dtype != torch.int64 or not all(t.is_contiguous() for t in (table, index, out)):
        return None
    return ops.step.gather(out, table, index)


_OPERATORS: dict[Any, Callable[..., Nodes]] = {
    aten._to_copy.default: _to_copy,
    aten.clone.default: _copy,
    aten.copy_.default: _copy_into,
    aten.cat.default: _cat,
    aten.embedding.default: _embedding,
    torch.ops.trilobite.dense_linear.default: _dense,
    torch.ops.trilobite.dense_heads.default: _dense,
    torch.ops.trilobite.convolve_state.default: _convolve,
    torch.ops.trilobite.delta_state.default: _delta,
    torch.ops.trilobite.scan_state.default: _scan,
    aten._softmax.default: _softmax,
    aten.silu.default: _curve(Kind.SWISH),
    aten.sigmoid.default: _curve(Kind.LOGISTIC),
    aten.zeros_like.default: _zeros,
    aten.bitwise_not.default: _not,
    aten.masked_fill.Scalar: _fill,
    aten.gather.default: _pick,
    aten.index.Tensor: _index,
    aten.scatter_.value: _scatter,
    aten.neg.default: _unary(Kind.NEGATE),
    aten.pow.Tensor_Scalar: _power,
    aten.rsqrt.default: _rsqrt,
    aten.mean.dim: _sum(mean=True),
    aten.sum.dim_IntList: _sum(mean=False),
    **{
        getattr(getattr(aten, name + ending), overload): _binary(kind)
        for name, kind in (
            ("add", Kind.ADD),
            ("sub", Kind.SUBTRACT),
            ("mul", Kind.MULTIPLY),
            ("div", Kind.DIVIDE),
        )
        for ending in ("", "_")
        for overload in ("Tensor", "Scalar")
    },
}
