import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import EXPERTS, HIDDEN, INTERMEDIATE, TINY_CONFIGS, build_checkpoint, moe_layers
from support.paths import SHARED
from torch import Tensor
from transformers import PreTrainedModel

from trilobite.checkpoint.roles import Matrix, identify, read_matrix
from trilobite.checkpoint.source import Source, open_source
from trilobite.errors import ArchitectureError, CheckpointError
from trilobite.recipe import Role
from trilobite.runtime.load import load

# (layers with experts, matrices of one expert)
MOE_LAYERS = {
    "mixtral": (2, 3),
    "qwen2_moe": (1, 3),
    "qwen3_moe": (2, 3),
    "olmoe": (2, 3),
    "deepseek_v2": (2, 3),
    "deepseek_v3": (2, 3),
    "glm4_moe": (2, 3),
    "phimoe": (2, 3),
    "gpt_oss": (2, 3),
    "granitemoe": (2, 3),
    "minimax_m2": (2, 3),
    "jamba": (1, 3),
    "deepseek": (2, 3),
    "llama": (0, 0),
    "qwen3": (0, 0),
    "nllb-moe": (2, 2),
    "switch_transformers": (2, 2),
}
FUSED_IN_MEMORY = [t for t, (layers, parts) in MOE_LAYERS.items() if layers and parts == 3]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[PreTrainedModel, Source]] = {}

    def build(model_type: str) -> tuple[PreTrainedModel, Source]:
        if model_type not in made:
            path = tmp_path_factory.mktemp(model_type)
            made[model_type] = (build_checkpoint(model_type, path), open_source(str(path)))
        return made[model_type]

    return build


