"""Modules and tables around the GPU kernels: repacking on arrival, saving, tuning tables. Interpreted on the CPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.packing import packed_weight, relative_error

pytest.importorskip("triton", reason="Triton is not installed")
from support import triton_interpreter
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from trilobite.errors import CheckpointError, DeviceError, TuningError
from trilobite.kernels import ops, reference
from trilobite.kernels.gpu import tuning as triton_tuning
from trilobite.kernels.gpu.tuning import Tile
from trilobite.runtime import load as runtime_load
from trilobite.runtime.modules import residence
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.modules.linear import PackedLinear
from trilobite.runtime.modules.residence import AsStored, OnGpu

pytestmark = pytest.mark.skipif(
    not triton_interpreter.available(), reason="Triton was imported without TRITON_INTERPRET"
)
triton_interpreter.install()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the modules take the CPU for a GPU."""
    monkeypatch.setattr(ops, "gpu_layout", lambda weights: True)


def make_linear(fmt: str = "int3-g64") -> PackedLinear:
    w = packed_weight(24, 64, fmt, rank=2)
    return PackedLinear((24, 64), w.tensors(), nn.Parameter(torch.randn(24)))


def make_experts() -> PackedExperts:
    config = MixtralConfig(hidden_size=64, intermediate_size=32, num_local_experts=2, num_hidden_layers=1)
    with torch.device("meta"):
        original = MixtralExperts(config)
    parts = {
        e: {
            "w1": packed_weight(32, 64, "int3-g64", seed=e).tensors(),
            "w3": packed_weight(32, 64, "int4-g64", rank=e, seed=e + 9).tensors(),
            "w2": packed_weight(64, 32, "int3-g32", seed=e + 20).tensors(),
        }
        for e in range(2)
    }
    return PackedExperts(original, parts)


def test_a_linear_layer_settles_once_and_frees_its_tiles(gpu: None) -> None:
    layer, x = make_linear(), torch.randn(2, 64)
    expected = reference.linear(x, layer.packed(), layer.bias)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    bytes_before = sum(b.nbytes for b in layer.buffers())
    layer.settle()
    settled = layer.residence
    assert isinstance(settled, OnGpu)
    assert list(layer.buffers()) == []
    assert settled.pack.slab.nbytes < bytes_before + 1280  # parts are aligned, U has whole blocks of 32 ranks
    layer.settle()
    assert layer.residence is settled
    assert relative_error(layer(x), expected) < 3e-6
    assert "GPU layout" in repr(layer)
    after = layer.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], before[k]) for k in before)


def test_a_linear_layer_settles_when_it_is_moved(gpu: None) -> None:
    layer = make_linear().to("cpu")
    assert isinstance(layer.residence, OnGpu)
    assert isinstance(layer.to(torch.bfloat16).residence, OnGpu)  # what is already there stays


def test_a_linear_layer_comes_back_to_the_cpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_linear()
    packed = layer.packed().packed.clone()
    layer.settle()
    monkeypatch.setattr(ops, "gpu_layout", lambda weights: False)
    monkeypatch.setattr(residence, "leaves_gpu", lambda fn, table: True)
    layer.cpu()
    assert isinstance(layer.residence, AsStored)
    assert torch.equal(layer.packed().packed, packed)


def test_experts_settle_and_save_as_stored(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_experts()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    x, index, share = torch.randn(2, 64), torch.tensor([[0, 1], [1, 2]]), torch.rand(2, 2)
    monkeypatch.setattr(ops, "gpu_layout", lambda weights: False)
    expected = module(x, index, share)
    monkeypatch.setattr(ops, "gpu_layout", lambda weights: True)
    module.settle()
    assert isinstance(module.residence, OnGpu)
    assert list(module.buffers()) == []
    assert relative_error(module(x, index, share), expected) < 5e-6
    outer = nn.Sequential(module)
    after = outer.state_dict()
    assert {f"0.{k}" for k in before} == after.keys()
    assert all(torch.equal(after[f"0.{k}"], v) for k, v in before.items())


def test_double_quantized_weights_do_not_come_back(gpu: None) -> None:
    layer = make_linear("int3-g64-dq")
    layer.settle()
    with pytest.raises(CheckpointError, match="device='cpu'"):
        layer.state_dict()


def test_weights_under_super_scales_come_back(gpu: None) -> None:
    layer = make_linear("int3-g16-super")
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    layer.settle()
    assert isinstance(layer.residence, OnGpu)
    after = layer.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[k], v) for k, v in before.items())


def test_the_shipped_tables_are_complete() -> None:
    tables = triton_tuning.shipped()
    assert triton_tuning.render(tables) == triton_tuning.render(
        triton_tuning.parse(triton_tuning.render(tables), "")
    )
    assert set(tables["default"]) == set(triton_tuning.OPERATIONS)
    for table in tables.values():
        for operation, tiles in table.items():
            assert tiles[-1].tokens > 10**6, operation


