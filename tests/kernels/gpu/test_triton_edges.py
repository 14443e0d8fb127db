"""Edges of the GPU operators, interpreted on the CPU: values that are not finite, strides, indices, wrong shapes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.packing import gpu_layer, lattice_weight, packed_weight, relative_error, stored_layer
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed")
from support import triton_interpreter

from trilobite.errors import ShapeError
from trilobite.formats.weight import PackedWeight
from trilobite.kernels import ops, reference
from trilobite.kernels.expert_table import build
from trilobite.kernels.gpu.device import tile as triton_tile
from trilobite.kernels.gpu.launch import aligned
from trilobite.kernels.gpu.layout.pack import RANKS
from trilobite.kernels.gpu.tuning import Tile, fitted, forcing
from trilobite.kernels.layer import PackColumn, spec_of
from trilobite.runtime.modules.linear import PackedLinear

pytestmark = pytest.mark.skipif(
    not triton_interpreter.available(), reason="Triton was imported without TRITON_INTERPRET"
)
triton_interpreter.install()

TILE = Tile(tokens=1, form="factored", block_n=64, block_m=16, splits=1, stages=1)
FORMS = {
    "factored": TILE,
    "scaled": replace(TILE, form="scaled", block_m=64),
}
H, I = 64, 96  # noqa: E741


@pytest.fixture(autouse=True)
def memory_full_of_nan() -> Iterator[None]:
    """`torch.empty` is filled with NaN, so that a kernel which reads what nobody wrote is found out."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def layer(fmt: str, rank: int = 0) -> list[tuple[PackedWeight | None, PackedWeight, PackedWeight]]:
    make = lattice_weight if fmt.startswith("e8p") else packed_weight
    shapes = ((I, H), (I, H), (H, I))
    return [
        tuple(make(n, k, fmt, rank=rank, seed=3 * e + p) for p, (n, k) in enumerate(shapes))  # type: ignore[misc]
        for e in range(3)
    ]


@pytest.mark.parametrize(("fmt", "form"), [*(("int3-g32", form) for form in FORMS), ("e8p-3", "factored")])
def test_values_that_are_not_finite_stay_with_their_token(fmt: str, form: str) -> None:
    weights, index = layer(fmt, rank=5), torch.tensor([[0, 1], [1, 2], [2, 0], [3, 1]])
    packed, tile = gpu_layer(weights), FORMS[form]
    x = torch.randn(4, H, generator=torch.Generator().manual_seed(0))
    share = torch.ones(4, 2)
    tiles = {
        "gate_up": tile,
        "down": replace(tile, splits=2),
        "lattice": TILE,
        "rank": replace(tile, block_n=16),
    }
    expected = reference.experts(x, index, share, stored_layer(weights))
    with forcing(tiles):
        good = ops.experts(x, index, share, packed)
        assert relative_error(good, expected) < 1e-5
        x[1, 3], x[2, 0] = torch.nan, torch.inf
        y = ops.experts(x, index, share, packed)
    assert not y[[1, 2]].isfinite().any()
    assert torch.equal(y[[0, 3]], good[[0, 3]])


@pytest.mark.parametrize("fmt", ["int3-g64", "e8p-2"])
def test_a_bias_with_gaps(fmt: str) -> None:
    w = lattice_weight(24, 64, fmt) if fmt.startswith("e8p") else packed_weight(24, 64, fmt)
    x, bias = torch.randn(2, 64), torch.randn(48)[::2]
    with forcing({"linear": TILE, "lattice": TILE}):
        y = ops.linear_gpu(x, ops.repack([[w]]), bias)
    assert relative_error(y, reference.linear(x, w, bias)) < 1e-5


@pytest.mark.parametrize("tokens", [1, 2])
def test_indices_beyond_32_bits_are_nobody(tokens: int) -> None:
    weights = layer("int3-g32")
    x, index = torch.randn(tokens, H), torch.tensor([[0, 2**32], [1, 2]])[:tokens]
    share = torch.ones(tokens, 2)
    y = ops.experts(x, index, share, gpu_layer(weights))
    expected = reference.experts(x, index, share, stored_layer(weights))
    assert relative_error(y, expected) < 1e-5


def test_a_tile_cut_down_to_few_slots_has_one_group_of_a_compensator() -> None:
    w, x = packed_weight(128, 64, "int3-g64", rank=4), torch.randn(1, 64)
    tile = fitted(Tile(tokens=1, form="scaled", block_n=128, block_m=64, splits=1, stages=1), 1)
    with forcing({"linear": tile, "rank": replace(TILE, block_n=16)}):
        y = ops.linear_gpu(x, ops.repack([[w]]))
    assert relative_error(y, reference.linear(x, w)) < 1e-5


def test_activations_that_begin_between_words() -> None:
    x = torch.randn(129).bfloat16()[1:].view(1, 128)
    assert x.storage_offset() == 1
    assert aligned(x).storage_offset() == 0
    assert torch.equal(aligned(x), x)
    even = torch.randn(130).bfloat16()[2:].view(1, 128)
    assert aligned(even) is even


@pytest.mark.parametrize("gpu", [False, True])
def test_results_are_contiguous_whatever_the_activations_are(gpu: bool) -> None:
    weights = layer("int3-g32")
    x, index, share = torch.randn(H, 2).T, torch.tensor([[0, 1]] * 2), torch.rand(2, 2)
    pack = ops.repack(weights)
    operator = torch.ops.trilobite.experts_gpu if gpu else torch.ops.trilobite.experts
    parts = (pack.slab, pack.table) if gpu else build(weights)
    arguments = (x, index, share, *parts, None, None, I, "silu", *([spec_of(pack.codings)] if gpu else []))
    torch.library.opcheck(operator.default, arguments)


def test_a_matrix_of_another_width_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "gpu_layout", lambda weights: True)
    linear = PackedLinear((20, 64), packed_weight(20, 64, "int3-g64").tensors(), None)
    linear.settle()
    with pytest.raises(ShapeError, match="x has K=128, the weight has K=64"):
        linear(torch.randn(2, 128))


def test_other_dtypes_do_not_change_how_a_compensator_is_stored() -> None:
    w = packed_weight(24, 64, "int3-g64", rank=4, kind="fp16")
    linear = PackedLinear((24, 64), w.tensors(), nn.Parameter(torch.randn(24))).to(torch.bfloat16)
    assert linear.bias is not None
    assert linear.bias.dtype == torch.bfloat16
    x = torch.randn(2, 64).bfloat16()
    assert relative_error(linear(x), reference.linear(x, w, linear.bias)) < 1e-2


def test_host_and_kernels_agree_on_the_table() -> None:
    for place in PackColumn:
        assert getattr(triton_tile, place.name).value == place
    assert triton_tile.COLUMNS.value == len(PackColumn)
    assert triton_tile.BLOCK_R.value == RANKS
