"""The operators' gradients: of inputs, routing weights and biases, through the dequantized weights, in float32.

Packed weights are constants, compensators included: codes have no gradient, and what is to be learnt beside them is an
adapter's. The backward passes are operators too, so that `torch.compile` traces through them. Of the experts one at a
time is dequantized, and what its activation was is computed again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from trilobite.formats.weight import PackedWeight, dequantize
from trilobite.kernels.activation import gate_fn, plain_fn
from trilobite.kernels.expert_table import DOWN, GATE, UP, expert_weight
from trilobite.kernels.layer import ExpertsLayer, Pack, codings_of

LINEAR_INPUTS = ("x", "packed", "scale", "lra", "lrb", "bias", "rows", "activations", "threads")
LATTICE_INPUTS = (
    "x",
    "packed",
    "lattice",
    "signs_in",
    "signs_out",
    "lra",
    "lrb",
    "bias",
    "rows",
    "activations",
    "threads",
)
PARTS = ("packed", "scale", "lattice", "signs_in", "signs_out", "lra", "lrb")


Restore = Callable[[Pack], list[list[PackedWeight | None]]]
"""`ops.restore`: weights as stored, of a pack in the GPU layout."""


def register(lib: torch.library.Library, restore: Restore) -> None:
    """Define the backward operators, and make autograd use them."""

    def linear_gpu_backward(
        grad: Tensor, slab: Tensor, table: Tensor, spec: Sequence[int], columns: int
    ) -> Tensor:
        shapes = ((grad.shape[-1], columns),)
        pack = Pack(slab=slab, table=table, codings=codings_of(tuple(spec), 1), shapes=shapes)
        ((w,),) = restore(pack)
        assert w is not None
        return (grad.float() @ dequantize(w)).to(grad.dtype)

    def experts_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _experts_backward(restore, *arguments)

    parts = "Tensor packed, " + ", ".join(f"Tensor? {part}" for part in PARTS[1:])
    lib.define(f"linear_backward(Tensor grad, {parts}, int columns) -> Tensor")
    lib.define(
        "linear_gpu_backward(Tensor grad, Tensor slab, Tensor table, int[] spec, int columns) -> Tensor"
    )
    lib.define(
        "experts_backward(Tensor grad, Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor slab, Tensor table, "
        "Tensor? gate_up_bias, Tensor? down_bias, int intermediate, str activation, int[] spec) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    )
    for name, run, fake in (
        ("linear_backward", _linear_backward, _fake_linear),
        ("linear_gpu_backward", linear_gpu_backward, _fake_linear),
        ("experts_backward", experts_backward, _fake_experts),
    ):
        lib.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"trilobite::{name}", fake, lib=lib)
    for name, backward, setup in (
        ("linear", _of_linear, _keep_linear),
        ("lattice_linear", _of_linear, _keep_lattice),
        ("linear_gpu", _of_linear_gpu, _keep_linear_gpu),
        ("experts", _of_experts, _keep_experts),
        ("experts_gpu", _of_experts, _keep_experts),
    ):
        torch.library.register_autograd(f"trilobite::{name}", backward, setup_context=setup, lib=lib)


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _keep(ctx, dict(zip(LINEAR_INPUTS, inputs, strict=True)), len(inputs))


def _keep_lattice(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _keep(ctx, dict(zip(LATTICE_INPUTS, inputs, strict=True)), len(inputs))


def _keep(ctx: Any, named: dict[str, Any], inputs: int) -> None:
    ctx.inputs, ctx.columns, ctx.bias = inputs, named["x"].shape[-1], _dtype(named["bias"])
    ctx.save_for_backward(*(named.get(part) for part in PARTS))


def _of_linear(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx = torch.ops.trilobite.linear_backward(grad, *ctx.saved_tensors, ctx.columns)
    return dx, *[None] * (ctx.inputs - 5), _of_bias(grad, ctx.bias), None, None, None


def _keep_linear_gpu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, slab, table, bias, spec, _ = inputs
    ctx.columns, ctx.bias, ctx.spec = x.shape[-1], _dtype(bias), spec
    ctx.save_for_backward(slab, table)


def _of_linear_gpu(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx = torch.ops.trilobite.linear_gpu_backward(grad, *ctx.saved_tensors, ctx.spec, ctx.columns)
    return dx, None, None, _of_bias(grad, ctx.bias), None, None


def _dtype(bias: Tensor | None) -> torch.dtype | None:
    return None if bias is None else bias.dtype


def _of_bias(grad: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    return None if dtype is None else grad.flatten(0, -2).float().sum(0).to(dtype)


def _linear_backward(grad: Tensor, *rest: Any) -> Tensor:
    *parts, columns = rest
    w = PackedWeight(shape=(grad.shape[-1], columns), **dict(zip(PARTS, parts, strict=True)))
    return (grad.float() @ dequantize(w)).to(grad.dtype)


def _fake_linear(grad: Tensor, *others: Any) -> Tensor:
    """Every linear backward's last argument is the number of columns."""
    return grad.new_empty((*grad.shape[:-1], others[-1]))


