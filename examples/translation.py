"""A small Switch Transformer for translation: its corpus, tokenizer, model, losses, and what measures it.

``train_tiny_translator.py`` trains it. Training replaces two pieces of PyTorch and one of transformers by
faster ones with the same function; ``expert_counts``, ``translate`` and ``bleu`` run the stock code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from train_tiny_moe import LOSS_ROWS, read_text
from transformers import (
    PreTrainedTokenizerFast,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)
from transformers.models.switch_transformers import modeling_switch_transformers as switch

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"  # ids 0 (which also starts the translation), 1 and 2
LONGEST = 128  # tokens of a sentence; the longest of Multi30k has 61


def read_pairs(corpus: Path, split: str) -> tuple[list[str], list[str]]:
    """The English and the German sentences of a split, as they stand in the files."""
    english, german = (read_text(corpus / f"{split}.{lang}").strip("\n").split("\n") for lang in ("en", "de"))
    if len(english) != len(german):
        sys.exit(f"error: {corpus}/{split}: {len(english)} English lines, {len(german)} German lines")
    return english, german


def train_tokenizer(sentences: list[str], size: int) -> Tokenizer:
    """A SentencePiece-style unigram model; pieces do not cross spaces, and punctuation stands by itself."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Split(Regex(r"[^\w\s▁]"), "isolated")]
    )
    tokenizer.decoder = decoders.Metaspace()
    special = [PAD, EOS, UNK]
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=special, unk_token=UNK, show_progress=False
    )
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )
    return tokenizer


def pretrained_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    names = {"eos_token": EOS, "pad_token": PAD, "unk_token": UNK, "model_max_length": LONGEST}
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """source: [B, S] int64, target: [B, T] int64; both end in EOS and are padded with 0."""

    source: torch.Tensor
    target: torch.Tensor


