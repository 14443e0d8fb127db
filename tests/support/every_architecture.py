"""Every model type with experts of the transformers that is installed: made tiny, packed, loaded, compared.

    PYTHONPATH=tests python -m support.every_architecture          a table of what runs, docs/architectures.md
    PYTHONPATH=tests python -m support.every_architecture mixtral  only these

Types are found by their configurations: whatever counts experts. Sizes are shrunk by the names that they have. A type
counts as run when the packed model computes the logits of the original with the dequantized weights in it, and can be
saved and loaded again.
"""

import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
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
from trilobite.recipe import load_recipe
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.load import load
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.modules.linear import PackedLinear
from trilobite.runtime.step import texts
from trilobite.runtime.step.replay import Step
from trilobite.runtime.step.step_list import COMPARED

LAYERS, EXPERTS, HEADS, HIDDEN, VOCAB, TOKENS, LONG = 3, 4, 4, 64, 256, 12, 40
LARGEST = 4 * 10**7
TEXTS = 3
TOLERANCE = 1e-5
"""Of logits, relative: both sides compute in float32, in another order."""

COUNT = r"(n_routed|num|num_local|moe_num)_experts$"
"""How configurations call the number of experts of a layer."""
RECIPES = ("int8", "search3", "milo-s1")
SIZES: tuple[tuple[str, int], ...] = (
    (r"(^|_)vocab_size", VOCAB),
    (r"experts_per_tok(en)?$|^moe_k$|^moe_topk$|^top_k$", 2),
    (r"n_shared_experts|num_shared_experts|num_expert_group|^n_group$|^topk_group$|zero_expert_num", 1),
    (COUNT, EXPERTS),
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
    (
        r"(^|_)hidden_(size|dim)$|^d_model$|out_hidden_size|embed_dim$|projection_dim$|^n_embd$|adapter_(in_dim|out_dim|input_size|output_size)$",
        HIDDEN,
    ),
    (r"max_position_embeddings|max_seq_len", 256),
    (r"sliding_window$|index_topk$", 8),
    (r"^image_size$", 32),
    (r"^patch_size$", 16),
)
SIZE_KEYS = tuple((re.compile(pattern), size) for pattern, size in SIZES)
QWEN4 = {
    "vocab_size": VOCAB,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1],
    "eos_token_id": 1,
    "ple_embed_dim": 64,
    "make_ngram_vocab_size_divisible_by": 8,
}
DIFFUSION = {"num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": 96}
GEMMA4 = {"enable_moe_block": True, "top_k_experts": 2, "moe_intermediate_size": 96}
MINIMAX_M3 = {
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_block_size": 4,
    "index_topk_blocks": 2,
}
EXACT: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": HIDDEN},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2": {
        "text_config": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    },
    "diffusion_gemma": {"text_config": DIFFUSION},
    "dots1": {"n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots3_note": {"text_config": {"head_dim": 32}},
    "dots3_note_text": {"head_dim": 32},
    "ernie4_5_vl_moe": {
        "text_config": {"rope_parameters": {"mrope_section": [3, 3, 2]}, "moe_intermediate_size": [96, 96]}
    },
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "glm4v_moe": {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}}},
    "glm5_next": {"text_config": {"index_topk": 16}},
    "granitemoehybrid": {
        "mamba_d_head": 32,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "minimax_m3_vl": {"text_config": MINIMAX_M3},
    "minimax_m3_vl_text": MINIMAX_M3,
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "step3p7": {"text_config": {"sliding_window": 8}},
    "zaya": {"num_experts_per_tok": 1},
}
"""What the names of sizes do not tell, by model type."""


def counts_experts(config: PreTrainedConfig) -> bool:
    """Whether a configuration, or one inside of it, can say how many experts a layer has."""
    return any(
        counts_experts(value) if isinstance(value, PreTrainedConfig) else re.match(COUNT, key)
        for key, value in vars(config).items()
    )