def synthetic(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Source:
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    return open_source(str(path))


def by_name(matrices: list[Matrix]) -> dict[str, Matrix]:
    return {m.name: m for m in matrices}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_every_architecture_is_tested() -> None:
    assert set(MOE_LAYERS) == set(TINY_CONFIGS)


@pytest.mark.parametrize("model_type", TINY_CONFIGS)
def test_every_tensor_exactly_once(built: Any, model_type: str) -> None:
    _, source = built(model_type)
    matrices = identify(source)
    covered: Counter[str] = Counter()
    for m in matrices:
        w = read_matrix(source, m)
        assert tuple(w.shape) == m.shape, m
        assert w.is_contiguous(), m
        covered[m.source] += w.numel()
    assert covered == {name: source.read(name).numel() for name in source.tensors}
    assert len({m.name for m in matrices}) == len(matrices)


@pytest.mark.parametrize("model_type", TINY_CONFIGS)
def test_experts_are_complete(built: Any, model_type: str) -> None:
    _, source = built(model_type)
    layers, parts = MOE_LAYERS[model_type]
    experts = [m for m in identify(source) if m.role is Role.EXPERT]
    assert len(experts) == layers * EXPERTS * parts
    assert all(m.quantizable for m in experts)
    for m in experts:
        n, k = (HIDDEN, INTERMEDIATE) if m.projection == "down" else (INTERMEDIATE, HIDDEN)
        assert m.shape == (n, k), m
    assert {m.expert for m in experts} == (set(range(EXPERTS)) if layers else set())


@pytest.mark.parametrize("model_type", FUSED_IN_MEMORY)
def test_experts_equal_the_model_in_memory(built: Any, model_type: str) -> None:
    model, source = built(model_type)
    found = {(m.layer, m.expert, m.projection): m for m in identify(source) if m.role is Role.EXPERT}
    compared = 0
    for name, module in moe_layers(model):
        layer = int(name.split(".layers.")[1].split(".")[0])
        for e in range(EXPERTS):
            gate_up, down = module.gate_up_proj[e].detach(), module.down_proj[e].detach()
            # transformers says itself how the parameters of the module are to be read.
            if module.is_transposed:
                gate_up, down = gate_up.T, down.T
            gate, up = gate_up.chunk(2) if module.is_concatenated else (gate_up[0::2], gate_up[1::2])
            for projection, w in (("gate", gate), ("up", up), ("down", down)):
                assert torch.equal(read_matrix(source, found[layer, e, projection]), w), (
                    layer,
                    e,
                    projection,
                )
                compared += 1
    assert compared == len(found)


@pytest.mark.parametrize(("model_type", "first"), [("nllb-moe", "fc1"), ("switch_transformers", "wi")])
def test_experts_with_a_prefix_before_their_number(built: Any, model_type: str, first: str) -> None:
    model, source = built(model_type)
    found = by_name([m for m in identify(source) if m.role is Role.EXPERT])
    assert {m.projection for m in found.values()} == {"up", "down"}
    assert sum(first in name for name in found) == len(found) // 2
    for name, m in found.items():
        assert m.expert is not None
        experts = model.get_submodule(name.rsplit(".", 3)[0])
        assert torch.equal(read_matrix(source, m), getattr(experts, f"{m.projection}_proj")[m.expert]), name


@pytest.mark.parametrize(
    ("model_type", "path"),
    [("gpt_oss", "model.layers.1.mlp.experts"), ("granitemoe", "model.layers.1.block_sparse_moe.experts")],
)
def test_fused_experts_get_one_name_each(built: Any, model_type: str, path: str) -> None:
    _, source = built(model_type)
    names = [m.name for m in identify(source) if m.role is Role.EXPERT and m.layer == 1]
    assert names == [f"{path}.{e}.{p}_proj.weight" for e in range(EXPERTS) for p in ("gate", "up", "down")]


def test_names_on_disk_are_kept_when_experts_are_stored_one_by_one(built: Any) -> None:
    _, source = built("mixtral")
    assert all(m.name == m.source for m in identify(source))


@pytest.mark.parametrize("model_type", TINY_CONFIGS)
def test_order(built: Any, model_type: str) -> None:
    _, source = built(model_type)
    matrices = identify(source)
    assert matrices == identify(source)
    assert matrices[0].role is Role.EMBEDDING
    if "lm_head.weight" in source.tensors:
        assert matrices[-1].role is Role.HEAD
    inside = [m for m in matrices if m.layer is not None]
    layers = []
    for key, group in itertools.groupby(inside, key=lambda m: ("encoder" not in m.name, m.layer)):
        layers.append(key)
        assert next(group).role is Role.ATTENTION
    assert layers == sorted(set(layers)), "each layer once and in one piece, encoder first"
    experts = [m for m in matrices if m.role is Role.EXPERT]
    order = {"gate": 0, "up": 1, "down": 2, None: 3}
    for a, b in itertools.pairwise(experts):
        if (a.layer, a.name.split(".experts")[0]) == (b.layer, b.name.split(".experts")[0]):
            assert (a.expert, order[a.projection]) < (b.expert, order[b.projection])


def test_layers_are_in_numeric_order(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in (10, 2, 0)]
    source = synthetic(tmp_path, {"model_type": "llama"}, {n: random(2, 2) for n in names})
    assert [m.layer for m in identify(source)] == [0, 2, 10]


ROLES = {
    "mixtral": {
        "block_sparse_moe.gate.weight": (Role.ROUTER, None),
        "self_attn.o_proj.weight": (Role.ATTENTION, "o"),
    },
    "qwen2_moe": {
        "layers.0.mlp.up_proj.weight": (Role.DENSE_MLP, "up"),
        "mlp.shared_expert.down_proj.weight": (Role.SHARED_EXPERT, "down"),
        "mlp.shared_expert_gate.weight": (Role.ROUTER, None),
        "self_attn.q_proj.bias": (Role.OTHER, None),
    },
    "qwen3_moe": {"self_attn.q_norm.weight": (Role.NORM, None)},
    "deepseek_v3": {
        "self_attn.q_a_proj.weight": (Role.ATTENTION, "q_a"),
        "self_attn.q_b_proj.weight": (Role.ATTENTION, "q_b"),
        "self_attn.kv_a_proj_with_mqa.weight": (Role.ATTENTION, "kv_a"),
        "self_attn.kv_b_proj.weight": (Role.ATTENTION, "kv_b"),
        "self_attn.kv_a_layernorm.weight": (Role.NORM, None),
        "gate.e_score_correction_bias": (Role.ROUTER, None),
        "mlp.shared_experts.gate_proj.weight": (Role.SHARED_EXPERT, "gate"),
        "layers.0.mlp.gate_proj.weight": (Role.DENSE_MLP, "gate"),
    },
    "gpt_oss": {
        "self_attn.sinks": (Role.OTHER, None),
        "mlp.router.bias": (Role.ROUTER, None),
        "experts.gate_up_proj_bias": (Role.OTHER, None),
    },
    "granitemoe": {"router.layer.weight": (Role.ROUTER, None)},
    "minimax_m2": {"block_sparse_moe.e_score_correction_bias": (Role.ROUTER, None)},
    "jamba": {
        "mamba.in_proj.weight": (Role.ATTENTION, None),
        "mamba.out_proj.weight": (Role.ATTENTION, "o"),
        "mamba.x_proj.weight": (Role.ATTENTION, None),
        "mamba.dt_proj.weight": (Role.ATTENTION, None),
        "mamba.conv1d.weight": (Role.OTHER, None),
        "mamba.A_log": (Role.OTHER, None),
        "mamba.D": (Role.OTHER, None),
        "feed_forward.router.weight": (Role.ROUTER, None),
        "layers.0.feed_forward.down_proj.weight": (Role.DENSE_MLP, "down"),
    },
    "llama": {"embed_tokens.weight": (Role.EMBEDDING, None), "lm_head.weight": (Role.HEAD, None)},
    "nllb-moe": {
        "shared.weight": (Role.EMBEDDING, None),
        "cross_attention.out_proj.weight": (Role.ATTENTION, "o"),
        "ffn.fc1.weight": (Role.DENSE_MLP, "up"),
        "expert_0.fc1.bias": (Role.OTHER, None),
        "router.classifier.weight": (Role.ROUTER, None),
    },
    "switch_transformers": {
        "EncDecAttention.k.weight": (Role.ATTENTION, "k"),
        "mlp.wo.weight": (Role.DENSE_MLP, "down"),
        "relative_attention_bias.weight": (Role.OTHER, None),
    },
}


@pytest.mark.parametrize("model_type", ROLES)
def test_roles(built: Any, model_type: str) -> None:
    _, source = built(model_type)
    matrices = identify(source)
    for suffix, expected in ROLES[model_type].items():
        found = {(m.role, m.projection) for m in matrices if m.name.endswith(suffix)}
        assert found == {expected}, suffix


@pytest.mark.parametrize("model_type", TINY_CONFIGS)
def test_what_is_quantizable(built: Any, model_type: str) -> None:
    _, source = built(model_type)
    for m in identify(source):
        weight = len(m.shape) == 2 and m.role not in (Role.NORM, Role.OTHER)
        assert m.quantizable == weight, m
        if m.name.endswith("_proj.weight"):
            assert m.quantizable, m


# Names of real checkpoints that no tiny model here has.
OTHER_NAMES = {
    "model.layers.61.eh_proj.weight": ([8, 16], Role.DENSE_MLP, 61),
    "model.layers.61.enorm.weight": ([8], Role.NORM, 61),
    "model.layers.61.hnorm.weight": ([8], Role.NORM, 61),
    "model.layers.61.embed_tokens.weight": ([9, 8], Role.EMBEDDING, 61),
    "model.layers.61.shared_head.head.weight": ([9, 8], Role.HEAD, 61),
    "model.layers.61.shared_head.norm.weight": ([8], Role.NORM, 61),
    "model.layers.61.mlp.experts.3.up_proj.weight": ([4, 8], Role.EXPERT, 61),
    "model.layers.0.self_attn.indexer.wq_b.weight": ([4, 8], Role.ATTENTION, 0),
    "model.layers.0.linear_attn.in_proj_qkvz.weight": ([4, 8], Role.ATTENTION, 0),
    "model.layers.0.linear_attn.conv1d.weight": ([4, 1, 4], Role.OTHER, 0),
    "model.layers.0.conv.in_proj.weight": ([4, 8], Role.ATTENTION, 0),
    "model.layers.0.conv.conv.weight": ([4, 1, 3], Role.OTHER, 0),
    "model.layers.0.mlp.gate.wg.weight": ([4, 8], Role.ROUTER, 0),
    "model.layers.0.mlp.router.gate.weight": ([4, 8], Role.ROUTER, 0),
    "model.layers.0.mlp.expert_bias": ([4], Role.ROUTER, 0),
    "model.layers.0.mlp.gate.moe_statics.e_score_correction_bias": ([1, 4], Role.ROUTER, 0),
    "model.layers.0.mlp.shared_mlp.gate_proj.weight": ([4, 8], Role.SHARED_EXPERT, 0),
    "model.layers.0.shared_mlp.input_linear.weight": ([8, 8], Role.SHARED_EXPERT, 0),
    "model.layers.0.self_attn.gate_proj.weight": ([4, 8], Role.ATTENTION, 0),
    "model.layers.0.feed_forward.w1.weight": ([4, 8], Role.DENSE_MLP, 0),
    "model.layers.0.ffn_norm.weight": ([8], Role.NORM, 0),
    "backbone.layers.0.mixer.in_proj.weight": ([4, 8], Role.ATTENTION, 0),
    "backbone.layers.0.mixer.experts.2.up_proj.weight": ([4, 8], Role.EXPERT, 0),
    "backbone.layers.0.mixer.shared_experts.up_proj.weight": ([4, 8], Role.SHARED_EXPERT, 0),
    "model.layers.0.router.proj.weight": ([4, 8], Role.ROUTER, 0),
    "model.layers.0.router.per_expert_scale": ([4], Role.ROUTER, 0),
    "model.layers.0.per_layer_input_gate.weight": ([4, 8], Role.DENSE_MLP, 0),
    "model.language_model.embed_tokens_per_layer.weight": ([9, 8], Role.EMBEDDING, None),
    "layers.0.gate.weight": ([4, 8], Role.ROUTER, 0),
    "output.weight": ([9, 8], Role.HEAD, None),
    "model.llm.unembed.weight": ([9, 8], Role.HEAD, None),
    "backbone.embeddings.weight": ([9, 8], Role.EMBEDDING, None),
    "backbone.layers.0.mixer.up_proj.weight": ([4, 8], Role.DENSE_MLP, 0),
    "backbone.layers.0.mixer.fc1_latent_proj.weight": ([4, 8], Role.DENSE_MLP, 0),
    "model.layers.0.block_sparse_moe.gate_proj.weight": ([4, 8], Role.DENSE_MLP, 0),
    "model.layers.0.share_expert.up_proj.weight": ([4, 8], Role.SHARED_EXPERT, 0),
    "model.layers.0.mlp.linear_gate.weight": ([4, 8], Role.DENSE_MLP, 0),
    "model.layers.0.ffn.gate.tid2eid": ([9, 2], Role.OTHER, 0),
    "model.layers.0.hc_attn_fn": ([4, 8], Role.OTHER, 0),
    "model.layers.0.self_attn.slope_rate": ([4, 1, 1], Role.OTHER, 0),
    "model.layers.0.mlp.gate.router_mlp.fc1.weight": ([8, 8], Role.ROUTER, 0),
    "model.layers.0.input_layernorm.W_down.weight": ([4, 8], Role.OTHER, 0),
    "model.sam_model.blocks.0.mlp.lin1.weight": ([4, 8], Role.OTHER, 0),
    "perception.encoder.layers.0.attn.q_proj.weight": ([4, 8], Role.OTHER, 0),
    "vision_tower.layers.0.self_attn.q_proj.weight": ([4, 8], Role.OTHER, 0),
    "model.visual.patch_embed.proj.weight": ([4, 3, 2, 2, 2], Role.OTHER, None),
}


def test_names_of_real_checkpoints(tmp_path: Path) -> None:
    source = synthetic(
        tmp_path, {"model_type": "any"}, {n: random(*s) for n, (s, _, _) in OTHER_NAMES.items()}
    )
    found = by_name(identify(source))
    assert {n: (m.role, m.layer) for n, m in found.items()} == {
        n: (r, i) for n, (_, r, i) in OTHER_NAMES.items()
    }
    assert not found["model.layers.0.mlp.gate.moe_statics.e_score_correction_bias"].quantizable


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    source = synthetic(tmp_path, {"model_type": "llama"}, {"model.embed_tokens.weight": random(4, 2)})
    assert [m.role for m in identify(source)] == [Role.EMBEDDING]


# --- fused layouts ---------------------------------------------------------------------------------------


def fused(
    experts: int, hidden: int, inner: int, *, transposed: bool
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """A fused layer on disk, its gate_up as [E, 2I, H] and its down as [E, H, I]."""
    gate_up, down = random(experts, 2 * inner, hidden), random(experts, hidden, inner)
    path = "model.layers.0.mlp.experts"
    stored = (gate_up.mT, down.mT) if transposed else (gate_up, down)
    return dict(zip((f"{path}.gate_up_proj", f"{path}.down_proj"), stored, strict=True)), gate_up, down


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), [(8, 6), (8, 4), (8, 8), (4, 8)])
def test_orientation_follows_from_the_shapes(
    tmp_path: Path, hidden: int, inner: int, transposed: bool
) -> None:
    # Square cases too (hidden = inner, hidden = 2 inner): the pair tells, whatever the model type says.
    tensors, gate_up, down = fused(3, hidden, inner, transposed=transposed)
    source = synthetic(tmp_path, {"model_type": "any"}, tensors)
    found = {(m.expert, m.projection): read_matrix(source, m) for m in identify(source)}
    assert len(found) == 9
    for e in range(3):
        assert torch.equal(found[e, "gate"], gate_up[e, :inner])
        assert torch.equal(found[e, "up"], gate_up[e, inner:])
        assert torch.equal(found[e, "down"], down[e])


