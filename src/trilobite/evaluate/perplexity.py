"""Perplexity of a text, and the distance between a compressed model and its 16-bit original.

    ids = tokenize_file(tokenizer, Path("wiki.test.detok.txt"))
    score({"int3": packed}, ids, context=2048, batch=1, reference=original)["int3"].kl

Perplexity follows OPTQ (arXiv:2210.17323), the convention of the compression literature: the whole file is
one text, cut into windows without overlap. Perplexity alone hides damage that happens to cancel, so with a
reference there are two more: KL divergence (at best 0) and agreement on the likeliest token (at best 1).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trilobite.errors import EvaluationError
from trilobite.models.wide_products import wide_products
from trilobite.runtime.finite import finite, not_finite
from trilobite.runtime.generate.text import context_length

CHUNK_ELEMENTS = 2**23
"""Logits taken to float32 at a time (32 MiB); 2,048 tokens of a 150,000-word vocabulary would be 1.2 GB."""


REFERENCE = "reference"
"""How messages call the reference model; no other model may have this name while there is one."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one model made of one text, over the `windows * (context - 1)` tokens that have a predecessor.

    perplexity: exp of the mean negative log-likelihood    tokens: how many were predicted
    seconds: forward passes and scoring of this model alone
    kl: mean KL(reference || model), nats per token
    top1: share of tokens where model and reference find the same successor the likeliest
    reference_perplexity: the reference on the same tokens    (these three are None without a reference)
    """

    perplexity: float
    tokens: int
    windows: int
    context: int
    seconds: float
    kl: float | None = None
    top1: float | None = None
    reference_perplexity: float | None = None


def tokenize_file(tokenizer: PreTrainedTokenizerBase, path: Path, *, rows: bool = False) -> Tensor:
    """Tokenise a whole file as one text, with the special tokens that the tokenizer adds by itself (OPTQ).

    rows: join its lines as `joined_rows` does
    returns: [L] int64. Raises EvaluationError for a file that is missing, empty or not UTF-8.
    """
    try:
        text = path.read_bytes().decode()  # read_text would turn \r\n into \n: other text, other tokens
    except OSError as e:
        raise EvaluationError(f"{path}: cannot be read ({e.strerror}); give a UTF-8 text file") from e
    except UnicodeDecodeError as e:
        raise EvaluationError(f"{path}: not UTF-8 at byte {e.start}; convert it with iconv") from e
    if not text.strip():
        raise EvaluationError(f"{path}: holds no text; give a file of at least one window of tokens")
    # verbose=False: the text is meant to be longer than the context, so the warning about it would mislead
    ids: list[int] = tokenizer(joined_rows(text) if rows else text, verbose=False).input_ids
    return torch.tensor(ids, dtype=torch.int64)


def joined_rows(text: str) -> str:
    """OPTQ's text: the lines as rows of the data set, which end in a line break unless blank, joined by two more."""
    lines = text.removesuffix("\n").split("\n")
    return "\n\n".join(f"{line}\n" if line.strip() else "" for line in lines)


def windows(ids: Tensor, context: int) -> Tensor:
    """Cut a text into windows without overlap and drop the rest, as OPTQ does.

    ids: [L] int64    returns: [W, context] int64, a view
    Raises EvaluationError for a text shorter than one window, and for a window that predicts nothing.
    """
    (length,) = ids.shape
    if context < 2:
        raise EvaluationError(f"context {context}: predicts nothing; use --context 2 or more")
    if length < context:
        raise EvaluationError(
            f"the text has {length} tokens, a window needs {context}; use a smaller --context"
        )
    count = length // context
    return ids[: count * context].view(count, context)


def score(
    models: Mapping[str, PreTrainedModel],
    ids: Tensor,
    *,
    context: int,
    batch: int,
    reference: PreTrainedModel | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Score]:
    """Score several models in one pass over a text, so that the reference runs once per batch.

    Perplexity is OPTQ's: per window the mean over its context - 1 predicted tokens (logits[:, :-1] against
    ids[:, 1:]), the mean of that over the windows, exp. OPTQ's code multiplies each mean by `context` and
    divides the sum by W * context, which cancels. As all windows are equally long, this is the mean over all
    predicted tokens.
    Log-probabilities and KL are float32, a chunk at a time, summed in float64. Models are set to eval mode.

    models: name -> model, each on its own device    ids: [L] int64    batch: windows per forward pass
    progress: called with (windows done, windows in all) after every batch
    Raises EvaluationError, with the model's name, for a context longer than it allows, tokens outside its
    vocabulary, an encoder-decoder model, NaN or infinite logits; and for a text shorter than a window.
    """
    if reference is not None and REFERENCE in models:
        raise EvaluationError(
            f"a model is named {REFERENCE!r}, which names the reference; choose another name"
        )
    blocks = windows(ids, context)
    runs = dict(models) if reference is None else {REFERENCE: reference, **models}
    for name, model in runs.items():
        _check(name, model, context, int(ids.max()))
        model.eval()
    sums = {name: Sums() for name in runs}
    for start in range(0, len(blocks), max(1, batch)):
        block = blocks[start : start + max(1, batch)]
        original: Tensor | None = None
        for name, model in runs.items():
            started = perf_counter()
            logits = original if original is not None and model is reference else _logits(model, block)
            try:
                for window, rows in _chunks(*logits.shape):
                    targets = block[window, rows.start + 1 : rows.stop + 1]
                    rest = None if original is None else original[window, rows]
                    sums[name].add(name, logits[window, rows], targets, rest)
            except NotFiniteLogitsError as e:
                raise not_finite(model, {"input_ids": block.to(model.device)}, name) from e
            sums[name].seconds += perf_counter() - started
            if name == REFERENCE:
                original = logits
        if progress:
            progress(start + len(block), len(blocks))
    return {name: _score(sums[name], sums.get(REFERENCE), blocks) for name in models}


