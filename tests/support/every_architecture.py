"""Every model type with experts of the transformers that is installed: made tiny, packed, loaded, compared.

    PYTHONPATH=tests python -m support.every_architecture          a table of what runs, docs/architectures.md
    PYTHONPATH=tests python -m support.every_architecture mixtral  only these

Types are found by their configurations: whatever counts experts. Sizes are shrunk by the names that they have. A type
counts as run when the packed model computes the logits of the original with the dequantized weights in it.
"""

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from trilobite.errors import TrilobiteError
from trilobite.formats.weight import dequantize
from trilobite.models.experts import PROJECTIONS
from trilobite.models.quiet import quiet
from trilobite.models.skeleton import text_class
from trilobite.quantize.calibrate.stacked_experts import expert_matrix
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import Role, load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.modules.linear import PackedLinear

LAYERS, EXPERTS, HEADS, HIDDEN, VOCAB, TOKENS = 3, 4, 4, 64, 256, 12
LARGEST = 4 * 10**7
TOLERANCE = 1e-3
"""Of logits, relative: both sides compute in float32, in another order."""

SIZES: tuple[tuple[str, int], ...] = (
    (r"(^|_)vocab_size", VOCAB),
    (r"experts_per_tok(en)?$|^moe_k$|^moe_topk$|^top_k$", 2),
    (r"n_shared_experts|num_shared_experts|num_expert_group|^n_group$|^topk_group$|zero_expert_num", 1),
    (r"n_routed_experts|num_(local_)?experts$|moe_num_experts", EXPERTS),
    (r"first_k_dense_replace|moe_layer_start_index|num_dense_layers", 1),
    (r"num_nextn_predict_layers|num_mtp_modules", 0),
    (
        r"^(num_hidden_layers|num_layers|n_layers|num_decoder_layers|encoder_layers|decoder_layers|depth)$",
        LAYERS,
    ),
    (r"key_value_heads|num_query_groups|n_groups$", 2),
    (r"heads$", HEADS),
    (r"lora_rank|_rank$", 32),
    (r"head_dim$|^d_kv$|rotary_dim$|index_head_dim", 16),
    (r"intermediate|ffn_(hidden_size|dim)|^d_ff$|expert_dim$|ffn_hidden", 96),
    (r"(^|_)hidden_(size|dim)$|^d_model$|out_hidden_size|embed_dim$|projection_dim$|^n_embd$", HIDDEN),
    (r"max_position_embeddings|max_seq_len", 256),
    (r"sliding_window$|index_topk$", 8),
    (r"^image_size$", 32),
    (r"^patch_size$", 16),
)
SIZE_KEYS = tuple((re.compile(pattern), size) for pattern, size in SIZES)
EXACT: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": HIDDEN},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2": {
        "text_config": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    },
    "dots3_note": {"text_config": {"head_dim": 32}},
    "dots3_note_text": {"head_dim": 32},
    "glm4v_moe": {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}}},
    "glm5_next": {"text_config": {"index_topk": 16}},
    "granitemoehybrid": {
        "mamba_d_head": 32,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "qwen4_exp": {"text_config": {"vocab_size": VOCAB}},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "zaya": {"num_experts_per_tok": 1},
}
"""What the names of sizes do not tell, by model type."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a type. flag: what the command line needs    error: the one line when it is refused."""

    model_type: str
    kind: str
    flag: str = ""
    error: str = ""


def counts_experts(config: PreTrainedConfig) -> bool:
    """Whether a configuration, or one inside of it, has more than one expert."""
    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            if counts_experts(value):
                return True
        elif (
            re.search(r"(n_routed|num|num_local|moe_num)_experts$", key) and type(value) is int and value > 1
        ):
            return True
    return False


