"""Sentences into sentences.

translator = Translator(model, tokenizer, to="de")
for places, translations in translator.run(translator.encode(sentences)): ...
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trilobite.errors import ArchitectureError, DeviceError, PromptError, SettingError
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.generate.text import blamed_on_settings, context_length
from trilobite.runtime.translate.batches import batches
from trilobite.runtime.translate.decoding import Decoded, Decoding, Hypothesis
from trilobite.runtime.translate.languages import direction
from trilobite.runtime.translate.rows import Pruning, rows_are_coupled

SPARE = 10
"""Tokens that a translation may have beyond --max-ratio: short sentences need them."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """How translations are looked for.

    beams: 1 = greedy    n_best: translations of each sentence    length_penalty: None = as the checkpoint says
    max_ratio: tokens of a translation for each of its source, and SPARE more
    batch, batch_tokens: sentences, and tokens with padding, that go through the model together
    pruning: what becomes of finished sentences in a batch
    """

    beams: int = 5
    n_best: int = 1
    length_penalty: float | None = None
    max_ratio: float = 3.0
    batch: int = 64
    batch_tokens: int | None = None
    pruning: Pruning = "compact"

    def __post_init__(self) -> None:
        """Raise SettingError for what cannot be searched."""
        if self.beams < 1 or self.batch < 1:
            raise SettingError(f"beams {self.beams}, batch {self.batch}: expected 1 or more of both")
        if not 1 <= self.n_best <= self.beams:
            raise SettingError(
                f"n-best {self.n_best}: {self.beams} beams give 1 to {self.beams} translations; raise --beams"
            )
        if not 0 < self.max_ratio < math.inf:
            raise SettingError(f"max-ratio {self.max_ratio}: expected a number above 0")
        if self.length_penalty is not None and not math.isfinite(self.length_penalty):
            raise SettingError(f"length penalty {self.length_penalty}: expected a finite number")


@dataclass(frozen=True, kw_only=True)
class Translation:
    """One sentence's translations, best first. scores: log-probability / length^penalty    tokens: of the best."""

    texts: list[str]
    scores: list[float]
    tokens: int


class Translator:
    """A model, its tokenizer and a direction."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        to: str | None = None,
        source: str | None = None,
        search: Search | None = None,
    ) -> None:
        """to, source: languages, as the checkpoint or ISO 639-1 calls them; None = what it was made for.

        Raises ArchitectureError for a model without encoder, SettingError for languages it lacks.
        """
        if not model.config.is_encoder_decoder:
            raise ArchitectureError(
                f"{model.name_or_path}: a {model.config.model_type} has no encoder to read a sentence with; "
                "translate takes encoder-decoder models, `trilobite generate` takes this one"
            )
        self.model, self.tokenizer, self.search = model, tokenizer, search or Search()
        self.direction = direction(model, tokenizer, to=to, source=source)
        if self.direction.source is not None:
            tokenizer.src_lang = self.direction.source
        self.limit = min(context_length(model) or math.inf, tokenizer.model_max_length)
        self.row_steps = 0
        pruning: Pruning = "off" if rows_are_coupled(model) else self.search.pruning
        self.pruning = pruning

    def encode(self, sentences: Sequence[str], *, first_line: int = 1) -> list[list[int]]:
        """Token ids of each sentence; none of those that are empty, or blank.

        Raises PromptError for sentences longer than the model, and for token ids that it does not have.
        """
        texts = [self.direction.prefix + s if s.strip() else "" for s in sentences]
        ids = self.tokenizer(texts, verbose=False).input_ids if texts else []
        ids = [row if text else [] for row, text in zip(ids, texts, strict=True)]
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        for line, row in enumerate(ids, first_line):
            if len(row) > self.limit:
                raise PromptError(
                    f"line {line}: has {len(row)} tokens, the model was made for {self.limit:.0f}; split the sentence"
                )
            if row and max(row) >= vocabulary:
                raise PromptError(
                    f"line {line}: holds token {max(row)}, the model's vocabulary has {vocabulary}; "
                    "copy the tokenizer files of the original checkpoint"
                )
        return ids

    def run(self, ids: Sequence[list[int]]) -> Iterator[tuple[list[int], list[Translation]]]:
        """Translate, batch after batch: (places in ids, their translations). Raises EvaluationError, DeviceError."""
        n_best = self.search.n_best
        empty = [place for place, row in enumerate(ids) if not row]
        if empty:
            nothing = Translation(texts=[""] * n_best, scores=[0.0] * n_best, tokens=0)
            yield empty, [nothing] * len(empty)
        full = [place for place, row in enumerate(ids) if row]
        lengths = [len(ids[place]) for place in full]
        for batch in batches(lengths, most=self.search.batch, tokens=self.search.batch_tokens):
            places = [full[i] for i in batch]
            decoded = self._decode([ids[place] for place in places])
            self.row_steps += decoded.row_steps
            yield places, [self._translation(found) for found in decoded.best]

    def translate(self, sentences: Sequence[str]) -> list[Translation]:
        """Translations in the order of the sentences."""
        found: dict[int, Translation] = {}
        for places, translations in self.run(self.encode(sentences)):
            found |= dict(zip(places, translations, strict=True))
        return [found[place] for place in range(len(sentences))]

    def _translation(self, found: list[Hypothesis]) -> Translation:
        texts = self.tokenizer.batch_decode([h.tokens for h in found], skip_special_tokens=True)
        return Translation(
            texts=[" ".join(text.splitlines()).strip() for text in texts],
            scores=[h.score for h in found],
            tokens=len(found[0].tokens),
        )

    @torch.inference_mode()
    def _decode(self, ids: list[list[int]]) -> Decoded:
        model, search = self.model, self.search
        source, mask = self._pad(ids)
        limits = self._limits(ids)
        asked = {"length_penalty": search.length_penalty, "forced_bos_token_id": self.direction.first}
        settings: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        # One that grows: transformers' own counts the layers of the encoder.
        settings[CACHE] = EncoderDecoderCache(DynamicCache(), DynamicCache())
        try:
            with blamed_on_settings(model):
                decoded: Decoded = model.generate(
                    source,
                    attention_mask=mask,
                    use_cache=True,
                    do_sample=False,
                    num_beams=search.beams,
                    num_return_sequences=1,
                    max_new_tokens=int(limits.max()),
                    custom_generate=Decoding(
                        source, limits=limits, n_best=search.n_best, pruning=self.pruning
                    ),
                    **settings,
                )
        except torch.OutOfMemoryError as e:
            raise DeviceError(
                f"{len(ids)} sentences of up to {source.shape[1]} tokens with {search.beams} beams do not fit beside "
                f"the model on {model.device}; use a smaller --batch or --batch-tokens"
            ) from e
        return decoded

    def _pad(self, ids: list[list[int]]) -> tuple[Tensor, Tensor]:
        """returns: token ids, and 1 where one is: [B, S] int64."""
        rows = [torch.tensor(row) for row in ids]
        padding = self.tokenizer.pad_token_id
        source = pad_sequence(rows, batch_first=True, padding_value=0 if padding is None else padding)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return source.to(self.model.device), mask.to(self.model.device)

    def _limits(self, ids: list[list[int]]) -> Tensor:
        """The most tokens of each translation: [B] int64."""
        config = self.model.generation_config
        most = [self.limit, config.max_new_tokens, config.max_length and config.max_length - 1]
        bound = min(limit for limit in most if limit)
        lengths = [min(math.ceil(self.search.max_ratio * len(row)) + SPARE, bound) for row in ids]
        return torch.tensor([max(1, int(length)) for length in lengths])