GOOD_TILE = {"tokens": 9, "form": "factored", "block_n": 64, "block_m": 8}


@pytest.mark.parametrize(
    ("operation", "tiles", "rule"),
    [
        ("linear", [], "in order of tokens"),
        ("linear", [GOOD_TILE, GOOD_TILE], "in order of tokens"),
        ("linear", [GOOD_TILE | {"form": "dot"}], "form one of factored, scaled"),
        ("linear", [GOOD_TILE | {"block_m": 4}], "block_m of 8 or more"),
        ("linear", [GOOD_TILE | {"form": "scaled", "chunks": 2}], "one chunk"),
        ("linear", [GOOD_TILE | {"block_n": 128}], "at most 64 unless scaled"),
        ("lattice", [GOOD_TILE | {"form": "scaled"}], "factored for lattice"),
        ("linear", [GOOD_TILE | {"speed": 1}], "speed"),
    ],
)
def test_tables_that_no_kernel_can_have_are_refused(
    operation: str, tiles: list[dict[str, object]], rule: str
) -> None:
    assert triton_tuning.parse(json.dumps({"GPU": {"linear": [GOOD_TILE]}}), "here")
    with pytest.raises(TuningError, match=f"here: not a tuning table.*{rule}"):
        triton_tuning.parse(json.dumps({"GPU": {operation: tiles}}), "here")


def test_tiles_for_other_numbers_of_slots() -> None:
    wide = Tile(tokens=9, form="scaled", block_n=128, block_m=64, warps=8)
    assert triton_tuning.fitted(wide, 8) == replace(wide, block_m=8)
    assert triton_tuning.fitted(wide, 64) is wide


@pytest.mark.parametrize(
    ("block_m", "bits", "step", "rank_bits", "changed"),
    [
        (8, 3, 64, 0, {}),
        (16, 8, 64, 0, {"stages": 2}),
        (16, 3, 32, 0, {"chunks": 2}),
        (8, 3, 32, 0, {"registers": 255}),
        (8, 3, 64, 3, {"registers": 168}),
        (8, 8, 64, 3, {"stages": 2}),
    ],
)
def test_tiles_suit_what_they_multiply(
    block_m: int,
    bits: int,
    step: int,
    rank_bits: int,
    changed: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_tuning, "OLD_TRITON", False)
    tile = Tile(tokens=9, form="factored", block_n=32, block_m=block_m, chunks=4)
    assert triton_tuning.suited(tile, bits, step, rank_bits) == replace(tile, **changed)
    scaled = replace(tile, form="scaled", chunks=1)
    stages = {"stages": changed["stages"]} if "stages" in changed else {}
    assert triton_tuning.suited(scaled, bits, step, rank_bits) == replace(scaled, **stages)


def test_older_tritons_have_tiles_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for old in (False, True):
        monkeypatch.setattr(triton_tuning, "OLD_TRITON", old)
        (*_, table, default) = triton_tuning.general("GPU")
        assert default == "default"
        assert (table in triton_tuning.shipped()) == old
    for operation, tiles in triton_tuning.shipped()[table].items():
        for tile in tiles:  # a warp takes a chunk, whole
            assert tile.form != "factored" or tile.chunks == tile.warps, operation


def test_the_most_particular_table_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = ("NVIDIA Test", "sm_90", "default")
    x = torch.empty(3, 4, dtype=torch.bfloat16)
    tile = Tile(tokens=10**9, form="factored", block_n=32, block_m=8, warps=1, stages=2)
    try:
        triton_tuning.user.cache_clear()
        triton_tuning.tiles_of.cache_clear()
        assert triton_tuning.tiles_of("linear", names)[1].startswith("package")
        path = triton_tuning.remember("NVIDIA Test", {"linear": (tile,)})
        assert path.is_relative_to(tmp_path)
        with triton_tuning.pretending(names):
            assert triton_tuning.tile_for("linear", 3, x) == tile
            assert triton_tuning.tile_for("down", 3, x) != tile
            # fp32 takes small tiles on whatever GPU: no tensor core multiplies it exactly.
            assert triton_tuning.tile_for("down", 1000, x.float()).block_m == 16
        path.write_text("{]")
        triton_tuning.user.cache_clear()
        triton_tuning.tiles_of.cache_clear()
        with pytest.raises(TuningError, match=r"tuning\.json: not a tuning table.*bench --tune"):
            triton_tuning.tile_for("linear", 3, x)
    finally:
        monkeypatch.undo()
        triton_tuning.user.cache_clear()
        triton_tuning.tiles_of.cache_clear()


def test_a_model_too_large_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(nn.Linear):
        name_or_path = "folder"

        def to(self, *args: object, **kwargs: object) -> "Large":
            raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 2 * 10**6))
    with pytest.raises(
        DeviceError, match=r"folder: needs 0\.0 GB .* cuda has 0\.0 GB; .* less than 48%.*device='cpu'"
    ):
        runtime_load._to_device(Large(1023, 1024), "cuda")  # type: ignore[arg-type]
