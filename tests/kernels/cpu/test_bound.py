"""Calls bound to one weight: they follow the module's tensors, survive copies, and refuse what the operators refuse."""

import copy
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.packing import packed_weight, relative_error, stored_layer
from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from trilobite.errors import ShapeError
from trilobite.formats.weight import PackedWeight
from trilobite.kernels import ops, reference
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.layer import CpuSettings, ExpertsLayer
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.modules.linear import PackedLinear
from trilobite.runtime.modules.residence import AsStored, PackedModule
from trilobite.runtime.modules.swap import configure

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the native library is not installed")


def _linear(w: PackedWeight, bias: torch.nn.Parameter | None = None) -> PackedLinear:
    return PackedLinear(w.shape, w.tensors(), bias)


def _layer(module: PackedExperts) -> ExpertsLayer:
    """Where its weights lie, with the biases that it has."""
    residence = module.settle() if module.residence is None else module.residence
    return module.layer(residence.slab, residence.table)  # type: ignore[attr-defined]


def _binding(module: PackedModule) -> ops.Binding[Callable[..., Tensor] | None]:
    assert isinstance(module.residence, AsStored)
    assert module.residence.binding is not None
    return module.residence.binding


def test_a_bound_call_follows_the_tensors_of_its_module() -> None:
    first, second = packed_weight(48, 64, "int3-g64"), packed_weight(48, 64, "int4-g32", rank=3, seed=1)
    x, module = torch.randn(3, 64), _linear(first)
    assert relative_error(module(x), reference.linear(x, first)) < 3e-6
    module.replace(second)
    assert relative_error(module(x), reference.linear(x, second)) < 3e-6
    module.bias = torch.nn.Parameter(torch.randn(48), requires_grad=False)
    assert relative_error(module(x), reference.linear(x, second, module.bias)) < 3e-6


def _fixed(t: Tensor) -> nn.Parameter:
    return nn.Parameter(t, requires_grad=False)


def _other(t: Tensor) -> Tensor:
    """Other values of the same shape and dtype, in memory of their own."""
    return torch.randint_like(t, 256) if t.dtype == torch.uint8 else torch.randn_like(t)


LINEAR_CHANGES: dict[str, Callable[[PackedLinear], object]] = {
    "bias in place": lambda m: m.bias.copy_(_other(m.bias)),
    "bias data": lambda m: setattr(m.bias, "data", _other(m.bias)),
    "bias parameter": lambda m: setattr(m, "bias", _fixed(_other(m.bias))),
    "bias strided": lambda m: setattr(m, "bias", _fixed(torch.randn(96)[::2])),
    "no bias": lambda m: setattr(m, "bias", None),
    "packed in place": lambda m: m.weight_packed[:, :, :32].copy_(_other(m.weight_packed[:, :, :32])),
    "packed data": lambda m: setattr(
        m.weight_packed, "data", packed_weight(48, 64, "int3-g32", seed=2).packed
    ),
    "lra in place": lambda m: m.weight_lra.neg_(),
    "lra data": lambda m: setattr(m.weight_lra, "data", -m.weight_lra),
    "lrb buffer": lambda m: setattr(m, "weight_lrb", -m.weight_lrb),
}


@pytest.mark.parametrize("change", LINEAR_CHANGES.values(), ids=list(LINEAR_CHANGES))
def test_a_bound_linear_follows_changes(change: Callable[[PackedLinear], object]) -> None:
    w = packed_weight(48, 64, "int3-g32", rank=5, kind="fp16")
    x, module = torch.randn(2, 64), _linear(w, _fixed(torch.randn(48)))
    before = module(x)
    change(module)
    expected = reference.linear(x, module.packed(), module.bias)
    assert relative_error(before, expected) > 1e-3
    assert relative_error(module(x), expected) < 3e-6


def test_a_strided_bias_is_copied_anew_when_it_changes() -> None:
    w = packed_weight(48, 64, "int3-g32")
    x, module = torch.randn(2, 64), _linear(w, _fixed(torch.randn(96)[::2]))
    before = module(x)
    assert module.bias is not None
    module.bias.add_(1)
    assert relative_error(module(x), before + 1) < 3e-6


E, H, INTER = 3, 64, 96


def _gpt_oss(seed: int = 0) -> PackedExperts:
    """A layer whose gate_up_proj_bias alternates gate and up."""
    with torch.device("meta"):
        original = GptOssExperts(GptOssConfig(hidden_size=H, intermediate_size=INTER, num_local_experts=E))
    shapes = {"gate_proj": (INTER, H), "up_proj": (INTER, H), "down_proj": (H, INTER)}
    experts = {
        e: {
            name: packed_weight(*shape, "int3-g32", seed=seed + 3 * e + i).tensors()
            for i, (name, shape) in enumerate(shapes.items())
        }
        for e in range(E)
    }
    module = PackedExperts(original, experts)
    module.gate_up_proj_bias, module.down_proj_bias = (
        _fixed(torch.randn(E, 2 * INTER)),
        _fixed(torch.randn(E, H)),
    )
    return module


