"""Gradients of both operators against autograd through the reference, which computes with dequantized weights."""

from collections.abc import Callable, Sequence

import pytest
import torch
from support.packing import gpu_layer, lattice_weight, packed_weight, relative_error, stored_layer
from torch import Tensor

from trilobite.formats.weight import PackedWeight
from trilobite.kernels import gradient, ops, reference
from trilobite.kernels.layer import ExpertsLayer

H, I, E = 64, 96, 4  # noqa: E741
TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
}  # the engine sums in another order; bf16 rounds what it returns
# A token that visits an expert twice, one without experts (index E), an expert without tokens.
INDEX = torch.tensor([[0, 1], [2, 2], [E, E], [1, 0], [0, E]])
FORMATS = ["int3-g32", "int3-g32-dq", "int4-g32-sym", "e8p-2", "compensated"]


def weight(n: int, k: int, kind: str, seed: int) -> PackedWeight:
    if kind == "e8p-2":
        return lattice_weight(n, k, kind, seed=seed)
    if kind == "compensated":
        return packed_weight(n, k, "int3-g32", rank=3, kind=("int3", "int8", "fp16")[seed % 3], seed=seed)
    return packed_weight(n, k, kind, seed=seed)


def matrices(kind: str, gated: bool = True) -> list[tuple[PackedWeight | None, PackedWeight, PackedWeight]]:
    return [
        (
            weight(I, H, kind, 3 * e) if gated else None,
            weight(I, H, kind, 3 * e + 1),
            weight(H, I, kind, 3 * e + 2),
        )
        for e in range(E)
    ]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return values.to(dtype).requires_grad_()


def gradients(run: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Of a random linear function of the output, with respect to the inputs."""
    y = run(*inputs)
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return list(torch.autograd.grad((y * probe).sum(), inputs))


def check(
    found: Sequence[Tensor],
    expected: Sequence[Tensor],
    inputs: Sequence[Tensor],
    tolerance: float | None = None,
) -> None:
    for mine, theirs, of in zip(found, expected, inputs, strict=True):
        assert (mine.shape, mine.dtype) == (of.shape, of.dtype)
        assert theirs.norm() > 0
        assert relative_error(mine, theirs) < (tolerance or TOLERANCE[of.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_linear(kind: str, dtype: torch.dtype) -> None:
    w = weight(H, I, kind, 2)
    inputs = random(2, 5, I, dtype=dtype), random(H, dtype=dtype)
    expected = gradients(lambda x, b: reference.linear(x, w, b), inputs)
    check(gradients(lambda x, b: ops.linear(x, w, b), inputs), expected, inputs)


def layers(
    kind: str, activation: str, gated: bool
) -> tuple[Callable[[Tensor, Tensor], ExpertsLayer], tuple[Tensor, ...]]:
    """A layer made of given biases, and its inputs: x, weights, biases."""
    weights = matrices(kind, gated)
    biases = random(E, 2 * I if gated else I), random(E, H)
    return lambda first, down: stored_layer(weights, activation, first, down), (
        random(5, H),
        random(5, 2),
        *biases,
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gpt_oss", "mish"])
@pytest.mark.parametrize("kind", FORMATS)
def test_experts(kind: str, activation: str) -> None:
    make, inputs = layers(kind, activation, True)
    expected = gradients(lambda x, w, *b: reference.experts(x, INDEX, w, make(*b)), inputs)
    check(gradients(lambda x, w, *b: ops.experts(x, INDEX, w, make(*b)), inputs), expected, inputs)


@pytest.mark.parametrize("biases", [True, False], ids=["biases", "no biases"])
def test_experts_without_gates(biases: bool) -> None:
    make, inputs = layers("int3-g32", "relu", False)
    layer = stored_layer(matrices("int3-g32", False), "relu")
    inputs = inputs if biases else inputs[:2]

    def run(operator: Callable[..., Tensor]) -> list[Tensor]:
        return gradients(lambda x, w, *b: operator(x, INDEX, w, make(*b) if b else layer), inputs)

    check(run(ops.experts), run(reference.experts), inputs)


def test_experts_in_bfloat16() -> None:
    layer = stored_layer(matrices("int3-g32"), "silu")
    inputs = random(5, H, dtype=torch.bfloat16), random(5, 2, dtype=torch.bfloat16)
    expected = gradients(lambda x, w: reference.experts(x, INDEX, w, layer), inputs)
    check(gradients(lambda x, w: ops.experts(x, INDEX, w, layer), inputs), expected, inputs)


@pytest.mark.parametrize("kind", ["int3-g32", "int3-g32-dq", "e8p-2", "compensated"])
def test_the_gpu_layout_has_the_same_gradient(kind: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    weights = matrices(kind)
    biases = random(E, 2 * I).detach(), random(E, H).detach()
    stored, repacked = (make(weights, "silu", *biases) for make in (stored_layer, gpu_layer))
    inputs = [random(5, H, seed=1).detach(), random(5, H).detach(), INDEX, random(5, 2).detach()]
    expected = gradient.experts_gradient(*inputs, stored, ops.restore)
    found = gradient.experts_gradient(*inputs, repacked, ops.restore)
    tolerance = (
        1e-2 if kind.endswith("dq") else 1e-5
    )  # the layout keeps scales of double quantization in fp16
    check(found, expected, (inputs[1], inputs[3], *biases), tolerance)
    w = weights[0][1]
    pack = ops.repack([[w]])
    grad = random(5, I).detach()
    dense = torch.ops.trilobite.linear_gpu_backward(grad, pack.slab, pack.table, ops.spec_of(pack.codings), H)
    assert relative_error(dense, grad @ reference.linear(torch.eye(H), w).T) < tolerance


@pytest.mark.parametrize("name", ["linear", "lattice", "experts"])
def test_opcheck(name: str) -> None:
    if name == "linear":
        w = weight(H, I, "int3-g32", 0)
        arguments = (random(2, I), w.packed, w.scale, w.lra, w.lrb, random(H), H)
    elif name == "lattice":
        w = weight(H, I, "e8p-2", 0)
        arguments = (random(2, I), w.packed, w.lattice, w.signs_in, w.signs_out, w.lra, w.lrb, random(H), H)
    else:
        layer = stored_layer(matrices("int3-g32"), "silu")
        biases = random(E, 2 * I), random(E, H)
        arguments = (random(5, H), INDEX, random(5, 2), layer.slab, layer.table, *biases, I, "silu")
    operator = {"linear": "linear", "lattice": "lattice_linear", "experts": "experts"}[name]
    torch.library.opcheck(getattr(torch.ops.trilobite, operator).default, arguments)


def test_compiled_training_steps_without_graph_breaks() -> None:
    w, layer = weight(H, H, "int3-g32", 0), stored_layer(matrices("int3-g32"), "silu")

    def run(x: Tensor, weights: Tensor) -> Tensor:
        return ops.experts(torch.relu(ops.linear(x, w)) + x, INDEX, weights, layer) * 2

    inputs = random(5, H), random(5, 2)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    check(gradients(compiled, inputs), gradients(run, inputs), inputs)


def test_no_gradient_costs_no_memory() -> None:
    """Nothing is kept for a backward pass that cannot come."""
    w, x = weight(H, H, "int3-g32", 0), random(5, H)
    assert ops.linear(x.detach(), w).grad_fn is None
    with torch.no_grad():
        assert not ops.linear(x, w).requires_grad
