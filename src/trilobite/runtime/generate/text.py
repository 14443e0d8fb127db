"""Text from a loaded model, streamed.

generate(model, tokenizer, "The sea", tokens=64, sampling=Sampling()).text
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TextStreamer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trilobite.errors import DeviceError, EvaluationError
from trilobite.runtime.generate.cache import TextCache

OnText = Callable[[str], None]
"""Called with each new piece of text, as soon as it is sure."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. temperature 0 = always the likeliest    seed None = random."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def settings(self) -> dict[str, Any]:
        """Arguments of transformers' `generate`; they overrule a checkpoint's generation_config.json."""
        if not self.temperature:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A continuation. prompt_tokens, tokens: read and made    prompt_seconds: until the first token.

    remembered: tokens of the prompt that were in the cache
    seconds: for all tokens after the first    stop: why it ended: "end" (the model), "length", "context"
    """

    text: str
    prompt_tokens: int
    remembered: int
    tokens: int
    prompt_seconds: float
    seconds: float
    stop: str

    @property
    def tokens_per_second(self) -> float:
        """Speed of generation without the reading of the prompt; 0 when there is only one token."""
        return (self.tokens - 1) / self.seconds if self.tokens > 1 and self.seconds else 0.0


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    tokens: int,
    sampling: Sampling,
    on_text: OnText | None = None,
    cache: TextCache | None = None,
) -> Generated:
    """Continue a prompt by at most `tokens` tokens, fewer where the model's context ends.

    cache: of this model; it may remember the beginning of the prompt, or let the step be compiled
    Raises EvaluationError for a prompt that is empty, or that leaves no room in the context.
    """
    ids = tokenizer(prompt, return_tensors="pt", verbose=False).input_ids
    return continue_ids(model, tokenizer, ids, tokens=tokens, sampling=sampling, on_text=on_text, cache=cache)


@torch.inference_mode()
def continue_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    *,
    tokens: int,
    sampling: Sampling,
    on_text: OnText | None = None,
    cache: TextCache | None = None,
) -> Generated:
    """Continue token ids [1, T] int64. Raises EvaluationError as `generate` does, DeviceError where memory ends."""
    room = _room(model, ids)
    most = min(tokens, room)
    length = ids.shape[1] + most
    with _memory_for(length, model.device):
        past = None if cache is None else cache.ready(ids, length, context_length(model))
    remembered = 0 if past is None else int(past.get_seq_length())
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    streamer = _Streamer(tokenizer, on_text)
    ids = ids.to(model.device)
    started = perf_counter()
    with _memory_for(length, model.device):
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=past,
            max_new_tokens=most,
            streamer=streamer,
            pad_token_id=_first(model.generation_config.pad_token_id, model.generation_config.eos_token_id),
            **sampling.settings(),
        )
    if cache is not None and past is not None:
        cache.keep(past, output)
    made = streamer.times
    whole = len(made) == most and int(output[0, -1]) not in _ends(model)
    stop = "end" if not whole else "length" if tokens <= room else "context"
    return Generated(
        text="".join(streamer.pieces),
        prompt_tokens=ids.shape[1],
        remembered=remembered,
        tokens=len(made),
        prompt_seconds=made[0] - started if made else 0.0,
        seconds=made[-1] - made[0] if made else 0.0,
        stop=stop,
    )


@contextmanager
def _memory_for(tokens: int, device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as e:
        free = torch.cuda.mem_get_info(device)[0]
        raise DeviceError(
            f"a text of up to {tokens} tokens does not fit beside the model: {free / 1e9:.2f} GB of {device} are free; "
            "ask for fewer tokens, shorten the prompt, or load with device='cpu'"
        ) from e


class _Streamer(TextStreamer):  # type: ignore[misc]
    """Hands text on instead of printing it, and keeps the time of every token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: OnText | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.pieces: list[str] = []
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.pieces.append(text)
            if self.on_text:
                self.on_text(text)


def context_length(model: PreTrainedModel) -> int | None:
    """How many tokens the model was made for; None where its configuration does not say."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    return int(limit) if limit else None


def _room(model: PreTrainedModel, ids: Tensor) -> int:
    """How many tokens may follow; raises EvaluationError when none, or for ids that do not fit the model."""
    if ids.numel() == 0:
        raise EvaluationError("the prompt is empty; give it at least one word")
    vocabulary = int(model.config.get_text_config().vocab_size)
    if int(ids.max()) >= vocabulary:
        raise EvaluationError(
            f"the prompt holds token {int(ids.max())}, the model's vocabulary has {vocabulary}; "
            "copy the tokenizer files of the original checkpoint"
        )
    limit = context_length(model)
    if limit is None:
        return 1 << 30
    if ids.shape[1] >= limit:
        raise EvaluationError(
            f"the prompt has {ids.shape[1]} tokens, the model was made for {limit}; make it shorter"
        )
    return limit - ids.shape[1]


def _ends(model: PreTrainedModel) -> tuple[int, ...]:
    ends = model.generation_config.eos_token_id
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (int(ends),)


def _first(*candidates: Any) -> Any:
    """The first token id that is given; of a list, its first."""
    found = next((c for c in candidates if c is not None), None)
    return found[0] if isinstance(found, list) else found