def _keep_experts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.intermediate, ctx.activation = inputs[:9]
    ctx.spec = list(inputs[9]) if len(inputs) == 10 else []  # else how the CPU engine computes
    ctx.inputs = len(inputs)
    ctx.save_for_backward(*tensors)


def _of_experts(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: gradient checkpointing gives them out a single time
    dx, d_weights, *d_biases = torch.ops.trilobite.experts_backward(
        grad, *saved, ctx.intermediate, ctx.activation, ctx.spec
    )
    known = [None if b is None else d for b, d in zip(saved[-2:], d_biases, strict=True)]
    return dx, None, d_weights, None, None, *known, *[None] * (ctx.inputs - 7)


def _fake_experts(grad: Tensor, x: Tensor, index: Tensor, weights: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    biases = (grad.new_empty(0) if b is None else torch.empty_like(b) for b in rest[2:4])
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weights), *biases


def _experts_backward(
    restore: Restore, grad: Tensor, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *flat: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slab, table, gate_up_bias, down_bias, intermediate, activation, spec = flat
    layer = ExpertsLayer(
        slab=slab,
        table=table,
        hidden=x.shape[-1],
        intermediate=intermediate,
        activation=activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        codings=codings_of(tuple(spec), 3) if spec else (),
    )
    return experts_gradient(grad, x, top_k_index, top_k_weights, layer, restore)


def experts_gradient(
    grad: Tensor, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: ExpertsLayer, restore: Restore
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `reference.experts`, where that of its output is `grad` [T, H].

    returns: of x [T, H], top_k_weights [T, A], gate_up_bias, down_bias, each of the dtype and shape of the tensor, [0]
    for an absent bias
    """
    biases = layer.gate_up_bias, layer.down_bias
    dx, d_weights = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(top_k_weights)
    d_first, d_down = (grad.new_zeros(0 if b is None else b.shape, dtype=torch.float32) for b in biases)
    for e in range(layer.table.shape[0]):
        token, slot = torch.where(top_k_index == e)
        if token.numel() == 0:
            continue
        *first, down = _dense(layer, e, restore)
        inputs, weight, dy = x[token].float(), top_k_weights[token, slot, None].float(), grad[token].float()
        with _recording():
            before = [
                dense_linear(inputs, w, b) for w, b in zip(first, _biases(layer, e, len(first)), strict=True)
            ]
            before = [t.detach().requires_grad_() for t in before]
            act = (gate_fn if len(before) == 2 else plain_fn)(layer.activation)
            h = act(*before)
            dh = torch.autograd.grad(h, before, (dy * weight) @ down)
        y = dense_linear(h.detach(), down, None if layer.down_bias is None else layer.down_bias[e].float())
        d_weights[token, slot] = (dy * y).sum(-1).to(d_weights.dtype)
        for d, w in zip(dh, first, strict=True):
            dx.index_add_(0, token, d @ w)
        if layer.gate_up_bias is not None:
            d_first[e] = torch.cat([d.sum(0) for d in dh])
        if layer.down_bias is not None:
            d_down[e] = (dy * weight).sum(0)
    d_biases = [d if b is None else d.to(b.dtype) for d, b in zip((d_first, d_down), biases, strict=True)]
    return dx.to(x.dtype).contiguous(), d_weights, d_biases[0], d_biases[1]


def _dense(layer: ExpertsLayer, e: int, restore: Restore) -> list[Tensor]:
    """The dequantized (gate, up, down) of an expert, or (up, down) without a gate. [N, K] fp32."""
    up, down = (layer.intermediate, layer.hidden), (layer.hidden, layer.intermediate)
    if layer.codings:
        table = layer.table[e : e + 1]
        shapes = up, up, down
        (weights,) = restore(Pack(slab=layer.slab, table=table, codings=layer.codings, shapes=shapes))
    else:
        rows = {GATE: up, UP: up, DOWN: down}
        weights = [expert_weight(layer.slab, layer.table[e, p], shape) for p, shape in rows.items()]
    return [dequantize(w) for w in weights if w is not None]


def _biases(layer: ExpertsLayer, e: int, matrices: int) -> Sequence[Tensor | None]:
    """The biases of gate and up, or of up alone."""
    if layer.gate_up_bias is None:
        return [None] * matrices
    return layer.gate_up_bias[e].float().chunk(matrices)


@contextmanager
def _recording() -> Iterator[None]:
    """Autograd inside an operator, which is called behind it: what it needs of any activation is its derivative."""
    functionality = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(functionality, False), torch.enable_grad():
        yield