@pytest.mark.parametrize(
    ("name", "shape", "config", "expected"),
    [
        ("down_proj", (2, 8, 6), {"hidden_size": 8}, (8, 6)),
        ("down_proj", (2, 6, 8), {"hidden_size": 8}, (8, 6)),
        ("up_proj", (2, 6, 8), {"hidden_size": 8}, (6, 8)),
        ("up_proj", (2, 8, 6), {"hidden_size": 8}, (6, 8)),
        ("up_proj", (2, 8, 6), {"text_config": {"hidden_size": 8}}, (6, 8)),
        ("gate_up_proj", (2, 12, 8), {"hidden_size": 8}, (6, 8)),
        ("gate_up_proj", (2, 8, 12), {"hidden_size": 8}, (6, 8)),
    ],
)
def test_orientation_without_a_pair(
    tmp_path: Path, name: str, shape: tuple[int, ...], config: dict[str, Any], expected: tuple[int, int]
) -> None:
    tensors = {f"model.layers.0.mlp.experts.{name}": random(*shape)}
    source = synthetic(tmp_path, {"model_type": "any", **config}, tensors)
    assert {m.shape for m in identify(source)} == {expected}


def test_orientation_that_only_the_architecture_knows(tmp_path: Path) -> None:
    w = random(2, 8, 8)
    for model_type, expected in (("qwen3_5_moe", w[0]), ("llama4", w[0].T)):
        config = {"model_type": model_type, "hidden_size": 8}
        source = synthetic(tmp_path, config, {"model.layers.0.mlp.experts.down_proj": w})
        assert torch.equal(read_matrix(source, identify(source)[0]), expected)