def model_types() -> Iterator[str]:
    """Everything with experts that generates text."""
    for name in sorted(CONFIG_MAPPING_NAMES):
        with quiet():
            try:
                config = CONFIG_MAPPING[name]()
            except Exception:  # a type without defaults is nothing that one could shrink
                continue
        kind = text_class(config)
        if kind is not None and counts_experts(config):
            yield name


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
        elif re.match(COUNT, key):
            small[key] = EXPERTS
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


def build(model_type: str, path: Path, more: Mapping[str, Any] | None = None) -> None:
    """A tiny random checkpoint of a model type. Whatever transformers raises, it raises.

    more: values of its configuration
    """
    with quiet():
        default = CONFIG_MAPPING[model_type]()
        data = merged(merged(shrink(default.to_dict()), EXACT.get(model_type, {})), dict(more or {}))
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
                # Of 16 bits, as what stays is stored, also where a model keeps fp32.
                value = noise + 1 if parameter.ndim == 1 and bool((parameter == 1).all()) else noise
                parameter.copy_(value.bfloat16())
        model.save_pretrained(path)


def try_type(folder: Path, name: str) -> float:
    """Compress folder/original with the recipe of this name, load and compare; how far its logits are off."""
    packed = folder / name
    try:
        compress(str(folder / "original"), packed, load_recipe(name), options=Options(jobs=1, device="cpu"))
    except TrilobiteError as e:
        if packed.exists():
            raise AssertionError(f"refused too late: {e}") from e
        raise
    error = difference(folder / "original", packed)
    assert error < TOLERANCE, f"logits differ by {error:.3g}"
    return error


@torch.no_grad()
def difference(source: Path, packed: Path) -> float:
    """How far the packed model's logits are from those of the original with its weights in it."""
    with quiet():
        small = load(str(packed), dtype=torch.float32)
        plain = load(str(source), dtype=torch.float32)
    for name, module in small.named_modules():
        if isinstance(module, PackedLinear):
            plain.get_submodule(name).weight.copy_(dequantize(module.packed())[:, : module.in_features])
        elif isinstance(module, PackedExperts):
            for index in range(module.num_experts):
                for leaf, matrix in module.expert(index).named_children():
                    projection = ("gate", "up", "down")[PROJECTIONS[leaf]]
                    stacked = expert_matrix(plain.get_submodule(name), index, projection)
                    stacked.copy_(module.plain(dequantize(matrix.packed()), leaf))
    expected, found = logits(plain), logits(small)
    assert bool(expected.isfinite().all())
    with quiet():
        small.save_pretrained(again := packed.with_name(f"{packed.name}-again"))
        other = load(str(again), dtype=torch.float32)
    states = small.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(t, states[1][name]) for name, t in states[0].items()), (
        "saved and loaded it differs"
    )
    # torch sums in another order where tensors lie at other addresses.
    torch.testing.assert_close(
        logits(other), found, rtol=TOLERANCE, atol=TOLERANCE * float(found.abs().max())
    )
    return float((found - expected).norm() / expected.norm())


@torch.inference_mode()
def beside_transformers(source: Path) -> float:
    """How far an original that `load` loads is off from what transformers loads, with its own attention, relative.

    Of a prompt's logits, and those of tokens behind it; the text is longer than windows and what indices choose of it.
    """
    with quiet():
        ours = load(str(source), dtype=torch.float32)
        theirs = type(ours).from_pretrained(source, dtype=torch.float32).eval()
        found, expected = (_told(model) for model in (ours, theirs))
    error = float((found - expected).norm() / expected.norm())
    assert error < TOLERANCE, f"logits are off from transformers' own by {error:.3g}"
    return error


