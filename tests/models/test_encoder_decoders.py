"""The sparse layers of NLLB-MoE and Switch, originals and packed, against the mixtures written out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import oracle_seq2seq as oracle
from support.architectures import EXPERTS, HIDDEN, INTERMEDIATE, TINY_CONFIGS, build_checkpoint, build_model
from support.packing import relative_error
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, NllbMoeForConditionalGeneration

import trilobite
from trilobite.errors import ArchitectureError
from trilobite.formats.weight import dequantize
from trilobite.models.nllb_moe import NllbMoeSparseMLP
from trilobite.models.switch_transformers import SwitchTransformersSparseMLP
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.modules.experts import PackedExperts

B, S, T = 3, 24, 18
TYPES = ("nllb-moe", "switch_transformers")
SPARSE = (NllbMoeSparseMLP, SwitchTransformersSparseMLP)
VARIANTS: dict[str, dict[str, Any]] = {
    "nllb-moe": {},
    "nllb-moe normalises first": {"normalize_router_prob_before_dropping": True},
    "nllb-moe drops": {"moe_eval_capacity_token_fraction": 0.25},
    "nllb-moe drops the unlikely, normalises first": {
        "moe_eval_capacity_token_fraction": 0.25,
        "batch_prioritized_routing": True,
        "normalize_router_prob_before_dropping": True,
    },
    "nllb-moe has a capacity": {"moe_eval_capacity_token_fraction": -1.0, "expert_capacity": 11},
    "nllb-moe routes padding, has a bias": {"router_ignore_padding_tokens": True, "router_bias": True},
    "nllb-moe draws in training only": {"second_expert_policy": "random"},
    "switch_transformers": {},
    "switch_transformers drops": {"expert_capacity": 5},
}


def inputs() -> dict[str, Tensor]:
    """A batch of sources and targets; the first source is padded."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(B, S, dtype=torch.int64)
    mask[0, 15:] = 0
    source = torch.randint(3, 250, (B, S), generator=generator)
    target = torch.randint(3, 250, (B, T), generator=generator)
    return {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}


