"""Greedy and beam search over an encoder-decoder model, in which finished sentences leave the batch.

    search = Decoding(inputs.input_ids, limits=limits, n_best=1, pruning="compact")
    found = model.generate(**inputs, num_beams=5, max_new_tokens=int(limits.max()), custom_generate=search)

transformers' `generate` runs the encoder and prepares caches, logits processors and stopping criteria; the loops are
ours. They make the same tokens as transformers' own: `tests/runtime/translate/test_decoding.py` compares them.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from trilobite.runtime.translate.rows import Pruning, Rows, without_experts

LOWEST = -1e9
"""The log-probability of what must not be chosen; transformers' own."""


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One translation. tokens: without the decoder's start token    score: log-probability / length^penalty."""

    tokens: list[int]
    score: float


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What one batch became. best: for every sentence, best first    row_steps: rows the decoder ran, all steps."""

    best: list[list[Hypothesis]]
    row_steps: int


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A batch as `generate` prepared it. prompt: [R, P] int64, what the decoder starts with."""

    rows: Rows
    prompt: Tensor
    process: LogitsProcessorList
    stop: StoppingCriteriaList
    config: GenerationConfig


class Decoding:
    """The loop for one batch: `custom_generate` of transformers' `generate`.

    source: [B, S] int64    limits: [B] int64, the most new tokens of each sentence
    n_best: translations wanted for each, at most num_beams
    """

    def __init__(
        self, source: Tensor, *, limits: Tensor, n_best: int = 1, pruning: Pruning = "compact"
    ) -> None:
        """Nothing happens yet."""
        self.source, self.limits, self.n_best, self.pruning = source, limits, n_best, pruning

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Decoded:
        """Decode. input_ids: [R, P] int64    model_kwargs: of the model's forward, K rows for each sentence."""
        beams = generation_config.num_beams
        rows = Rows(model, self.source, model_kwargs, beams=beams, pruning=self.pruning)
        task = _Task(
            rows=rows,
            prompt=input_ids,
            process=logits_processor,
            stop=stopping_criteria,
            config=generation_config,
        )
        limits = self.limits.to(input_ids.device)
        with without_experts(rows) if self.pruning == "mask" else nullcontext():
            if rows.beams == 1:
                best = _greedy(task, limits)
            else:
                best = _beam_search(task, limits, self.n_best)
        return Decoded(best=best, row_steps=rows.row_steps)


def _greedy(task: _Task, limits: Tensor) -> list[list[Hypothesis]]:
    """The likeliest token at each step. limits: [B] int64."""
    rows, config, text = task.rows, task.config, task.prompt
    found: list[list[Hypothesis]] = [[] for _ in limits]
    total, start, tokens = torch.zeros(len(limits), device=text.device), text.shape[1], text
    penalty, pad = config.length_penalty, _padding(config)
    while not rows.done:
        scores = task.process(text, rows.step(tokens))
        chosen = scores.argmax(-1)
        total = total + scores.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        chosen = chosen.masked_fill(rows.closed, pad)
        text = torch.cat((text, chosen[:, None]), 1)
        length = text.shape[1] - start
        dead = (task.stop(text, None) | (limits <= length)) & ~rows.closed
        for row in dead.nonzero()[:, 0].tolist():
            made = Hypothesis(tokens=text[row, start:].tolist(), score=float(total[row]) / length**penalty)
            found[int(rows.sentence[row])] = [made]
        stay = rows.retire(dead)
        if stay is not None:
            rows.follow(stay)
            text, total, limits = text[stay], total[stay], limits[stay]
        tokens = text[:, -1:]
    return found


@dataclass
class _Beams:
    """The state of a beam search over b sentences; t tokens so far, those of the prompt too.

    text: [b, K, t] int64, running, likeliest first    score: [b, K] float32, their log-probabilities
    ended: [b, K, t] int64, the best finished ones, -1 behind their end    ended_score: [b, K] float32, with the
    length penalty    is_ended: [b, K] bool    open: [b] bool, whether a running one may still beat the finished ones
    """

    text: Tensor
    score: Tensor
    ended: Tensor
    ended_score: Tensor
    is_ended: Tensor
    open: Tensor

    @classmethod
    def start(cls, text: Tensor) -> "_Beams":
        """All beams of a sentence are the same at first, so only one counts. text: [b, K, P] int64."""
        score = torch.zeros(text.shape[:2], device=text.device)
        score[:, 1:] = LOWEST
        return cls(
            text=text,
            score=score,
            ended=torch.full_like(text, -1),
            ended_score=torch.full_like(score, LOWEST),
            is_ended=torch.zeros_like(score, dtype=torch.bool),
            open=torch.ones_like(score[:, 0], dtype=torch.bool),
        )

    def only(self, stay: Tensor) -> None:
        """Keep these sentences [b'] int64."""
        self.text, self.score, self.open = self.text[stay], self.score[stay], self.open[stay]
        self.ended, self.ended_score, self.is_ended = (
            self.ended[stay],
            self.ended_score[stay],
            self.is_ended[stay],
        )


