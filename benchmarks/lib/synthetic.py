"""Heavy-tailed random weights, and a checkpoint of them that is written without ever being in memory."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def heavy_tailed(n: int, k: int) -> Tensor:
    """[n, k] bf16 of Student's t distribution with 5 degrees of freedom, standard deviation near 0.026."""
    generator = torch.Generator().manual_seed(n * 31 + k)
    chi = sum(torch.randn(n, k, generator=generator).square_() for _ in range(5))
    assert isinstance(chi, Tensor)
    return (torch.randn(n, k, generator=generator) / (chi / 5).sqrt_() * 0.02).bfloat16()


def write_mixtral(folder: Path, layers: int, experts: int = 8) -> tuple[list[int], int]:
    """A sharded checkpoint of Mixtral-8x7B's shapes; its weights are one random block, scaled and repeated.

    returns: elements of the two largest tensors, parameters
    """
    folder.mkdir(parents=True)
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "vocab_size": 32000,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = dict(_mixtral_tensors(layers, experts))
    block = heavy_tailed(4096, 1024)
    shards = [
        ("model.embed_tokens.", "model.norm.", "lm_head."),
        *((f"model.layers.{i}.",) for i in range(layers)),
    ]
    index: dict[str, str] = {}
    for number, prefixes in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        chosen = {t: shape for t, shape in shapes.items() if t.startswith(prefixes)}
        write_shard(folder / name, chosen, block)
        index |= dict.fromkeys(chosen, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    sizes = sorted((torch.Size(shape).numel() for shape in shapes.values()), reverse=True)
    return sizes[:2], sum(sizes)


def _mixtral_tensors(layers: int, experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", (32000, 4096)
    yield "model.norm.weight", (4096,)
    for i in range(layers):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", (4096,)
        for name, rows in (("q", 4096), ("k", 1024), ("v", 1024), ("o", 4096)):
            yield f"{layer}.self_attn.{name}_proj.weight", (rows, 4096)
        yield f"{layer}.block_sparse_moe.gate.weight", (experts, 4096)
        for e in range(experts):
            for name, shape in (("w1", (14336, 4096)), ("w2", (4096, 14336)), ("w3", (14336, 4096))):
                yield f"{layer}.block_sparse_moe.experts.{e}.{name}.weight", shape


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], block: Tensor) -> None:
    """One safetensors file of bf16 tensors, each the block, scaled and repeated."""
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for i, shape in enumerate(shapes.values()):
            data = (block * (1 + i / len(shapes))).view(torch.uint8).numpy().tobytes()
            left = 2 * torch.Size(shape).numel()
            while left > 0:
                left -= f.write(data[:left])
