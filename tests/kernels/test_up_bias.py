"""Biases of experts without gates, on every backend, against a dense computation written out by hand."""

import pytest
import torch
from support.packing import gpu_layer, lattice_weight, packed_weight, relative_error, stored_layer
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.formats.weight import PackedWeight, dequantize
from trilobite.kernels import ops, reference
from trilobite.kernels.cpu import engine as cpu

E, H, I = 3, 64, 96  # noqa: E741
INDEX = torch.tensor([[0, 1], [1, 3], [2, 0]])  # 3: no expert
Weights = list[tuple[PackedWeight | None, PackedWeight, PackedWeight]]


def _weights(fmt: str = "int3-g32") -> Weights:
    make = packed_weight if fmt.startswith("int") else lattice_weight
    return [(None, make(I, H, fmt, seed=e), packed_weight(H, I, "int3-g32", seed=9 + e)) for e in range(E)]


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(3, H, generator=generator),
        torch.rand(3, 2, generator=generator),
        torch.randn(E, I, generator=generator),
        torch.randn(E, H, generator=generator),
    )


def _dense(weights: Weights, up_bias: Tensor) -> Tensor:
    x, share, _, down_bias = _inputs()
    y = torch.zeros(3, H)
    for t in range(3):
        for a, e in enumerate(INDEX[t].tolist()):
            if e < E:
                _, up, down = weights[e]
                h = torch.relu(dequantize(up) @ x[t] + up_bias[e])
                y[t] += share[t, a] * (dequantize(down) @ h + down_bias[e])
    return y


def _reference(weights: Weights, up_bias: Tensor) -> Tensor:
    x, share, _, down_bias = _inputs()
    return reference.experts(x, INDEX, share, stored_layer(weights, "relu", up_bias, down_bias))


def _engine(weights: Weights, up_bias: Tensor) -> Tensor:
    if not cpu.available():
        pytest.skip("the native library is not installed")
    x, share, _, down_bias = _inputs()
    layer = stored_layer(weights, "relu", up_bias, down_bias)
    assert cpu.runs_experts(layer)
    return ops.experts(x, INDEX, share, layer)


def _triton(weights: Weights, up_bias: Tensor) -> Tensor:
    pytest.importorskip("triton", reason="Triton is not installed")
    from support import triton_interpreter

    if not triton_interpreter.available():
        pytest.skip("Triton was imported without TRITON_INTERPRET")
    triton_interpreter.install()
    x, share, _, down_bias = _inputs()
    return ops.experts(x, INDEX, share, gpu_layer(weights, "relu", up_bias, down_bias))


@pytest.mark.parametrize("fmt", ["int3-g32", "e8p-2"])
@pytest.mark.parametrize("run", [_reference, _engine, _triton])
def test_experts_without_gates_add_the_bias_of_up(run, fmt: str) -> None:  # type: ignore[no-untyped-def]
    weights, up_bias = _weights(fmt), _inputs()[2]
    without, y = run(weights, torch.zeros(E, I)), run(weights, up_bias)
    assert relative_error(y, _dense(weights, up_bias)) < 1e-5
    assert relative_error(without, _dense(weights, torch.zeros(E, I))) < 1e-5
    assert relative_error(y, without) > 0.1


@pytest.mark.parametrize("run", [_engine, _triton])
def test_the_bias_of_experts_with_gates_does_not_fit(run) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ShapeError, match="gate_up_bias"):
        run(_weights(), torch.zeros(E, 2 * I))