def model_types() -> Iterator[tuple[str, str]]:
    """(model type, its class) of everything with experts that generates text."""
    for name in sorted(CONFIG_MAPPING_NAMES):
        with quiet():
            try:
                config = CONFIG_MAPPING[name]()
            except Exception:  # a type without defaults is nothing that one could shrink
                continue
        kind = text_class(config)
        if kind is not None and counts_experts(config):
            yield name, kind.__name__


def shrink(data: dict[str, Any]) -> dict[str, Any]:
    """A configuration's JSON with small sizes; lists and tables with an entry for a layer are cut."""
    layers = data.get("num_hidden_layers") or data.get("num_layers")
    small: dict[str, Any] = {}
    for name, value in data.items():
        key = str(name)
        if key in ("id2label", "label2id"):
            continue
        if isinstance(value, dict) and key.startswith("rope"):
            small[key] = value
        elif isinstance(value, dict) and key == "per_layer_config":
            small[key] = {k: shrink(v) for k, v in value.items() if int(k) < LAYERS}
        elif isinstance(value, dict):
            small[key] = shrink(value)
        elif type(value) is int and value > 0:
            small[key] = next((size for pattern, size in SIZE_KEYS if pattern.search(key)), value)
        elif isinstance(value, list) and type(layers) is int and len(value) == layers:
            small[key] = _some_of_each(value)
        else:
            small[key] = value
        if key.endswith("_token_id"):
            small[key] = 1 if isinstance(value, int) else None
    return small | _heads(data, small)


