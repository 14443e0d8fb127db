"""Sentences to translate, models to do it, and one of NLLB-MoE's layers."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import NllbMoeConfig

from benchmarks.lib.script import SHARED
from benchmarks.lib.synthetic import heavy_tailed, write_shard
from trilobite.runtime.translate.batches import batches
from trilobite.runtime.translate.rows import EXPERTS

CORPUS = SHARED / "data/multi30k"
TEST = CORPUS / "test_2016_flickr.en", CORPUS / "test_2016_flickr.de"
TRAIN = CORPUS / "train.en", CORPUS / "train.de"


def spread_batches(lengths: Sequence[int], size: int, sentences: int) -> list[list[int]]:
    """Of the full batches that a translator makes of all sentences so many as hold `sentences`, spread evenly."""
    whole = [batch for batch in batches(lengths, most=size) if len(batch) == size]
    count = max(1, min(len(whole), round(sentences / size)))
    return [whole[int((i + 0.5) * len(whole) / count)] for i in range(count)]


def write_nllb(folder: Path, tokenizer: Any, *, experts: int, layers: int) -> None:
    """A random checkpoint with layers of NLLB-MoE-54B: one dense one in the encoder, sparse ones in the decoder."""
    folder.mkdir(parents=True)
    config = NllbMoeConfig(
        vocab_size=len(tokenizer),
        d_model=2048,
        encoder_layers=1,
        decoder_layers=layers,
        encoder_ffn_dim=8192,
        decoder_ffn_dim=8192,
        encoder_attention_heads=16,
        decoder_attention_heads=16,
        num_experts=experts,
        encoder_sparse_step=0,
        decoder_sparse_step=1,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        bos_token_id=1,
        dtype="bfloat16",
        architectures=["NllbMoeForConditionalGeneration"],
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1})
    )
    write_shard(folder / "model.safetensors", dict(_nllb_tensors(config)), heavy_tailed(2048, 256))


def _nllb_tensors(config: NllbMoeConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    wide, width = config.decoder_ffn_dim, config.d_model

    def linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (rows, columns)
        yield f"{name}.bias", (rows,)

    def norm(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)

    yield "model.shared.weight", (config.vocab_size, width)
    for stack, layers in (("encoder", 1), ("decoder", config.decoder_layers)):
        yield from norm(f"model.{stack}.layer_norm")
        for i in range(layers):
            at = f"model.{stack}.layers.{i}"
            for attention in ("self_attn", *(("cross_attention",) if stack == "decoder" else ())):
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    yield from linear(f"{at}.{attention}.{part}", width, width)
                yield from norm(f"{at}.{attention}_layer_norm")
            yield from norm(f"{at}.ff_layer_norm")
            names = (
                [""] if stack == "encoder" else [f".experts.expert_{e}" for e in range(config.num_experts)]
            )
            for name in names:
                yield from linear(f"{at}.ffn{name}.fc1", wide, width)
                yield from linear(f"{at}.ffn{name}.fc2", width, wide)
            if stack == "decoder":
                yield f"{at}.ffn.router.classifier.weight", (config.num_experts, width)


def decoder_experts(model: Any) -> list[Any]:
    return [m for m in model.get_decoder().modules() if isinstance(m, EXPERTS)]


@contextmanager
def counted(model: Any) -> Iterator[Tensor]:
    """Inside, how often the decoder chooses each expert: [E] int64, its layers together."""
    layers = decoder_experts(model)
    counts = torch.zeros(int(layers[0].num_experts) + 1, dtype=torch.int64)

    def count(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        counts.add_(torch.bincount(args[1].flatten(), minlength=len(counts))[: len(counts)])

    hooks = [layer.register_forward_pre_hook(count) for layer in layers]
    try:
        yield counts[:-1]
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def routed_like(model: Any, shares: Tensor) -> Iterator[None]:
    """Inside, the decoder's experts are drawn by the shares [E'] of another model's, each spread over E / E' experts."""
    layers = decoder_experts(model)
    experts = int(layers[0].num_experts)
    each = shares.double().clamp(min=1e-6).repeat_interleave(experts // len(shares))
    generator = torch.Generator().manual_seed(0)

    def draw(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, index, weights = args
        drawn = torch.multinomial(each.expand(len(index), -1), index.shape[1], generator=generator)
        return hidden, drawn.masked_fill(index >= experts, experts), weights.abs() + 0.1

    hooks = [layer.register_forward_pre_hook(draw) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
