"""What the command line measures on a text file: a model's score, and which experts it uses how often."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trilobite.errors import EvaluationError
from trilobite.evaluate.frequency import expert_frequency, forced_frequency
from trilobite.evaluate.perplexity import Score, check_windows, score, tokenize_file, windows
from trilobite.evaluate.trace import Trace, forced_trace, trace
from trilobite.models.pairs import encode_pairs, read_pairs
from trilobite.runtime.generate.text import context_length

LOGITS_BYTES = 256 * 2**20
"""A forward pass over a batch of windows makes at most this much of logits, in fp32."""
MAX_BATCH = 16
Progress = Callable[[int, int], None]


def fitting_batch(model: PreTrainedModel, context: int) -> int:
    """How many windows may go through the model at a time."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    return max(1, min(MAX_BATCH, LOGITS_BYTES // (4 * vocabulary * max(1, context))))


def default_context(most: int, *models: PreTrainedModel) -> int:
    """Tokens of a window where nobody says: at most `most`, fewer where one of the models was made for fewer."""
    return min(most, *(limit for model in models if (limit := context_length(model))), most)


def score_file(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Path,
    *,
    context: int,
    batch: int | None = None,
    rows: bool = False,
    reference: PreTrainedModel | None = None,
    progress: Progress | None = None,
) -> Score:
    """Perplexity on a text file, with a reference also the distance to it. Raises EvaluationError.

    rows: see `tokenize_file`
    """
    ids = tokenize_file(tokenizer, text, rows=rows)
    batch = batch or fitting_batch(model, context)
    name = str(Path(model.name_or_path).resolve())
    scores = score({name: model}, ids, context=context, batch=batch, reference=reference, progress=progress)
    return scores[name]


def count_experts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Path,
    *,
    context: int,
    samples: int | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, list[int]], int]:
    """Expert frequency on the first `samples` windows of a text (None = all), and the tokens read.

    Raises EvaluationError as `score_file` does.
    """
    if model.config.is_encoder_decoder:
        raise EvaluationError(
            f"{model.name_or_path}: an encoder-decoder model; give the translation of the text too: --target-text FILE"
        )
    ids = windows(tokenize_file(tokenizer, text), context)[:samples]
    check_windows(model.name_or_path, model, context, int(ids.max()))
    batch = fitting_batch(model, context)
    return expert_frequency(model, ids, batch=batch, progress=progress), ids.numel()


def trace_experts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Path,
    *,
    context: int,
    samples: int | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Which experts the first `samples` windows of a text use (None = all). Raises EvaluationError."""
    ids = windows(tokenize_file(tokenizer, text), context)[:samples]
    check_windows(model.name_or_path, model, context, int(ids.max()))
    return replace(trace(model, ids, progress=progress), model=model.name_or_path, text=text.name)


def trace_experts_of_pairs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Path,
    target: Path,
    *,
    samples: int | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Which experts the first `samples` pairs of two files use. Raises EvaluationError."""
    pairs = encode_pairs(tokenizer, *read_pairs(text, target, EvaluationError))[:samples]
    found = forced_trace(model, pairs, progress=progress)
    return replace(found, model=model.name_or_path, text=f"{text.name} -> {target.name}")


def count_experts_of_pairs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Path,
    target: Path,
    *,
    samples: int | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, list[int]], int]:
    """Expert frequency on the first `samples` pairs of two files, and the tokens read. Raises EvaluationError."""
    pairs = encode_pairs(tokenizer, *read_pairs(text, target, EvaluationError))[:samples]
    batch = fitting_batch(model, max(len(b) for _, b in pairs))
    counts = forced_frequency(model, pairs, batch=batch, progress=progress)
    return counts, sum(len(a) + len(b) for a, b in pairs)