@torch.no_grad()
def watched(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """What enters and leaves every sparse layer, by its name."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        module.register_forward_hook(lambda _m, args, out, name=name: seen.update({name: (args[0], out)}))
        for name, module in model.named_modules()
        if isinstance(module, SPARSE)
    ]
    model(**inputs())
    for handle in handles:
        handle.remove()
    return seen


def expected(
    model: Any, name: str, x: Tensor, tensors: dict[str, Tensor]
) -> tuple[Tensor, list[oracle.Choice]]:
    """The oracle's answer for one layer. tensors: of the checkpoint."""
    layer = {n.removeprefix(f"{name}."): w.float() for n, w in tensors.items() if n.startswith(f"{name}.")}
    if model.config.model_type == "switch_transformers":
        return oracle.switch(x, layer, model.config)
    padding = [False] * x.shape[0] * x.shape[1]
    if ".encoder." in f".{name}":
        padding = (inputs()["attention_mask"] == 0).flatten().tolist()
    y, choices = oracle.nllb_moe(x.flatten(0, 1), layer, model.config, padding)
    return y.view_as(x), choices


def all_right(model: Any, tensors: dict[str, Tensor], tolerance: float) -> int:
    """Every sparse layer does what the oracle says, and every expert is hit. Returns how many choices were dropped."""
    dropped = 0
    seen = watched(model)
    assert len(seen) == 2
    for name, (x, y) in seen.items():
        right, choices = expected(model, name, x, tensors)
        assert {e for choice in choices for e, _ in choice} == set(range(EXPERTS))
        assert relative_error(y, right) < tolerance
        width = 1 if model.config.model_type == "switch_transformers" else 2
        dropped += sum(width - len(choice) for choice in choices)
    return dropped


def checkpoint(variant: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a variant, of a seed with which all experts are hit."""
    model_type = variant.split()[0]
    config = TINY_CONFIGS[model_type]

    def changed() -> Any:
        made = config()
        for key, value in VARIANTS[variant].items():
            assert hasattr(made, key)
            setattr(made, key, value)
        return made

    monkeypatch.setitem(TINY_CONFIGS, model_type, changed)
    build_checkpoint(model_type, path, seed=4 if model_type == "switch_transformers" else 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_original_computes_the_mixture(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(variant, tmp_path, monkeypatch)
    model = load(str(tmp_path))
    dropped = all_right(model, load_file(tmp_path / "model.safetensors"), 1e-5)
    padding = 9 * 2 if variant.startswith("nllb") and "routes padding" not in variant else 0
    assert dropped > padding if "drops" in variant or "capacity" in variant else dropped == padding


@pytest.mark.parametrize("variant", ["nllb-moe", "nllb-moe drops", "switch_transformers drops"])
@pytest.mark.parametrize("on_load", [False, True])
def test_a_packed_model_computes_the_mixture(
    variant: str, on_load: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(variant, tmp_path / "m", monkeypatch)
    if on_load:
        config = trilobite.TrilobiteConfig("int8")
        model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "m", quantization_config=config).eval()
    else:
        compress(str(tmp_path / "m"), tmp_path / "p", load_recipe("int8"), options=Options(device="cpu"))
        model = load(str(tmp_path / "p"))
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    found = 0
    for name, module in model.named_modules():
        if isinstance(module, PackedExperts):
            for index in range(EXPERTS):
                for leaf, matrix in module.expert(index).named_children():
                    tensors[f"{name}.expert_{index}.{leaf}.weight"] = dequantize(matrix.packed())
                    found += 1
    assert found == 2 * EXPERTS * 2
    all_right(model, tensors, 1e-4)


@pytest.mark.parametrize("model_type", TYPES)
def test_names_on_disk_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = build_checkpoint(model_type, tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    up, down = ("fc1", "fc2") if model_type == "nllb-moe" else ("wi", "wo")
    kinds = ("weight", "bias") if model_type == "nllb-moe" else ("weight",)
    layers = [name for name, module in model.named_modules() if isinstance(module, SPARSE)]
    assert {n for n in names if ".experts." in n} == {
        f"{layer}.experts.expert_{e}.{leaf}.{kind}"
        for layer in layers
        for e in range(EXPERTS)
        for leaf in (up, down)
        for kind in kinds
    }
    assert names[f"{layers[0]}.experts.expert_3.{up}.weight"].shape == (INTERMEDIATE, HIDDEN)
    loaded = load(str(tmp_path))
    assert all(torch.equal(p, loaded.get_parameter(n)) for n, p in model.named_parameters())
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(model).__name__]


def test_a_gated_switch_is_refused(tmp_path: Path) -> None:
    build_checkpoint("switch_transformers", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"dense_act_fn": "gated-gelu"}))
    for attempt in (
        lambda: load(str(tmp_path / "m")),
        lambda: compress(str(tmp_path / "m"), tmp_path / "p", load_recipe("int8")),
    ):
        with pytest.raises(ArchitectureError, match="no SwitchTransformersForConditionalGeneration") as e:
            attempt()
        assert "\n" not in str(e.value)
    assert not (tmp_path / "p").exists()


def test_more_than_ten_experts_stay_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TINY_CONFIGS["nllb-moe"]

    def twelve() -> Any:
        made = config()
        made.num_experts = 12
        return made

    monkeypatch.setitem(TINY_CONFIGS, "nllb-moe", twelve)
    model = build_checkpoint("nllb-moe", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    layer = "model.encoder.layers.1.ffn.experts"
    loaded = NllbMoeForConditionalGeneration.from_pretrained(tmp_path)
    for e in range(12):
        assert torch.equal(
            stored[f"{layer}.expert_{e}.fc1.bias"], model.get_parameter(f"{layer}.up_proj_bias")[e]
        )
        assert torch.equal(
            stored[f"{layer}.expert_{e}.fc2.weight"], loaded.get_parameter(f"{layer}.down_proj")[e]
        )


@pytest.mark.parametrize("model_type", TYPES)
def test_a_packed_model_saves_and_loads_itself(model_type: str, tmp_path: Path) -> None:
    build_checkpoint(model_type, tmp_path / "m", dtype=torch.bfloat16)
    compress(str(tmp_path / "m"), tmp_path / "p", load_recipe("milo-s1"), options=Options(device="cpu"))
    model = load(str(tmp_path / "p"))
    model.save_pretrained(tmp_path / "again")
    before, after = load_file(tmp_path / "p" / "model-00001-of-00001.safetensors"), {}
    for file in sorted((tmp_path / "again").glob("*.safetensors")):
        after |= load_file(file)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)
    again = load(str(tmp_path / "again"))
    with torch.no_grad():
        assert torch.equal(model(**inputs()).logits, again(**inputs()).logits)
    # In 16 bit a token that lies between two experts may take either.
    again, plain = (load(str(tmp_path / folder), dtype=torch.float32) for folder in ("again", "p"))
    plain.dequantize()
    with torch.no_grad():
        assert relative_error(plain(**inputs()).logits, again(**inputs()).logits) < 1e-5


@pytest.mark.parametrize("model_type", TYPES)
@torch.no_grad()
def test_a_step_behind_a_cache_is_the_whole_pass(model_type: str) -> None:
    model, batch = build_model(model_type), inputs()
    target = batch.pop("decoder_input_ids")
    whole = model(**batch, decoder_input_ids=target).logits
    batch["encoder_outputs"] = model.get_encoder()(batch.pop("input_ids"), batch["attention_mask"])
    first = model(**batch, decoder_input_ids=target[:, :-3], use_cache=True)
    rest = model(
        **batch,
        decoder_input_ids=target[:, -3:],
        decoder_attention_mask=torch.ones_like(target),
        past_key_values=first.past_key_values,
    )
    assert relative_error(rest.logits, whole[:, -3:]) < 1e-5


def test_a_model_in_training_masks_and_draws() -> None:
    torch.manual_seed(1)  # draws every expert at least once
    model = build_model("nllb-moe").train()
    model.config.second_expert_policy = "random"
    loss = model(**inputs(), labels=inputs()["decoder_input_ids"]).loss
    loss.backward()
    grads = [p.grad for n, p in model.named_parameters() if ".experts." in n]
    assert all(g is not None and bool(g.isfinite().all()) and bool(g.abs().sum() > 0) for g in grads)
