"""The next token of every text in a batch, each drawn as its request wishes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.requests import FutureRequestState

from trilobite.errors import EvaluationError
from trilobite.runtime.generate.text import Sampling


@dataclass(frozen=True, kw_only=True)
class Chance:
    """A token of the answer, or one that it might have been. logprob: before temperature and penalties."""

    token: int
    logprob: float
    others: tuple["Chance", ...] = ()


@dataclass(kw_only=True, eq=False)
class Draw:
    """How the tokens of one answer are drawn, and what was noted meanwhile.

    frequency, presence: taken off the logit of a token for each time, or once, that the answer has it
    bias: added to logits of tokens    logprobs: how many likeliest tokens to note beside the one drawn, None = nothing
    chances: what was noted, a Chance for every token    read: tokens of the prompt that were not in the cache
    """

    sampling: Sampling
    frequency: float = 0.0
    presence: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    chances: list[Chance] = field(default_factory=list)
    read: int = 0
    _generator: torch.Generator | None = None
    _warpers: LogitsProcessorList | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token as the model has it is the answer, and nothing is noted."""
        plain = not (self.frequency or self.presence or self.bias or self.sampling.temperature)
        return plain and self.logprobs is None

    def choose(self, logits: Tensor, made: list[int]) -> None:
        """Make the token drawn the largest of logits [V] fp32, in place. made: the answer so far."""
        noted = None if self.logprobs is None else logits.log_softmax(-1)
        for token, times in _counts(made) if self.frequency or self.presence else ():
            logits[token] -= self.frequency * times + self.presence
        for token, value in self.bias.items():
            logits[token] += value
        if self.sampling.temperature:
            token = self._drawn(logits)
            logits.fill_(-torch.inf)[token] = 0
        if noted is not None:
            self.chances.append(_chance(noted, int(logits.argmax()), self.logprobs or 0))

    def _drawn(self, logits: Tensor) -> int:
        if self._warpers is None:
            self._warpers = _warpers(self.sampling)
            self._generator = torch.Generator(logits.device)
            if self.sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self.sampling.seed)
        scores = self._warpers(None, logits[None])
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))


def _counts(tokens: list[int]) -> list[tuple[int, int]]:
    """How often each token occurs."""
    return [(t, tokens.count(t)) for t in set(tokens)]


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """In the order in which `generate` has them, so that a seed means the same."""
    found = LogitsProcessorList()
    if sampling.temperature != 1:
        found.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    return found


def _chance(logprobs: Tensor, token: int, count: int) -> Chance:
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    others = tuple(Chance(token=t, logprob=v) for t, v in zip(tokens.tolist(), values.tolist(), strict=True))
    return Chance(token=token, logprob=float(logprobs[token]), others=others)


class Sampler(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]
    """Takes the place of the logits processors of continuous batching, which are the same for all requests.

    Every request carries a `Draw` in its keyword arguments. Batches are made and run one after the other (no
    asynchronous batching), so what `prepare_tensor_args` was told of a batch still holds when its logits come.
    """

    def __init__(self, not_finite: Callable[[list[int]], EvaluationError]) -> None:
        """Before the first batch. not_finite: what to raise of a text, its tokens, whose logits are NaN or infinite."""
        super().__init__(LogitsProcessorList())
        self.not_finite = not_finite
        self.do_processing = True
        self.batch: list[FutureRequestState] = []

    def check_kwargs(self, kwargs: dict[str, Draw]) -> None:
        """Nothing to check: `Draw` did."""

    def prepare_tensor_args(self, requests_in_batch: list[FutureRequestState], arg_storage: Tensor) -> Tensor:
        """Remember which texts get a token; no tensors are needed for it."""
        for future in requests_in_batch:
            if not future.state.generated_tokens:
                future.state.logit_processor_kwargs["draw"].read += future.query_length
        self.batch = [future for future in requests_in_batch if future.has_new_token]
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        """scores: [texts, V] fp32, changed in place so that the largest of a row is the token drawn."""
        # Prompts that go on in the next step have rows too, after all others, which nobody reads.
        for finite, future in zip(scores.amax(-1).isfinite().tolist(), self.batch, strict=False):
            if not finite:
                raise self.not_finite(future.state.initial_tokens + future.state.generated_tokens)
        for row, future in zip(scores, self.batch, strict=False):
            draw = future.state.logit_processor_kwargs["draw"]
            if not draw.greedy:
                draw.choose(row, future.state.generated_tokens)
        return scores