def _replace_slab(module: PackedExperts) -> None:
    """Other weights, gathered into another slab."""
    rows = zip(module.matrices(), _gpt_oss(seed=50).matrices(), strict=True)
    for matrix, other in ((m, o) for row in rows for m, o in zip(*row, strict=True)):
        assert matrix is not None
        assert other is not None
        matrix.replace(other.packed())
    module.residence = None


def _swap_slab(module: PackedExperts) -> None:
    """Other bytes under the same tensor."""
    _layer(module).slab.data = _layer(_gpt_oss(seed=50)).slab


def _flip_table(module: PackedExperts) -> None:
    module.residence.table = module.residence.table.flip(0)  # type: ignore[union-attr]


EXPERT_CHANGES: dict[str, Callable[[PackedExperts], object]] = {
    "gate_up in place": lambda m: m.gate_up_proj_bias.mul_(2),
    "gate_up data": lambda m: setattr(m.gate_up_proj_bias, "data", _other(m.gate_up_proj_bias)),
    "gate_up parameter": lambda m: setattr(m, "gate_up_proj_bias", _fixed(torch.randn(E, 2 * INTER))),
    "down in place": lambda m: m.down_proj_bias.mul_(2),
    "down data": lambda m: setattr(m.down_proj_bias, "data", _other(m.down_proj_bias)),
    "down parameter": lambda m: setattr(m, "down_proj_bias", _fixed(torch.randn(E, H))),
    "no down": lambda m: setattr(m, "down_proj_bias", None),
    "slab": _replace_slab,
    "slab data": _swap_slab,
    "table": _flip_table,
}


@pytest.mark.parametrize("down_dtype", [torch.float32, torch.bfloat16], ids=["alike", "mixed"])
@pytest.mark.parametrize("change", EXPERT_CHANGES.values(), ids=list(EXPERT_CHANGES))
def test_bound_experts_follow_changes(
    change: Callable[[PackedExperts], object], down_dtype: torch.dtype
) -> None:
    """Biases too that the engine has in a copy: of alternating halves, or of another dtype."""
    torch.manual_seed(0)
    module = _gpt_oss()
    assert module.down_proj_bias is not None
    module.down_proj_bias = _fixed(module.down_proj_bias.to(down_dtype))
    inputs = torch.randn(5, H), torch.randint(0, E, (5, 2)), torch.rand(5, 2)
    before = module(*inputs)
    assert _binding(module).made is not None
    change(module)
    gate_up, down = module.gate_up_proj_bias, module.down_proj_bias
    assert gate_up is not None
    halves = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1)
    layer = replace(_layer(module), gate_up_bias=halves, down_bias=down)
    expected = reference.experts(*inputs, layer)
    assert relative_error(before, expected) > 1e-3
    assert relative_error(module(*inputs), expected) < 1e-5


def test_modules_of_different_settings_in_one_process() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(5, 64), packed_weight(48, 64, "int3-g32")
    inputs = torch.randn(5, H), torch.randint(0, E, (5, 2)), torch.rand(5, 2)
    exact, rough = nn.Sequential(_linear(w), _gpt_oss()), nn.Sequential(_linear(w), _gpt_oss())
    rough[1].load_state_dict(exact[1].state_dict(), assign=True)
    before = exact[0](x), exact[1](*inputs), rough[0](x), rough[1](*inputs)
    configure(rough, CpuSettings("int8", threads=1))
    for _ in range(2):
        for mine, was, other in (
            (rough[0](x), before[0], before[2]),
            (rough[1](*inputs), before[1], before[3]),
        ):
            assert torch.equal(was, other)
            assert 1e-3 < relative_error(mine, was) < 5e-2
        assert torch.equal(exact[0](x), before[0])
        assert torch.equal(exact[1](*inputs), before[1])
    compiled = torch.compile(rough[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), rough[0](x))