@dataclass
class Sums:
    """Running sums over tokens. nll, kl: nats    same: tokens on which model and reference agree."""

    nll: float = 0.0
    kl: float = 0.0
    same: int = 0
    seconds: float = 0.0

    def add(self, name: str, logits: Tensor, targets: Tensor, original: Tensor | None) -> None:
        """Add some tokens. logits, original: [R, V], any float dtype    targets: [R] int64.

        Raises EvaluationError for another vocabulary, NotFiniteLogitsError.
        """
        if original is not None and original.shape != logits.shape:
            raise EvaluationError(
                f"{name}: vocabulary of {logits.shape[-1]}, the reference has {original.shape[-1]}; "
                "compare a model with the checkpoint it was made from"
            )
        log_q = _log_softmax(logits)
        self.nll -= log_q.gather(1, targets[:, None].to(log_q.device)).sum(dtype=torch.float64).item()
        if original is not None:
            log_p = _log_softmax(original.to(log_q.device))
            self.same += int((log_p.argmax(1) == log_q.argmax(1)).sum())
            self.kl += (log_q.neg_().add_(log_p).mul_(log_p.exp_())).sum(dtype=torch.float64).item()


def _score(sums: Sums, reference: Sums | None, blocks: Tensor) -> Score:
    """The means, over all tokens seen. blocks: [W, context]"""
    count, context = blocks.shape
    tokens = count * (context - 1)
    return Score(
        perplexity=mean_perplexity(sums.nll, tokens),
        tokens=tokens,
        windows=count,
        context=context,
        seconds=sums.seconds,
        kl=sums.kl / tokens if reference else None,
        top1=sums.same / tokens if reference else None,
        reference_perplexity=mean_perplexity(reference.nll, tokens) if reference else None,
    )


def _check(name: str, model: PreTrainedModel, context: int, last_id: int) -> None:
    if model.config.get_text_config().is_encoder_decoder:
        raise EvaluationError(
            f"{name}: an encoder-decoder model; measure its translations: --translation SOURCE TARGET"
        )
    check_windows(name, model, context, last_id)


def check_windows(name: str, model: PreTrainedModel, context: int, last_id: int) -> None:
    """Raise EvaluationError when windows of `context` tokens, ids up to `last_id`, do not fit the model."""
    config: Any = model.config.get_text_config()
    limit = context_length(model)
    if limit and context > limit:
        raise EvaluationError(f"{name}: made for {limit} tokens, got {context}; use --context {limit}")
    if last_id >= config.vocab_size:
        raise EvaluationError(
            f"{name}: the text holds token {last_id}, the vocabulary has {config.vocab_size}; "
            "tokenise with the tokenizer of this checkpoint"
        )


@torch.inference_mode()
def _logits(model: PreTrainedModel, block: Tensor) -> Tensor:
    with wide_products(model.dtype, model.device):
        logits: Tensor = model(input_ids=block.to(model.device), use_cache=False).logits
    return logits


def _chunks(batch: int, length: int, vocabulary: int) -> Iterator[tuple[int, slice]]:
    """(window, rows) that cover every position but the last of each window, which predicts nothing."""
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    for window in range(batch):
        for start in range(0, length - 1, size):
            yield window, slice(start, min(start + size, length - 1))


class NotFiniteLogitsError(Exception):
    """Logits are NaN or infinite; who called the model knows whose."""


def _log_softmax(logits: Tensor) -> Tensor:
    """logits: [R, V], any float dtype    returns: [R, V] float32."""
    if not finite(logits):
        raise NotFiniteLogitsError
    return logits.float().log_softmax(-1)


def mean_perplexity(nll: float, tokens: int) -> float:
    """exp(nll / tokens); inf where that is."""
    return torch.tensor(nll / tokens, dtype=torch.float64).exp().item()  # math.exp raises there