def _beam_search(task: _Task, limits: Tensor, n_best: int) -> list[list[Hypothesis]]:
    """The K likeliest beginnings at each step, as transformers counts. limits: [B] int64."""
    rows, config = task.rows, task.config
    found: list[list[Hypothesis]] = [[] for _ in limits]
    start, tokens = task.prompt.shape[1], task.prompt
    beams = _Beams.start(task.prompt.view(len(limits), rows.beams, start))
    while not rows.done:
        flat = beams.text.flatten(0, 1)
        likely = task.process(flat, rows.step(tokens).log_softmax(-1))
        source, spent = _advance(beams, likely, task, limits, start)
        full = beams.is_ended.all(1) if config.early_stopping is True else torch.zeros_like(spent)
        dead = (~beams.open | full | spent) & ~rows.closed
        for row in dead.nonzero()[:, 0].tolist():
            found[int(rows.sentence[row])] = _finished(beams, row, start, n_best)
        stay = rows.retire(dead)
        if stay is not None:
            beams.only(stay)
            source, limits = source[stay], limits[stay]
        else:
            stay = torch.arange(len(source), device=source.device)
            beams.open &= ~rows.closed
        if len(stay):
            rows.follow(rows.rows_of(stay, source))
        tokens = beams.text[:, :, -1:].flatten(0, 1)
    return found


def _advance(beams: _Beams, likely: Tensor, task: _Task, limits: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """One step of every beam. likely: [b K, V] float32, log-probabilities of the next token.

    returns: [b, K] int64, the beam that each running one continues; [b] bool, whether all had to end
    """
    (b, k, t), config = beams.text.shape, task.config
    eos = config.eos_token_id
    width = max(2, 1 + (len(eos) if isinstance(eos, list) else eos is not None)) * k
    total = likely.view(b, k, -1) + beams.score[:, :, None]
    score, index = total.flatten(1).topk(width)
    beam, token = index // likely.shape[-1], index % likely.shape[-1]
    text = torch.cat((_take(beams.text, beam), token[:, :, None]), 2)
    length = t + 1 - start
    stops = task.stop(text.flatten(0, 1), None).view(b, width) | (limits <= length)[:, None]

    alive = score + stops.float() * LOWEST
    chosen = alive.topk(k)[1]
    beams.text, beams.score = _take(text, chosen), alive.gather(1, chosen)

    ends = stops.clone()
    ends[:, k:] = False  # the rest is there to go on where these end
    full = beams.is_ended.all(1) & (config.early_stopping is True)
    final = score / length**config.length_penalty
    final = final + full[:, None].float() * LOWEST + (~beams.open)[:, None].float() * LOWEST
    final = final + (~ends).float() * LOWEST
    longer = torch.nn.functional.pad(beams.ended, (0, 1), value=-1)
    pool = torch.cat((beams.ended_score, final), 1)
    best = pool.topk(k)[1]
    beams.ended = _take(torch.cat((longer, text), 1), best)
    beams.ended_score = pool.gather(1, best)
    beams.is_ended = torch.cat((beams.is_ended, ends), 1).gather(1, best)
    beams.open = beams.open & _may_improve(beams, length, limits, config)
    return beam.gather(1, chosen), stops.all(1)


def _may_improve(beams: _Beams, length: int, limits: Tensor, config: GenerationConfig) -> Tensor:
    """Whether a running beam could beat the worst finished one [b] bool, as transformers estimates it."""
    penalty = config.length_penalty
    lengths = limits if config.early_stopping == "never" and penalty > 0 else torch.full_like(limits, length)
    best = beams.score[:, :1] / torch.pow(lengths[:, None], penalty)
    worst = torch.where(beams.is_ended, beams.ended_score.amin(1, keepdim=True), LOWEST)
    return (best > worst).any(1)


def _finished(beams: _Beams, row: int, start: int, n_best: int) -> list[Hypothesis]:
    texts, scores = beams.ended[row, :n_best, start:].tolist(), beams.ended_score[row, :n_best].tolist()
    return [
        Hypothesis(tokens=[token for token in text if token >= 0], score=score)
        for text, score in zip(texts, scores, strict=True)
    ]


def _take(values: Tensor, index: Tensor) -> Tensor:
    """Of each sentence the beams [b, n] int64. values: [b, m, t] -> [b, n, t]."""
    return torch.gather(values, 1, index[:, :, None].expand(-1, -1, values.shape[2]))


def _padding(config: GenerationConfig) -> int:
    for token in (config.pad_token_id, config.eos_token_id, 0):
        if token is not None:
            return int(token[0] if isinstance(token, list) else token)
    raise AssertionError