def _heads(data: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Sizes of heads that are equal, or sums, of others stay so."""
    found = {}
    if data.get("num_key_value_heads") == data.get("num_attention_heads"):
        found["num_key_value_heads"] = small.get("num_attention_heads")
    if isinstance(data.get("qk_nope_head_dim"), int) and isinstance(data.get("qk_rope_head_dim"), int):
        found["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
        if data.get("head_dim") == data["qk_nope_head_dim"] + data["qk_rope_head_dim"]:
            found["head_dim"] = found["qk_head_dim"]
    return {key: value for key, value in found.items() if key in data}


def merged(data: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A configuration's JSON with other values in it, and in what is nested in it."""
    inside = {k: merged(data.get(k) or {}, v) for k, v in more.items() if isinstance(v, dict)}
    return data | more | inside


def _some_of_each(values: list[Any]) -> list[Any]:
    """As many layers as the model has, with every kind of layer if there is room."""
    kinds = sorted(set(map(str, values)), key=[*map(str, values)].index)
    first = [next(v for v in values if str(v) == kind) for kind in kinds]
    return (first + [first[-1]] * LAYERS)[:LAYERS]


def build(model_type: str, path: Path) -> None:
    """A tiny random checkpoint of a model type. Whatever transformers raises, it raises."""
    with quiet():
        default = CONFIG_MAPPING[model_type]()
        data = merged(shrink(default.to_dict()), EXACT.get(model_type, {}))
        config = type(default).from_dict(data)
        kind = text_class(config)
        assert kind is not None
        with torch.device("meta"):
            size = sum(p.numel() for p in kind._from_config(config).parameters())
        assert size < LARGEST, f"{size / 1e6:.0f} million parameters; shrink more of its configuration"
        model: PreTrainedModel = kind._from_config(config, dtype=torch.bfloat16).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * 0.05
                parameter.copy_(noise + 1 if parameter.ndim == 1 and bool((parameter == 1).all()) else noise)
        model.save_pretrained(path)


def try_type(model_type: str, kind: str, folder: Path) -> Outcome:
    """Compress, load and compare the model type in folder/original, with the flags that its refusals name."""
    source = folder / "original"
    said = ""
    for flag in ("", "--keep expert", "--keep-unmatched", "--keep-unmatched --keep expert"):
        if flag and not all(part in said for part in re.findall(r"--\S+", flag)):
            continue
        recipe = load_recipe("int8").keeping((Role.EXPERT,) if "expert" in flag else ())
        packed = folder / f"packed{flag.replace(' ', '')}"
        try:
            compress(
                str(source),
                packed,
                recipe,
                keep_unmatched="unmatched" in flag,
                options=Options(jobs=1, device="cpu"),
            )
        except TrilobiteError as e:
            if packed.exists():
                raise AssertionError(f"{model_type}: refused too late: {e}") from e
            said += f" {e}"
            first = said.replace(str(source), "").strip()
            continue
        error = difference(source, packed)
        assert error < TOLERANCE, f"{model_type}: logits differ by {error:.3g}"
        return Outcome(model_type=model_type, kind=kind, flag=flag)
    return Outcome(model_type=model_type, kind=kind, error=first)


@torch.no_grad()
def difference(source: Path, packed: Path) -> float:
    """How far the packed model's logits are from those of the original with its weights in it."""
    with quiet():
        small = load(str(packed), dtype=torch.float32)
        plain = load(str(source), dtype=torch.float32)
    for name, module in small.named_modules():
        if isinstance(module, PackedLinear):
            plain.get_submodule(name).weight.copy_(dequantize(module.packed()))
        elif isinstance(module, PackedExperts):
            for index in range(module.num_experts):
                for leaf, matrix in module.expert(index).named_children():
                    projection = ("gate", "up", "down")[PROJECTIONS[leaf]]
                    stacked = expert_matrix(plain.get_submodule(name), index, projection)
                    stacked.copy_(dequantize(matrix.packed()))
    expected, found = logits(plain), logits(small)
    assert bool(expected.isfinite().all())
    return float((found - expected).norm() / expected.norm())


def logits(model: PreTrainedModel) -> Tensor:
    """Of some random tokens."""
    ids = torch.randint(3, VOCAB - 6, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    found: Tensor = model(input_ids=ids, **more, use_cache=False).logits
    return found.float()


TITLE = """# Architectures

Every model type with experts that transformers {version} knows, made tiny and random, packed with `int8` in a process
without a GPU, loaded and compared: the logits are those of the original with the dequantized weights in it. Of the rest
of an image-text model (its images) nothing is tried.

Of these models `nllb-moe` is not transformers' own: its releases 5.18 to 5.23 run experts 0 and 1 alone. `import
trilobite` puts a sparse layer in its place that computes the top-2 mixture, for originals too (docs/translation.md).
Encoder-decoders without experts (T5, BART, M2M100, Marian) run as well.

    PYTHONPATH=tests python -m support.every_architecture > docs/architectures.md

`compress` refuses what the table calls refused, with that line and before anything is written. Flags are those of
`compress` and `plan`; `--keep-unmatched` keeps matrices without a role in 16 bit, `--keep expert` all experts.

| model type | runs | flags, or why not |
| --- | --- | --- |"""


def main() -> None:
    """Print the page, or the rows of some types."""
    wanted = sys.argv[1:]
    if not wanted:
        print(TITLE.format(version=transformers.__version__))
    states: Counter[str] = Counter()
    for name, kind in model_types():
        if wanted and name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            state, remark = row(name, kind, Path(folder))
        states[state + " with a flag" * (state == "yes" and bool(remark))] += 1
        print(f"| `{name}` | {state} | {remark} |", flush=True)
    if not wanted:
        print("\n" + ", ".join(f"{state}: {count}" for state, count in sorted(states.items())) + ".")


def row(model_type: str, kind: str, folder: Path) -> tuple[str, str]:
    """(runs or not, remark) of a model type. What transformers cannot build is not tried; our faults are FAULT."""
    try:
        build(model_type, folder / "original")
        logits(load(str(folder / "original"), dtype=torch.float32))
    except Exception as e:
        return "not tried", f"no tiny model of it: {type(e).__name__}: {' '.join(str(e).split())[:120]}"
    try:
        found = try_type(model_type, kind, folder)
    except Exception as e:
        return "FAULT", f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
    return ("no", found.error) if found.error else ("yes", f"`{found.flag}`" if found.flag else "")


if __name__ == "__main__":
    main()
