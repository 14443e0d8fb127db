"""Text from a loaded model, streamed.

generate(model, tokenizer, "The sea", tokens=64, sampling=Sampling()).text
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trilobite.errors import CheckpointError, DeviceError, PromptError, TrilobiteError
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.finite import FiniteLogits
from trilobite.runtime.generate.cache import TextCache
from trilobite.runtime.generate.streamer import OnText, Streamer, Unwanted

COLDEST = 1e-5
"""Lowest temperature above 0: logits divided by less leave float32."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen, and where the text ends.

    temperature: 0 = always the likeliest    top_k: only among so many of the likeliest, 0 = all    seed: None = random
    repetition_penalty: above 1 makes tokens of the text so far less likely, None = as the checkpoint says
    stop: strings that end the text, and do not belong to it
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raise PromptError for what no distribution has."""
        if self.temperature and not COLDEST <= self.temperature < inf:
            raise PromptError(
                f"temperature {self.temperature}: expected 0 (always the likeliest token), or {COLDEST} and more"
            )
        if not 0 <= self.top_p <= 1:
            raise PromptError(f"top-p {self.top_p}: expected a probability, 0 to 1")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < inf:
            raise PromptError(
                f"repetition penalty {self.repetition_penalty}: expected a number above 0; 1 = none"
            )
        if "" in self.stop:
            raise PromptError("an empty stop string: expected at least one character")

    def settings(self) -> dict[str, Any]:
        """Arguments of transformers' `generate`; they overrule a checkpoint's generation_config.json."""
        chosen: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1}
        if self.repetition_penalty is not None:
            chosen["repetition_penalty"] = self.repetition_penalty
        if self.stop:
            chosen["stop_strings"] = list(self.stop)
        if not self.temperature:
            return chosen | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        drawn = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return chosen | {"do_sample": True} | drawn


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A continuation. prompt_tokens, tokens: read and made    prompt_seconds: until the first token.

    remembered: tokens of the prompt that were in the cache
    seconds: for all tokens after the first
    stop: why it ended: "end" (the model), "stop" (a stop string), "length", "context", "interrupted"
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

    What an encoder-decoder model is given is no beginning of its text, but the source.
    cache: of this model; it may remember the beginning of the prompt, or let the step be compiled
    Raises PromptError for a prompt that is empty, or that leaves no room in the context.
    """
    check_text(prompt)
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
    unwanted: Unwanted | None = None,
) -> Generated:
    """Continue token ids [1, T] int64, until `unwanted()` where that is given.

    Raises PromptError as `generate` does, DeviceError where memory ends.
    """
    room = _room(model, ids)
    most = min(tokens, room)
    length = ids.shape[1] + most
    with _memory_for(length, model.device):
        past = None if cache is None else cache.ready(ids, length, context_length(model))
    if past is None and model.config.is_encoder_decoder:  # transformers' own counts the encoder's layers
        past = EncoderDecoderCache(DynamicCache(), DynamicCache())
    remembered = 0 if past is None else int(past.get_seq_length())
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    streamer = Streamer(tokenizer, on_text, sampling.stop, unwanted)
    ids = ids.to(model.device)
    started = perf_counter()
    with _memory_for(length, model.device), blamed_on_settings(model):
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most,
            streamer=streamer,
            tokenizer=tokenizer,
            logits_processor=[FiniteLogits(model, ids)],
            stopping_criteria=[streamer.stop_at],
            pad_token_id=_first(model.generation_config.pad_token_id, model.generation_config.eos_token_id),
            **{CACHE: past},
            **sampling.settings(),
        )
    if cache is not None and past is not None:
        cache.keep(past, output)
    made = streamer.times
    whole = len(made) == most and int(output[0, -1]) not in _ends(model)
    if streamer.interrupted:
        stop = "interrupted"
    else:
        stop = (
            "stop" if streamer.stopped else "end" if not whole else "length" if tokens <= room else "context"
        )
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


def check_text(text: str) -> None:
    """Raise PromptError for a text with bytes that were no text, as the command line and pipes may have them."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise PromptError(
            f"the prompt is not text in the encoding of this terminal (UTF-8?), from character {e.start + 1} on; "
            "convert it with iconv"
        ) from e


@contextmanager
def blamed_on_settings(model: PreTrainedModel) -> Iterator[None]:
    """What transformers' generation refuses before it runs the model comes from generation_config.json."""
    try:
        yield
    except (ValueError, TypeError, AttributeError) as e:
        trace = e.__traceback__
        while trace and trace.tb_next:
            trace = trace.tb_next
        module = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
        if isinstance(e, TrilobiteError) or not module.startswith("transformers.generation"):
            raise
        raise CheckpointError(
            f"{model.name_or_path}/generation_config.json: transformers refuses it: {e}; correct or delete the file"
        ) from e


def context_length(model: PreTrainedModel) -> int | None:
    """How many tokens the model was made for; None where its configuration does not say."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    return int(limit) if limit else None


def _room(model: PreTrainedModel, ids: Tensor) -> int:
    """How many tokens may follow; raises PromptError when none, or for ids that do not fit the model."""
    if ids.numel() == 0:
        raise PromptError("the prompt is empty; give it at least one word")
    vocabulary = int(model.config.get_text_config().vocab_size)
    if int(ids.max()) >= vocabulary:
        raise PromptError(
            f"the prompt holds token {int(ids.max())}, the model's vocabulary has {vocabulary}; "
            "copy the tokenizer files of the original checkpoint"
        )
    limit = context_length(model)
    if limit is None:
        return 1 << 30
    if ids.shape[1] >= limit:
        raise PromptError(
            f"the prompt has {ids.shape[1]} tokens, the model was made for {limit}; make it shorter"
        )
    return limit if model.config.is_encoder_decoder else limit - ids.shape[1]


def _ends(model: PreTrainedModel) -> tuple[int, ...]:
    ends = model.generation_config.eos_token_id
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (int(ends),)


def _first(*candidates: Any) -> Any:
    """The first token id that is given; of a list, its first."""
    found = next((c for c in candidates if c is not None), None)
    return found[0] if isinstance(found, list) else found
