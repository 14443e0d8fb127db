"""Calls bound to one weight: they follow the module's tensors, survive copies, and refuse what the operators refuse."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from packing import packed_weight, relative_error

from trilobite.errors import ShapeError
from trilobite.formats.weight import PackedWeight
from trilobite.kernels import cpu, ops, reference
from trilobite.kernels.expert_table import build
from trilobite.runtime.linear import PackedLinear

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the native library is not installed")


def _linear(w: PackedWeight, bias: torch.nn.Parameter | None = None) -> PackedLinear:
    return PackedLinear(w.shape, w.tensors(), bias)


def test_a_bound_call_follows_the_tensors_of_its_module() -> None:
    first, second = packed_weight(48, 64, "int3-g64"), packed_weight(48, 64, "int4-g32", rank=3, seed=1)
    x, module = torch.randn(3, 64), _linear(first)
    assert relative_error(module(x), reference.linear(x, first)) < 3e-6
    module.replace(second)
    assert relative_error(module(x), reference.linear(x, second)) < 3e-6
    module.bias = torch.nn.Parameter(torch.randn(48), requires_grad=False)
    assert relative_error(module(x), reference.linear(x, second, module.bias)) < 3e-6


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies_bind_to_their_own_tensors(again: Callable[[PackedLinear], PackedLinear]) -> None:
    w = packed_weight(32, 96, "int3-g32")
    x, module = torch.randn(1, 96), _linear(w)
    before = module(x)
    twin = again(module)
    twin.weight_packed.zero_()
    assert not torch.equal(twin(x), before)
    assert twin._bound is not None
    assert twin._bound.call is not None
    assert torch.equal(module(x), before)


def test_bound_calls_refuse_what_does_not_fit() -> None:
    w = packed_weight(32, 64, "int3-g64")
    call = ops.bind_linear(w, None)
    assert call is not None
    with pytest.raises(ShapeError, match="K=96"):
        call(torch.randn(2, 96))
    with pytest.raises(ShapeError, match="int64"):
        call(torch.ones(2, 64, dtype=torch.int64))
    with pytest.raises(ShapeError, match="bias"):
        ops.bind_linear(w, torch.zeros(31))
    with pytest.raises(ShapeError, match="matrix needs"):
        ops.bind_linear(PackedWeight(shape=(32, 64), packed=w.packed[:1]), None)
    up, down = packed_weight(64, 32, "int3-g32"), packed_weight(32, 64, "int3-g32")
    slab, table = build([(up, up, down)] * 2)
    layer = ops.bind_experts(slab, table, hidden=32, intermediate=64, activation="silu")
    assert layer is not None
    index, weights = torch.tensor([[0]]), torch.ones(1, 1)
    with pytest.raises(ShapeError, match="H=32"):
        layer(torch.randn(1, 64), index, weights)
    with pytest.raises(ShapeError, match="slab"):
        ops.bind_experts(slab[:100], table, hidden=32, intermediate=64, activation="silu")(  # type: ignore[misc]
            torch.randn(1, 32), index, weights
        )


def test_what_no_backend_binds_runs_in_the_operators() -> None:
    up, down = packed_weight(64, 32, "int3-g32"), packed_weight(32, 64, "int3-g32")
    slab, table = build([(up, up, down)])
    assert ops.bind_experts(slab, table, hidden=32, intermediate=64, activation="elu") is None
    assert ops.bind_linear(PackedWeight(shape=(32, 64), packed=down.packed.to("meta")), None) is None


def test_a_layer_is_used_by_several_calls_at_a_time() -> None:
    up, down = packed_weight(64, 32, "int3-g32"), packed_weight(32, 64, "int3-g32")
    slab, table = build([(up, up, down)] * 4)
    layer = ops.bind_experts(slab, table, hidden=32, intermediate=64, activation="silu")
    assert layer is not None
    for tokens in (1, 7, 2):
        x, weights = torch.randn(tokens, 32), torch.rand(tokens, 2)
        index = torch.randint(0, 5, (tokens, 2))
        expected = reference.experts(x, index, weights, slab, table, None, None, 64, "silu")
        assert torch.allclose(layer(x, index, weights), expected, atol=1e-5)