def test_an_unchanged_module_keeps_its_binding() -> None:
    experts, linear = _gpt_oss(), _linear(packed_weight(48, 64, "int3-g32"), _fixed(torch.randn(48)))
    bound = []
    for _ in range(2):
        experts(torch.randn(1, H), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
        linear(torch.randn(1, 64))
        bound.append((_binding(experts), _binding(linear)))
    assert bound[0][0] is bound[1][0] is not None
    assert bound[0][1] is bound[1][1] is not None


def test_modules_of_inference_tensors_bind() -> None:
    """Such tensors have no count of their changes."""
    with torch.inference_mode():
        module, linear = _gpt_oss(), _linear(packed_weight(48, 64, "int3-g32"), _fixed(torch.randn(48)))
        inputs = torch.randn(2, H), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
        assert module.gate_up_proj_bias is not None
        assert module.gate_up_proj_bias.is_inference()
        module(*inputs)
        module.gate_up_proj_bias = _fixed(module.gate_up_proj_bias + 1)
        module.down_proj_bias = None
        found, y = module(*inputs), linear(torch.ones(1, 64))
    gate_up = module.gate_up_proj_bias
    halves = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1)
    expected = reference.experts(*inputs, replace(_layer(module), gate_up_bias=halves, down_bias=None))
    assert relative_error(found, expected) < 1e-5
    assert torch.equal(y, linear(torch.ones(1, 64)))


def _traced(t: Tensor) -> tuple[Tensor, weakref.ref[object]]:
    """The same values in memory that tells when it is freed."""
    memory = t.numpy().copy()
    return torch.from_numpy(memory), weakref.ref(memory)


def test_bound_calls_keep_the_memory_that_they_read() -> None:
    """Also when the data of a tensor is exchanged, which frees what it had."""
    w, x = packed_weight(48, 64, "int3-g32"), torch.randn(2, 64)
    (packed, packed_memory), (bias, bias_memory) = _traced(w.packed), _traced(torch.randn(48))
    linear = ops.bind_linear(PackedWeight(shape=w.shape, packed=packed), bias)
    assert linear is not None
    layer = _layer(_gpt_oss())
    slab, slab_memory = _traced(layer.slab)
    down, down_memory = _traced(torch.randn(E, H))
    table, table_memory = _traced(layer.table)
    layer = replace(layer, slab=slab, table=table, activation="silu", gate_up_bias=None, down_bias=down)
    experts = ops.bind_experts(layer)
    del layer
    assert experts is not None
    inputs = x, torch.tensor([[0], [2]]), torch.ones(2, 1)
    before = linear(x), experts(*inputs)
    for t in (packed, bias, slab, down, table):
        t.data = torch.zeros_like(t)
    memories = (packed_memory, bias_memory, slab_memory, down_memory, table_memory)
    assert all(m() is not None for m in memories)
    assert torch.equal(linear(x), before[0])
    assert torch.equal(experts(*inputs), before[1])
    del linear, experts
    assert all(m() is None for m in memories)


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
    assert _binding(twin).made is not None
    assert _binding(twin) is not _binding(module)
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
    stored = stored_layer([(up, up, down)] * 2)
    layer = ops.bind_experts(stored)
    assert layer is not None
    index, weights = torch.tensor([[0]]), torch.ones(1, 1)
    with pytest.raises(ShapeError, match="H=32"):
        layer(torch.randn(1, 64), index, weights)
    with pytest.raises(ShapeError, match="slab"):
        ops.bind_experts(replace(stored, slab=stored.slab[:100]))(  # type: ignore[misc]
            torch.randn(1, 32), index, weights
        )


def test_what_no_backend_binds_runs_in_the_operators() -> None:
    up, down = packed_weight(64, 32, "int3-g32"), packed_weight(32, 64, "int3-g32")
    assert ops.bind_experts(stored_layer([(up, up, down)], "relu6")) is None
    assert ops.bind_linear(PackedWeight(shape=(32, 64), packed=down.packed.to("meta")), None) is None


def test_a_layer_is_used_by_several_calls_at_a_time() -> None:
    up, down = packed_weight(64, 32, "int3-g32"), packed_weight(32, 64, "int3-g32")
    stored = stored_layer([(up, up, down)] * 4)
    layer = ops.bind_experts(stored)
    assert layer is not None
    for tokens in (1, 7, 2):
        x, weights = torch.randn(tokens, 32), torch.rand(tokens, 2)
        index = torch.randint(0, 5, (tokens, 2))
        expected = reference.experts(x, index, weights, stored)
        assert torch.allclose(layer(x, index, weights), expected, atol=1e-5)


def test_experts_follow_a_state_dict_that_was_assigned() -> None:
    first, second = _gpt_oss(seed=0), _gpt_oss(seed=50)
    x, index, share = torch.randn(3, H), torch.tensor([[0, 1], [1, 0], [0, 0]]), torch.rand(3, 2)
    before, expected = first(x, index, share), second(x, index, share)
    assert not torch.equal(before, expected)
    first.load_state_dict(second.state_dict(), assign=True)
    assert torch.equal(first(x, index, share), expected)