def test_shapes_that_fit_no_layout(tmp_path: Path) -> None:
    path = "model.layers.0.mlp.experts"
    tensors = {f"{path}.gate_up_proj": random(2, 12, 8), f"{path}.down_proj": random(2, 8, 5)}
    with pytest.raises(ArchitectureError, match=r"\[12, 8\].*\[8, 5\]"):
        identify(synthetic(tmp_path, {"model_type": "any"}, tensors))


def test_rows_of_all_experts_one_after_the_other(tmp_path: Path) -> None:
    """DBRX: [E I, H], and down transposed."""
    path = "transformer.blocks.0.ffn.experts"
    names = {f"{path}.mlp.{name}": random(4 * 6, 8) + i for i, name in enumerate(("w1", "v1", "w2"))}
    source = synthetic(tmp_path, {"model_type": "dbrx", "ffn_config": {"moe_num_experts": 4}}, names)
    found = by_name(identify(source))
    assert len(found) == 12
    for part, (name, stacked) in zip(("gate", "up", "down"), names.items(), strict=True):
        expected = stacked.view(4, 6, 8)[2]
        w = read_matrix(source, found[f"{path}.2.{part}_proj.weight"])
        assert torch.equal(w, expected.T if name.endswith("w2") else expected)
    with pytest.raises(ArchitectureError, match="24 rows of 5 experts"):
        identify(synthetic(tmp_path, {"model_type": "dbrx", "ffn_config": {"moe_num_experts": 5}}, names))


