"""Tiny random encoder-decoder models whose translations end early and late, and a tokenizer for them."""

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    LogitsProcessor,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    NllbTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["<pad>", "</s>", "<unk>"]
VOCABULARY = len(SPECIAL) + 1 + 2 * len(LETTERS)  # a multiple of 8: 56
LONGEST = 32
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(**TOKENS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    )


def switch(decoder_layers: int = 4) -> PreTrainedModel:
    """More layers in the decoder than in the encoder: transformers' own cache has too few for them."""
    config = SwitchTransformersConfig(
        **TOKENS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=decoder_layers,
        num_heads=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=2,
        num_experts=4,
    )
    return SwitchTransformersForConditionalGeneration(config)


def nllb() -> PreTrainedModel:
    config = NllbMoeConfig(
        **TOKENS,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_experts=4,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        max_position_embeddings=64,
        init_std=0.5,
    )
    return NllbMoeForConditionalGeneration(config)


def build(make: Callable[[], PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return make().eval()


class Noise(LogitsProcessor):  # type: ignore[misc]
    """Random log-probabilities that depend on the text of the row alone: random models repeat themselves otherwise."""

    def __init__(self) -> None:
        self.table = torch.randn(97, VOCABULARY, generator=torch.Generator().manual_seed(5))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = self.table[(input_ids * torch.arange(1, input_ids.shape[1] + 1)).sum(1) % 97].clone()
        noise[:, 1] += 0.15 * input_ids.shape[1]
        return (scores + 3 * noise).log_softmax(-1)


def sources(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and mask [count, 12] of sentences of 1 to 12 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (count,), generator=generator)
    mask = (torch.arange(12) < lengths[:, None]).long()
    return torch.randint(3, VOCABULARY, (count, 12), generator=generator) * mask, mask


def tokenizer() -> PreTrainedTokenizerFast:
    """A letter is a token."""
    vocabulary = [*SPECIAL, "▁", *LETTERS, *LETTERS.upper()]
    inner = Tokenizer(models.BPE({t: i for i, t in enumerate(vocabulary)}, [], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=LONGEST, **named)


def nllb_tokenizer(*languages: str) -> NllbTokenizer:
    vocabulary = {t: i for i, t in enumerate((*SPECIAL, "<s>", "▁", *LETTERS))}
    return NllbTokenizer(vocab=vocabulary, merges=[], extra_special_tokens=list(languages))


def save(folder: Path, make: Callable[[], PreTrainedModel] = switch) -> Path:
    build(make).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
