"""Packed models of true layers, but few of them; what one decoding step of a model reads, and where its time goes.

    python -m benchmarks.lib.whole_models FOLDER mixtral deepseek qwen3

writes FOLDER/Mixtral-8x7B and so on, INT3 of random weights, which other scripts take; what is there is not made again.
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.modules.linear import PackedLinear
from trilobite.runtime.modules.residence import modules_that_run

VOCABULARY = 32000
DEEPSEEK: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
}
"""What DeepSeek-MoE-16B and DeepSeek-V2-Lite have in common."""
LATENT: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
QWEN3: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
GLM: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
}
SHAPES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "mixtral": ("mixtral", "Mixtral-8x7B", 2, {}),
    "qwen3": ("qwen3_moe", "Qwen3-30B-A3B", 4, QWEN3),
    "qwen3-next": ("qwen3_next", "Qwen3-Next-80B-A3B", 4, {}),
    "lfm2": (
        "lfm2_moe",
        "LFM2-8B-A1B",
        8,
        {"layer_types": [*("conv", "conv", "full_attention", "conv") * 2]},
    ),
    "deepseek": ("deepseek", "DeepSeek-MoE-16B", 4, {**DEEPSEEK, "first_k_dense_replace": 0}),
    "gpt-oss": ("gpt_oss", "gpt-oss-20b", 4, {"num_local_experts": 32}),
    "glm": ("glm4_moe", "GLM-4.5-Air", 3, GLM),
    "deepseek-v2": (
        "deepseek_v2",
        "DeepSeek-V2-Lite",
        2,
        {**DEEPSEEK, **LATENT, "first_k_dense_replace": 1, "max_position_embeddings": 32768},
    ),
    "deepseek-v3.2": (
        "deepseek_v32",
        "DeepSeek-V3.2 with 32 experts of 256",
        3,
        {"n_routed_experts": 32, "first_k_dense_replace": 1},
    ),
}
"""Model type, the model whose layers these are, how many of them, and what is not the type's default."""


def _config(name: str, layers: int | None) -> tuple[Any, str]:
    """Configuration and title of a model with the layers of a large one."""
    kind, title, usual, values = SHAPES[name]
    layers = layers or usual
    values = {"num_hidden_layers": layers, "vocab_size": VOCABULARY, "tie_word_embeddings": False, **values}
    return AutoConfig.for_model(kind, **values), f"{title} shape, {layers} layers"


def make_checkpoint(config: Any, folder: Path) -> None:
    """A random bf16 checkpoint."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    noise = torch.randn(1 << 22).to(torch.bfloat16) * 0.02
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        if parameter.dim() == 1:
            flat.fill_(1)
        for at in range(0, flat.numel() if parameter.dim() > 1 else 0, noise.numel()):
            piece = flat[at : at + noise.numel()]
            piece.copy_(noise[: piece.numel()])
    for buffer in model.buffers():  # to_empty leaves them undefined: a router's biases, rotary frequencies
        buffer.zero_()
    for module in model.modules():
        if hasattr(module, "original_inv_freq") or hasattr(module, "inv_freq"):
            module.__init__(config=config)
    model.save_pretrained(folder)


def packed_models(
    names: Sequence[str] = ("mixtral", "deepseek"), layers: int | None = None
) -> Generator[tuple[str, Path]]:
    """Name and folder of each whole model; the folder is gone when the next one is asked for.

    layers: default: those of `SHAPES`
    """
    for name in names:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            packed = Path(folder, "packed")
            yield pack(name, packed, layers), packed


def pack(name: str, packed: Path, layers: int | None = None) -> str:
    """Write a packed model of these layers (None: those of `SHAPES`) to the folder; returns its title."""
    config, title = _config(name, layers)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as source:
        make_checkpoint(config, Path(source))
        compress(source, packed, load_recipe("rtn3"))
    leave_to_disk(packed)
    return title


def leave_to_disk(folder: Path) -> None:
    """What was just written lies in the page cache in pieces; read from disk, as users have it, it lies better."""
    for file in folder.iterdir():
        with file.open() as opened:
            os.fsync(opened.fileno())
            if hasattr(os, "posix_fadvise"):  # macOS has none
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def clock_modules(model: Any) -> dict[str, float]:
    """Let every module of a kind below add its time to a sum; returns the sums."""
    spent: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedExperts):
            kind = "routed experts"
        elif isinstance(module, PackedLinear):
            kind = "head" if "head" in name else "attention matrices" if "attn" in name else "shared experts"
        elif type(module).__name__.endswith("RMSNorm"):
            kind = "norms"
        else:
            continue

        def clocked(*args: Any, call: Any = module.forward, kind: str = kind, **named: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **named)
            spent[kind] = spent.get(kind, 0.0) + time.perf_counter() - start
            return result

        module.forward = clocked
    return spent


def step_bytes(model: Any, batch: int) -> float:
    """Bytes that one decoding step reads: all but the embedding, and of the routed experts those that are hit."""
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    total = sum(tensors.values()) - model.get_input_embeddings().weight.nbytes
    active = model.config.num_experts_per_tok
    for module in model.modules():
        if isinstance(module, PackedExperts):
            size = sum(t.nbytes for t in module.buffers())
            total -= size * (1 - active / module.num_experts) ** batch
    return float(total)


def step_macs(model: Any, texts: int) -> float:
    """Multiplications with packed matrices in one decoding step."""
    total = 0
    for module in modules_that_run(model):
        if isinstance(module, PackedExperts):
            expert = sum(math.prod(matrix.shape) for matrix in module.matrices()[0] if matrix is not None)
            total += model.config.num_experts_per_tok * expert
        elif isinstance(module, PackedLinear):
            total += math.prod(module.shape)
    return float(texts * total)


def main() -> None:
    """Parse, write."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("folder", type=Path)
    options.add_argument("names", nargs="+", choices=list(SHAPES))
    args = options.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        folder = args.folder / SHAPES[name][1]
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=args.folder) as work:
                pack(name, Path(work, folder.name))
                Path(work, folder.name).rename(folder)
        print(folder, flush=True)


if __name__ == "__main__":
    main()