def test_rows_of_gate_and_up_that_alternate(tmp_path: Path) -> None:
    path = "model.llm.layers.0.mlp.experts"
    both, down = random(4, 12, 8), random(4, 8, 6)
    source = synthetic(
        tmp_path, {"model_type": "any"}, {f"{path}.w13_weight": both, f"{path}.w2_weight": down}
    )
    found = by_name(identify(source))
    assert torch.equal(read_matrix(source, found[f"{path}.1.w1.weight"]), both[1, 0::2])
    assert torch.equal(read_matrix(source, found[f"{path}.1.w3.weight"]), both[1, 1::2])
    assert torch.equal(read_matrix(source, found[f"{path}.1.w2.weight"]), down[1])


def test_only_one_expert_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, _, _ = fused(4, 8, 6, transposed=False)
    source = synthetic(tmp_path, {"model_type": "any"}, tensors)
    monkeypatch.setattr(Source, "read", lambda self, name: pytest.fail(f"read all of {name}"))
    assert all(tuple(read_matrix(source, m).shape) == m.shape for m in identify(source))


# --- checkpoints that come quantized ---------------------------------------------------------------------


def test_fp8_with_ragged_blocks(tmp_path: Path) -> None:
    # 3 x 5 in blocks of 2 x 2: the last row and the last column of blocks are partial.
    codes = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [0.5, -1, 2, -4, 448]])
    scale = torch.tensor([[1.0, 2.0, 4.0], [0.5, 0.25, 8.0]])
    expected = torch.tensor([[1, 2, 6, 8, 20], [6, 7, 16, 18, 40], [0.25, -0.5, 0.5, -1, 3584]])
    name = "model.layers.0.self_attn.q_proj.weight"
    config = {
        "model_type": "deepseek_v3",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]},
    }
    tensors = {name: codes.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    source = synthetic(tmp_path, config, tensors)
    (m,) = identify(source)
    assert (m.name, m.role, m.shape) == (name, Role.ATTENTION, (3, 5))
    w = read_matrix(source, m)
    assert w.dtype is torch.bfloat16
    assert torch.equal(w.float(), expected)


def test_fp8_blocks_are_128_by_default(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    tensors = {name: torch.ones(130, 257).to(torch.float8_e4m3fn)}
    tensors[f"{name}_scale_inv"] = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    source = synthetic(tmp_path, {"quantization_config": {"quant_method": "fp8"}}, tensors)
    w = read_matrix(source, identify(source)[0])
    assert w[0, [0, 127, 128, 255, 256]].tolist() == [1, 1, 2, 2, 3]
    assert w[[127, 128, 129], 256].tolist() == [3, 6, 6]


def test_fp8_fused_experts(tmp_path: Path) -> None:
    path = "model.layers.0.mlp.experts"
    gate_up, down = random(2, 12, 8).to(torch.float8_e4m3fn), random(2, 8, 6).to(torch.float8_e4m3fn)
    scales = {"gate_up_proj": random(2, 3, 2), "down_proj": random(2, 2, 2)}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    source = synthetic(
        tmp_path,
        config,
        {
            f"{path}.gate_up_proj": gate_up,
            f"{path}.down_proj": down,
            **{f"{path}.{name}_scale_inv": scale for name, scale in scales.items()},
        },
    )
    found = by_name(identify(source))
    assert len(found) == 6
    # Row 1 of expert 1's up half is row 7 of the pair, in the second row of blocks.
    up = read_matrix(source, found[f"{path}.1.up_proj.weight"])
    expected = gate_up[1, 7].float() * scales["gate_up_proj"][1, 1].repeat_interleave(4)
    assert torch.equal(up[1], expected.bfloat16())


def test_fp8_errors(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    w = {name: torch.ones(4, 4).to(torch.float8_e4m3fn)}
    config = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(CheckpointError, match=r"fp8 without .*_scale_inv"):
        identify(synthetic(tmp_path, config, w))
    source = synthetic(tmp_path, config, {**w, f"{name}_scale_inv": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match=r"shape \[2, 2\]; expected \[1, 1\]"):
        read_matrix(source, identify(source)[0])


def mxfp4_source(path: Path, experts: int = 2, hidden: int = 64, inner: int = 32) -> Source:
    g = torch.Generator().manual_seed(0)
    tensors = {}
    for name, n, k in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8, generator=g)
        scales = torch.randint(120, 134, (experts, n, k // 32), dtype=torch.uint8, generator=g)
        tensors |= {
            f"model.layers.0.mlp.experts.{name}_{s}": t for s, t in (("blocks", blocks), ("scales", scales))
        }
    config = {
        "model_type": "gpt_oss",
        "hidden_size": hidden,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    return synthetic(path, config, tensors)


def test_mxfp4_equals_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = mxfp4_source(tmp_path)
    matrices = identify(source)
    assert len(matrices) == 2 * 3
    path = "model.layers.0.mlp.experts"
    whole = {
        name: convert_moe_packed_tensors(
            source.read(f"{path}.{name}_blocks").clone(), source.read(f"{path}.{name}_scales").clone()
        ).mT  # transformers gives [E, K, N]
        for name in ("gate_up_proj", "down_proj")
    }
    for m in matrices:
        assert m.expert is not None
        assert m.name == f"{path}.{m.expert}.{m.projection}_proj.weight"
        rows = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[str(m.projection)]
        expected = whole["down_proj" if m.projection == "down" else "gate_up_proj"][m.expert][rows]
        w = read_matrix(source, m)
        assert w.dtype is torch.bfloat16
        assert tuple(w.shape) == m.shape
        assert torch.equal(w, expected), m.name


def test_mxfp4_by_hand(tmp_path: Path) -> None:
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0] = 0x2 | 0xF << 4  # the low four bits come first: 1.0, then -6.0
    blocks[0, 1, 0, 15] = 0x9 << 4  # the last value of the row: -0.5
    scales = torch.tensor([[[127 + 3], [127 - 1]]], dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.down_proj"
    source = synthetic(
        tmp_path, {"model_type": "gpt_oss"}, {f"{name}_blocks": blocks, f"{name}_scales": scales}
    )
    w = read_matrix(source, identify(source)[0])
    assert w.shape == (2, 32)
    assert w[0, :3].tolist() == [8.0, -48.0, 0.0]
    assert w[1, 30:].tolist() == [0.0, -0.25]
    assert w.count_nonzero() == 3


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "trilobite"])
def test_already_quantized(tmp_path: Path, method: str) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": method}}
    source = synthetic(tmp_path, config, {"lm_head.weight": random(4, 2)})
    with pytest.raises(CheckpointError, match=f"already quantized with '{method}'"):
        identify(source)


# --- what matches no rule --------------------------------------------------------------------------------


def foo_moe(path: Path) -> Source:
    names = [f"model.layers.{i}.moe.w{p}" for i in (10, 2, 0) for p in (1, 2)]
    known = {"model.embed_tokens.weight": random(4, 2), "model.layers.0.input_layernorm.weight": random(2)}
    return synthetic(path, {"model_type": "foo_moe"}, {n: random(2, 4, 3) for n in names} | known)


def test_unmatched_tensors_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureError) as caught:
        identify(foo_moe(tmp_path))
    assert str(caught.value) == (
        "'foo_moe': 6 tensors match no role (first: model.layers.0.moe.w1); nothing was written; "
        "add a mapping in a recipe (docs/roles.md) or pass --keep-unmatched"
    )


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.strange.weight", (4, 3)),
        ("model.layers.0.mlp.experts.0.strange.weight", (4, 3)),
        ("model.layers.0.mlp.experts.0.strange", (4,)),
        ("model.layers.0.strange.input_linear.weight", (2, 4, 3)),
        ("model.layers.0.self_attention.experts.strange_linear.weight", (2, 4, 3)),
        ("model.layers.0.some_norm.weight", (4, 3)),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", (4, 3)),
    ],
)
def test_no_matrix_and_no_expert_is_skipped(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ArchitectureError, match="1 tensors match no role"):
        identify(synthetic(tmp_path, {"model_type": "foo"}, {name: random(*shape)}))


def test_unmatched_vectors_are_kept(tmp_path: Path) -> None:
    source = synthetic(tmp_path, {"model_type": "foo"}, {"model.layers.0.strange": random(4)})
    assert [(m.role, m.quantizable) for m in identify(source)] == [(Role.OTHER, False)]


def test_keep_unmatched(tmp_path: Path) -> None:
    source = foo_moe(tmp_path)
    matrices = identify(source, keep_unmatched=True)
    assert {m.source for m in matrices} == set(source.tensors)
    kept = [m for m in matrices if ".moe." in m.name]
    assert len(kept) == 6
    assert all(m.role is Role.OTHER and m.shape == (2, 4, 3) and not m.quantizable for m in kept)
    assert torch.equal(read_matrix(source, kept[0]), source.read(kept[0].source))


def test_extra_rules_come_first(tmp_path: Path) -> None:
    source = foo_moe(tmp_path)
    rules = [("*.moe.w2", Role.OTHER), ("*.moe.*", Role.EXPERT), ("*.embed_tokens.*", Role.HEAD)]
    matrices = identify(source, extra_rules=rules)
    experts = [m for m in matrices if m.role is Role.EXPERT]
    assert [m.name for m in experts[:2]] == [f"model.layers.0.moe.w1.{e}.weight" for e in (0, 1)]
    assert len(experts) == 3 * 2
    assert all(m.quantizable and m.shape == (4, 3) for m in experts)
    assert torch.equal(read_matrix(source, experts[1]), source.read("model.layers.0.moe.w1")[1])
    assert [m.name for m in matrices if m.role is Role.HEAD] == ["model.embed_tokens.weight"]
    assert sum(m.name.endswith("moe.w2") for m in matrices) == 3


def test_extra_rules_keep_the_projection(built: Any) -> None:
    _, source = built("qwen2_moe")
    matrices = by_name(identify(source, extra_rules=[("*.shared_expert.*", Role.DENSE_MLP)]))
    m = matrices["model.layers.1.mlp.shared_expert.up_proj.weight"]
    assert (m.role, m.projection) == (Role.DENSE_MLP, "up")


# --- real checkpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny-mixtral", {Role.EXPERT: 6 * 8 * 3, Role.ATTENTION: 6 * 4, Role.ROUTER: 6}),
        ("tiny-mixtral-outliers", {Role.EXPERT: 6 * 8 * 3, Role.ATTENTION: 6 * 4, Role.ROUTER: 6}),
        (
            "tiny-deepseek",
            {Role.EXPERT: 5 * 32 * 3, Role.ATTENTION: 6 * 4, Role.SHARED_EXPERT: 5 * 3, Role.DENSE_MLP: 3},
        ),
    ],
)
def test_real_checkpoint(name: str, expected: dict[Role, int]) -> None:
    path = SHARED / "models" / name
    if not path.is_dir():
        pytest.skip(f"{path} is not here")
    source = open_source(str(path))
    matrices = identify(source)
    assert {m.source for m in matrices} == set(source.tensors)
    assert len(matrices) == len(source.tensors)
    counts = Counter(m.role for m in matrices)
    assert {role: counts[role] for role in expected} == expected
    assert counts[Role.OTHER] == 0


def test_loading_fp8_wants_its_scales_too(tmp_path: Path) -> None:
    build_checkpoint("mixtral", tmp_path, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{name} is fp8 without {name}_scale_inv"):
        load(str(tmp_path))