def pad_rows(rows: list[list[int]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


class Corpus:
    """A tokenized split, in batches of sentences of about the same length."""

    def __init__(self, corpus: Path, split: str, tokenizer: Tokenizer, batch_tokens: int) -> None:
        self.english, self.german = read_pairs(corpus, split)
        self.source, self.target = (
            [encoding.ids for encoding in tokenizer.encode_batch(lines)]
            for lines in (self.english, self.german)
        )
        keys = sorted(range(len(self.source)), key=self.lengths)
        self.bounds = [0]  # where a batch ends depends on the lengths alone: it is the same in every epoch
        source = target = 0
        for position, row in enumerate(keys):
            longest = max(source, len(self.source[row])), max(target, len(self.target[row]))
            if (position + 1 - self.bounds[-1]) * sum(longest) > batch_tokens:
                self.bounds.append(position)
                longest = len(self.source[row]), len(self.target[row])
            source, target = longest
        self.bounds.append(len(keys))

    def lengths(self, row: int) -> tuple[int, int]:
        return len(self.target[row]), len(self.source[row])

    def __len__(self) -> int:
        """Batches an epoch."""
        return len(self.bounds) - 1

    def batches(self, seed: list[int]) -> Iterator[Batch]:
        """One epoch: sentences of equal lengths are shuffled among each other, then the batches are."""
        generator = np.random.default_rng(seed)
        rows = sorted(generator.permutation(len(self.source)).tolist(), key=self.lengths)
        for number in generator.permutation(len(self)).tolist():
            chosen = rows[self.bounds[number] : self.bounds[number + 1]]
            source, target = ([side[row] for row in chosen] for side in (self.source, self.target))
            yield Batch(source=pad_rows(source), target=pad_rows(target))


class ByteDropout(torch.nn.Dropout):
    """Dropout from random bytes (its rate is a multiple of 1/256): PyTorch's is a sixth of a step on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        level = round(self.p * 256)
        if not self.training or level == 0:
            return x
        words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64, device=x.device).random_(-(2**63), None)
        keep = (words.view(torch.uint8)[: x.numel()] >= level).view(x.shape)
        return x * (keep * (256 / (256 - level))).to(x.dtype)


def build_model(args: argparse.Namespace) -> SwitchTransformersForConditionalGeneration:
    """A model whose second, fourth ... layer is sparse, ready to train.

    transformers drops what exceeds an expert's capacity, counted a sentence, in inference too: a sentence of up
    to ``expert_capacity`` tokens loses none. Its jitter noise falls on the experts' inputs too, so it is off.
    """
    config = SwitchTransformersConfig(
        vocab_size=args.vocab,
        d_model=args.hidden,
        d_kv=64,
        d_ff=args.intermediate,
        num_layers=args.encoder_layers,
        num_sparse_encoder_layers=args.encoder_layers // 2,
        num_decoder_layers=args.decoder_layers,
        num_sparse_decoder_layers=args.decoder_layers // 2,
        num_heads=args.heads,
        num_experts=args.experts,
        expert_capacity=4 * LONGEST,
        router_jitter_noise=0.0,
        router_aux_loss_coef=args.aux,
        router_z_loss_coef=0.0,
        dropout_rate=args.dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(args.seed)
    model = SwitchTransformersForConditionalGeneration(config)
    for layer in sparse_layers(model):  # drawn with deviation 1, one expert gets a probability of nearly 1
        torch.nn.init.normal_(layer.router.classifier.weight, std=0.1 * args.hidden**-0.5)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.__class__ = ByteDropout
    return model


def sparse_layers(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, switch.SwitchTransformersSparseMLP)]


def sorted_experts(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Top-1 experts over tokens sorted by expert; the stock loop's function without its masks and casts.

    Row counts are padded to multiples of 128: oneDNN compiles a kernel for each new shape that it meets.
    The router's logits, [B * S, E], are left in ``self.logits`` for the balancing loss.

    hidden: [B, S, H] -> [B, S, H]
    """
    flat = hidden.flatten(0, 1)
    with torch.autocast(hidden.device.type, enabled=False):
        self.logits = F.linear(flat.float(), self.router.classifier.weight)
    weight, index = self.logits.softmax(dim=-1).max(dim=-1)
    order = index.argsort(stable=True)
    counts = torch.bincount(index, minlength=self.router.num_experts).tolist()
    outputs = []
    for expert, rows in zip(self.experts.values(), order.split(counts), strict=True):
        states = flat[F.pad(rows, (0, -len(rows) % 128))]
        inner = expert.dropout(F.relu(F.linear(states, expert.wi.weight)))
        outputs.append(F.linear(inner, expert.wo.weight)[: len(rows)])
    unsorted = torch.cat(outputs)[order.argsort()]
    return torch.mul(unsorted, weight.to(unsorted.dtype).unsqueeze(-1)).view_as(hidden)


@contextmanager
def fast_experts() -> Iterator[None]:
    """Inside, all Switch Transformers of this process run ``sorted_experts``."""
    stock = switch.SwitchTransformersSparseMLP.forward
    switch.SwitchTransformersSparseMLP.forward = sorted_experts
    try:
        yield
    finally:
        switch.SwitchTransformersSparseMLP.forward = stock


class SmoothedCrossEntropy(torch.autograd.Function):
    """Sum over the rows of the label-smoothed cross entropy of ``states @ weight.T``.

    The gradients are computed together with the loss, a slice of rows at a time: the logits are never kept.

    states: [M, H]    weight: [V, H]    labels: [M] int64
    """

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, smoothing: float
    ) -> torch.Tensor:
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        total, grads, mean_weight = torch.zeros((), device=states.device), [], weight.float().mean(dim=0)
        for rows, answers in zip(states.split(LOSS_ROWS), labels.split(LOSS_ROWS), strict=True):
            logits = rows @ weight.T
            right, largest = logits.gather(1, answers[:, None]).float(), logits.amax(dim=-1, keepdim=True)
            error = (logits.float() - largest).exp_()
            summed = error.sum(dim=-1, keepdim=True)
            total += (summed.log() + largest - (1 - smoothing) * right).sum()
            total -= smoothing * (rows.float() @ mean_weight).sum()
            error.div_(summed).sub_(smoothing / weight.shape[0])
            error.scatter_add_(1, answers[:, None], torch.full_like(right, smoothing - 1))
            error = error.to(states.dtype)
            grads.append(error @ weight)
            grad_weight += error.T @ rows
        ctx.save_for_backward(torch.cat(grads), grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states * upstream[0], grad_weight * upstream[0], None, None


def translation_loss(model: Any, batch: Batch, smoothing: float) -> torch.Tensor:
    """Mean cross entropy of the target tokens, padding left out."""
    hidden = model.encoder(input_ids=batch.source, attention_mask=(batch.source != 0).long())[0]
    states = model.decoder(
        input_ids=F.pad(batch.target, (1, -1)),  # shifted right, behind the start token 0
        encoder_hidden_states=hidden,
        encoder_attention_mask=(batch.source != 0).long(),
        use_cache=False,
    )[0]
    labels = batch.target.flatten()
    real = labels.nonzero().flatten()
    states, weight = states.flatten(0, 1)[real] * model.config.d_model**-0.5, model.lm_head.weight
    if torch.is_autocast_enabled(states.device.type):
        states, weight = states.bfloat16(), weight.bfloat16()
    total: torch.Tensor = SmoothedCrossEntropy.apply(states, weight, labels[real], smoothing)
    return total / len(real)


def balance_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Switch Transformer's load-balancing loss (eq. 4), padding left out, averaged over the sparse layers.

    transformers' own sums over the sparse layers of a stack before it balances, so that one layer's excess
    makes up for another's lack; and it counts the padding.
    """
    total = torch.zeros((), device=batch.source.device)
    for stack, tokens in ((model.encoder, batch.source), (model.decoder, batch.target)):
        for layer in sparse_layers(stack):
            logits = layer.logits[tokens.flatten() != 0]
            share = F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float().mean(dim=0)
            total = total + logits.shape[-1] * (share * logits.softmax(dim=-1).mean(dim=0)).sum()
    return total / len(sparse_layers(model))


def expert_counts(model: Any, corpus: Corpus) -> dict[str, torch.Tensor]:
    """Tokens that each expert of each sparse layer gets, [E]: of the sources and the reference translations."""
    counts: dict[str, torch.Tensor] = {}
    tokens: dict[str, torch.Tensor] = {}

    def count(name: str, one_hot: torch.Tensor) -> None:
        found = one_hot[tokens[name.split(".")[0]] != 0].sum(dim=0)
        counts[name] = counts.get(name, torch.zeros_like(found)) + found

    routers = [(n, m) for n, m in model.named_modules() if isinstance(m, switch.SwitchTransformersTop1Router)]
    handles = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: count(name, output[0]))
        for name, module in routers
    ]
    with torch.inference_mode():
        for batch in corpus.batches([0]):
            tokens = {"encoder": batch.source, "decoder": batch.target}
            translation_loss(model, batch, 0.0)
    for handle in handles:
        handle.remove()
    return counts


def translate(model: Any, tokenizer: Any, sentences: list[str], beams: int) -> list[str]:
    """Translations in the order of the sentences; batches are of about one length."""
    order = sorted(range(len(sentences)), key=lambda row: len(sentences[row]))
    answers = [""] * len(sentences)
    size = max(1, 256 // beams)
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        inputs = tokenizer([sentences[row] for row in rows], return_tensors="pt", padding=True)
        with torch.inference_mode():
            ids = model.generate(**inputs, num_beams=beams, max_new_tokens=LONGEST, do_sample=False)
        for row, text in zip(rows, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True):
            answers[row] = text
    return answers


def bleu(answers: list[str], references: list[str]) -> float:
    """Cased BLEU of detokenized text, sacrebleu's default tokenizer."""
    try:
        import sacrebleu
    except ImportError:
        sys.exit("error: BLEU needs sacrebleu; run: pip install sacrebleu")
    return float(sacrebleu.corpus_bleu(answers, [references]).score)