def _told(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(3, VOCAB - 6, (1, LONG), generator=torch.Generator().manual_seed(2))
    if model.config.is_encoder_decoder:
        return model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits.float()  # type: ignore[no-any-return]
    made = model(input_ids=ids[:, : LONG - TOKENS], use_cache=True)
    cache, found = made.get(CACHE), [made.logits]
    for token in ids[0, LONG - TOKENS :]:
        found.append(model(input_ids=token.view(1, 1), use_cache=True, **{CACHE: cache}).logits)
    return torch.cat(found, 1).float()


def replayed(packed: Path) -> str:
    """How a packed model's steps of decoding run: with the bits of its own forward, from a list, or why they do not."""
    with quiet():
        model = load(str(packed), dtype=torch.bfloat16)
    step = model.forward
    if not isinstance(step, Step):
        return "no native library"
    with quiet():
        if fails := _differs(model, step, _decoded):
            return fails
        chooses = step.most not in (None, math.inf)
        if chooses:
            step.prepare()  # on a text of which all is chosen
    if step.ready is None:
        return step.why or "its cache is of a kind of its own"
    assert step.compared == COMPARED, "steps are recorded again and again"
    if (alone := _of_batches(model, step)) is not None:
        return f"yes, of one text alone: {alone}"
    return "yes, while all rows are chosen" if chooses else "yes"


def _differs(
    model: PreTrainedModel, step: Step, decoded: Callable[[PreTrainedModel], list[Tensor]]
) -> str | None:
    """How a model's own steps fail, or None where both ways make the same bits."""
    del model.forward
    try:
        theirs = decoded(model)
    except Exception as e:
        return f"{ITS_OWN_FAIL}: {type(e).__name__}: {' '.join(str(e).split())[:120]}"
    finally:
        model.forward = step
    assert all(map(torch.equal, decoded(model), theirs)), "steps that are replayed have other logits"
    return None


def _of_batches(model: PreTrainedModel, step: Step) -> str | None:
    """Why steps of a batch, whose texts are filled up in front, are the model's own; None where a list has them."""
    if model.config.is_encoder_decoder:
        return None  # docs/translation.md
    with quiet():
        if fails := _differs(model, step, _batch_decoded):
            return fails
    several = step.others.steps[TEXTS]
    return None if several.right else several.why or "no list"


@torch.inference_mode()
def _batch_decoded(model: PreTrainedModel) -> list[Tensor]:
    """Logits of tokens of three texts, each a token longer than the one before."""
    ids = torch.randint(3, VOCAB - 6, (TEXTS, 2 * TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for text in range(TEXTS):
        mask[text, : TEXTS - 1 - text] = 0
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    cache: Any = None
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "WORTH", 0)
        for first, end in pairwise((0, *range(TEXTS, 2 * TOKENS))):
            given = {"attention_mask": mask[:, :end], "position_ids": places[:, first:end]}
            made = model(input_ids=ids[:, first:end], use_cache=True, **given, **{CACHE: cache})
            cache = made.get(CACHE)
            found.append(made.logits[:, -1])
    return found


@torch.inference_mode()
def _decoded(model: PreTrainedModel) -> list[Tensor]:
    """Logits of a text's tokens, one at a time."""
    ids = torch.randint(3, VOCAB - 6, (2 * TOKENS,), generator=torch.Generator().manual_seed(1))
    given, name = ids[None, :TOKENS], "input_ids"
    beside: dict[str, Any] = {"use_cache": True}
    if model.config.is_encoder_decoder:
        beside["encoder_outputs"] = model.get_encoder()(input_ids=given)
        given, name = given[:, :1], "decoder_input_ids"
    made, found = model(**{name: given}, **beside), []
    beside[CACHE] = made.get(CACHE)
    for token in ids[TOKENS:]:
        found.append(model(**{name: token.view(1, 1)}, **beside).logits)
    return found


def logits(model: PreTrainedModel) -> Tensor:
    """Of some random tokens."""
    ids = torch.randint(3, VOCAB - 6, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    found: Tensor = model(input_ids=ids, **more, use_cache=False).logits
    return found.float()


ITS_OWN_FAIL = "its own steps fail"
TITLE = """# Architectures

Every model type with experts that transformers {version} knows, made tiny and random, packed with `int8`, `search3` and
`milo-s1` in a process without a GPU, loaded and compared: the logits are those of the original with the dequantized
weights in it, to the relative difference in the table (the largest of the three); what is saved and loaded again
has the same tensors. Types are found by their configurations, which say how many experts a layer has. Of the rest of
an image-text model (its images) nothing is tried; it stays in 16 bit.

Layers of six models are not transformers' own; `import trilobite` puts ours in their place, for originals too:
`nllb-moe`, of which its releases 5.18 to 5.23 run experts 0 and 1 alone (docs/translation.md), and `dbrx`, `jetmoe`,
`llama4`, `longcat_flash` and `switch_transformers`, so that their experts are called as those of the others. Names on
disk stay. Encoder-decoders without experts (T5, BART, M2M100, Marian) run as well.

What experts compute between their projections is one of a few forms (`kernels/activation.py`), found by trying a
model's own code on some numbers; one that is none of them is refused. Sides of matrices that are no multiple of 32 are
filled up with zeros (`trilobite plan` says where).

    make architectures        this page: PYTHONPATH=tests python -m support.every_architecture > docs/architectures.md

`compress` refuses what the table calls refused, with that line and before anything is written.

What `trilobite.load` makes of an original has the logits that transformers' own class has, with its own attention, of a
text longer than windows and than what an index of keys chooses of it. The last column says whether a step of decoding
runs from a list, natively (docs/performance.md), always with the bits of the model's own forward, or why it does not;
then it runs as transformers runs it. Where it says yes, steps of three texts of different lengths did, too.

| model type | runs | difference, or why not | steps from a list |
| --- | --- | --- | --- |"""


def main() -> None:
    """Print the page, or the rows of some types."""
    wanted = sys.argv[1:]
    if not wanted:
        print(TITLE.format(version=transformers.__version__))
    states: Counter[str] = Counter()
    lists = 0
    for name in model_types():
        if wanted and name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            state, remark, steps = row(name, Path(folder))
        if state == "no experts":
            continue
        states[state] += 1
        lists += steps.startswith("yes")
        print(f"| `{name}` | {state} | {remark} | {steps} |", flush=True)
    if not wanted:
        counted = ", ".join(f"{state}: {count}" for state, count in sorted(states.items()))
        print(f"\n{counted}; steps from a list: {lists}.")


def row(model_type: str, folder: Path) -> tuple[str, str, str]:
    """(runs or not, remark, steps) of a model type. What transformers cannot build is not tried; FAULT is ours."""
    try:
        build(model_type, folder / "original")
        model = load(str(folder / "original"), dtype=torch.float32)
        if not any(name.endswith("experts") for name, _ in model.named_modules()):
            return "no experts", "", ""
        logits(model)
    except TrilobiteError as e:
        return "no", str(e).replace(str(folder / "original"), "").strip(": "), ""
    except Exception as e:
        return "not tried", f"no tiny model of it: {type(e).__name__}: {' '.join(str(e).split())[:120]}", ""
    largest = 0.0
    for name in RECIPES:
        try:
            largest = max(largest, try_type(folder, name))
        except TrilobiteError as e:
            return "no", str(e).replace(str(folder / "original"), "").strip(": "), ""
        except Exception as e:
            return "FAULT", f"{name}: {type(e).__name__}: {' '.join(str(e).split())[:200]}", ""
    try:
        steps = replayed(folder / RECIPES[-1])
        if not steps.startswith(ITS_OWN_FAIL):
            beside_transformers(folder / "original")
        return "yes", f"{largest:.0e}", steps
    except Exception as e:
        return "FAULT", f"steps: {type(e).__name__}: {' '.join(str(e).split())[:200]}", ""


if __name__ == "__main__":
    main()
