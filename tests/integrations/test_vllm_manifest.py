from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.packing import lattice_weight, packed_weight

from trilobite.checkpoint.source import open_source
from trilobite.errors import CheckpointError
from trilobite.formats.weight import PackedWeight
from trilobite.integrations.vllm.manifest import Manifest, read_manifest


def _checkpoint(folder: Path, weights: dict[str, PackedWeight], rows: str = "{}") -> Path:
    tensors = {f"{name}.weight_{s}": t.clone() for name, w in weights.items() for s, t in w.tensors().items()}
    tensors["model.norm.weight"] = torch.ones(64)
    save_file(tensors, folder / "model.safetensors", metadata={"rows": rows})
    (folder / "config.json").write_text('{"model_type": "mixtral"}')
    return folder


ATTENTION = "model.layers.0.self_attn"


def test_layers_of_vllm_find_their_matrices(tmp_path: Path) -> None:
    w = packed_weight(64, 64, "int3-g64", rank=2)
    names = [f"{ATTENTION}.{p}_proj" for p in "qkvo"]
    names += [f"model.layers.0.block_sparse_moe.experts.{e}.w{i}" for e in range(2) for i in (1, 2, 3)]
    weights = dict.fromkeys(names, w) | {"lm_head": packed_weight(250, 64, "int8-g64")}
    manifest = read_manifest(open_source(_checkpoint(tmp_path, weights, '{"lm_head.weight": 250}')))
    assert manifest.rows_of(f"{ATTENTION}.qkv_proj", {}) == [64, 64, 64]
    assert manifest.rows_of(f"{ATTENTION}.o_proj", {}) == [64]
    assert manifest.rows_of("lm_head", {}) == [250]
    assert manifest.rows_of("model.layers.1.mlp.gate_up_proj", {}) is None
    assert manifest.experts == {"model.layers.0.block_sparse_moe.experts"}


def test_powers_of_two_are_refused(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, {f"{ATTENTION}.q_proj": packed_weight(64, 64, "int3-g64")})
    (folder / "config.json").write_text(
        '{"model_type": "mixtral", "quantization_config": {"exponents": {"a.weight": -26}}}'
    )
    with pytest.raises(CheckpointError, match=r"1 matrices are stored times powers of two, first a\.weight"):
        read_manifest(open_source(folder))


def test_names_follow_those_of_the_model() -> None:
    manifest = Manifest({"model.a.q_proj": 16, "model.mtp.q_proj": 16}, frozenset({"model.a.moe.experts"}))

    def rename(name: str) -> str | None:
        return None if "mtp" in name else name.replace("model.", "language.").replace("moe", "mlp")

    renamed = manifest.renamed(rename)
    assert renamed == Manifest({"language.a.q_proj": 16}, frozenset({"language.a.mlp.experts"}))


def test_matrices_that_the_model_fuses_otherwise() -> None:
    manifest = Manifest({"a.x_proj": 32, "a.y_proj": 48}, frozenset())
    assert manifest.rows_of("a.xy_proj", {"xy_proj": ["x_proj", "y_proj"]}) == [32, 48]


def test_lattice_formats_are_refused_with_the_recipe_to_use(tmp_path: Path) -> None:
    source = open_source(_checkpoint(tmp_path, {f"{ATTENTION}.q_proj": lattice_weight(64, 64)}))
    with pytest.raises(CheckpointError, match=r"q_proj: is in a lattice format.*--recipe super2") as e:
        read_manifest(source)
    assert "\n" not in str(e.value)


def test_matrices_that_run_as_one_are_packed_together() -> None:
    manifest = Manifest({f"{ATTENTION}.q_proj": 64, f"{ATTENTION}.v_proj": 64}, frozenset())
    with pytest.raises(CheckpointError, match=r"qkv_proj: k_proj in 16 bit.*--recipe") as e:
        manifest.rows_of(f"{ATTENTION}.qkv_proj", {})
    assert "\n" not in str(e.value)
