"""What an encoder-decoder makes of given translations, word by word: perplexity, and the distance to its original.

    pairs = encode_pairs(tokenizer, sources, targets)
    forced_score(packed, pairs, batch=32, reference=original).kl

Every token of a translation is predicted behind its true predecessors (forced targets), so two models are compared on
the same prefixes, whatever they would have said themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trilobite.errors import EvaluationError
from trilobite.evaluate.perplexity import REFERENCE, NotFiniteLogitsError, Sums, mean_perplexity
from trilobite.models.pairs import NONE, Forced, Pair, check_pairs, forced
from trilobite.models.wide_products import wide_products
from trilobite.runtime.finite import not_finite
from trilobite.runtime.generate.text import context_length

CHUNK_ELEMENTS = 2**23
"""Logits taken to float32 at a time."""


@dataclass(frozen=True, kw_only=True)
class ForcedScore:
    """What one model made of given translations. Fields are those of `Score`, of the tokens of the translations."""

    perplexity: float
    tokens: int
    sentences: int
    seconds: float
    kl: float | None = None
    top1: float | None = None
    reference_perplexity: float | None = None


def forced_score(
    model: PreTrainedModel,
    pairs: Sequence[Pair],
    *,
    batch: int,
    reference: PreTrainedModel | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ForcedScore:
    """Score an encoder-decoder on pairs, with a reference also KL(reference || model) and top-1 agreement.

    pairs: token ids    batch: pairs per forward pass    progress: called with (pairs done, pairs in all)
    Raises EvaluationError for decoder-only models, pairs that a model cannot take, NaN or infinite logits.
    """
    name = str(model.name_or_path)
    runs = {name: model} if reference is None else {REFERENCE: reference, name: model}
    for called, one in runs.items():
        check_forced(called, one, pairs)
        one.eval()
    sums = {called: Sums() for called in runs}
    order = sorted(range(len(pairs)), key=lambda i: [len(side) for side in pairs[i]])
    for start in range(0, len(order), batch):
        block = forced([pairs[i] for i in order[start : start + batch]], model.config)
        original: Tensor | None = None
        for called, one in runs.items():
            began = perf_counter()
            logits = _logits(one, block)
            _add(sums[called], called, one, block, logits, original)
            sums[called].seconds += perf_counter() - began
            original = logits if called == REFERENCE else None
        if progress:
            progress(min(start + batch, len(order)), len(order))
    mine, tokens = sums[name], sum(len(b) for _, b in pairs)
    return ForcedScore(
        perplexity=mean_perplexity(mine.nll, tokens),
        tokens=tokens,
        sentences=len(pairs),
        seconds=mine.seconds,
        kl=mine.kl / tokens if reference else None,
        top1=mine.same / tokens if reference else None,
        reference_perplexity=mean_perplexity(sums[REFERENCE].nll, tokens) if reference else None,
    )


def check_forced(name: str, model: PreTrainedModel, pairs: Sequence[Pair]) -> None:
    """Raise EvaluationError where pairs (token ids) cannot be forced upon a model, which `name` is the name of."""
    if not model.config.is_encoder_decoder:
        raise EvaluationError(
            f"{name}: a decoder-only model has no translations to be forced; give --text alone"
        )
    check_pairs(pairs, model.config, context_length(model), name, EvaluationError)


@torch.inference_mode()
def _logits(model: PreTrainedModel, block: Forced) -> Tensor:
    """[the batch's tokens, V], padding left out."""
    with wide_products(model.dtype, model.device):
        logits: Tensor = model(**block.arguments(model.device), use_cache=False).logits
    return logits[(block.labels != NONE).to(logits.device)]


def _add(
    sums: Sums, name: str, model: PreTrainedModel, block: Forced, logits: Tensor, original: Tensor | None
) -> None:
    labels = block.labels[block.labels != NONE]
    size = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    try:
        for start in range(0, len(labels), size):
            rows = slice(start, start + size)
            sums.add(name, logits[rows], labels[rows], None if original is None else original[rows])
    except NotFiniteLogitsError as e:
        raise not_finite(model, block.arguments(model.device), name) from e
