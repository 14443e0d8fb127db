"""Sentences with their translations: what enters an encoder, and what a decoder is made to say (forced targets)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trilobite.errors import PromptError, TrilobiteError
from trilobite.models.lines import read_lines

Pair = tuple[list[int], list[int]]
"""Token ids of a sentence and of its translation, end tokens included."""
NONE = -100
"""Marks labels that are padding."""


@dataclass(frozen=True, kw_only=True)
class Forced:
    """A batch of B pairs, padded on the right.

    source, decoder_input, labels: [B, S], [B, T], [B, T] int64; labels are NONE where there is no token
    """

    source: Tensor
    mask: Tensor
    decoder_input: Tensor
    labels: Tensor

    def arguments(self, device: torch.device) -> dict[str, Tensor]:
        """What the model is called with."""
        return {
            "input_ids": self.source.to(device),
            "attention_mask": self.mask.to(device),
            "decoder_input_ids": self.decoder_input.to(device),
        }


def read_parallel(source: Path, target: Path, error: type[TrilobiteError]) -> tuple[list[str], list[str]]:
    """Two files of which line n of one is the translation of line n of the other. Raises `error`."""
    sides = []
    for path in (source, target):
        try:
            sides.append(read_lines(path.read_bytes()))
        except OSError as e:
            raise error(f"{path}: cannot be read ({e.strerror}); give a UTF-8 file, a sentence a line") from e
        except PromptError as e:
            raise error(f"{path}: {e}") from e
    sources, targets = sides
    if not sources or len(sources) != len(targets):
        raise error(
            f"{source} has {len(sources)} lines, {target} has {len(targets)}; expected a translation a line, and one at "
            "the least"
        )
    return sources, targets


def read_pairs(source: Path, target: Path, error: type[TrilobiteError]) -> tuple[list[str], list[str]]:
    """The same without the pairs of which one is blank, of which nothing is to be learnt. Raises `error`."""
    both = zip(*read_parallel(source, target, error), strict=True)
    pairs = [(a, b) for a, b in both if a.strip() and b.strip()]
    if not pairs:
        raise error(f"{source}, {target}: hold no pair of sentences; give two files, a sentence a line")
    return [a for a, _ in pairs], [b for _, b in pairs]


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    first: int | None = None,
) -> list[Pair]:
    """Token ids of sentences and their translations.

    first: the token that the translations begin with, such as a language's; None = what the tokenizer puts there
    """
    before = tokenizer(list(sources), verbose=False).input_ids
    if first is None:
        after = tokenizer(text_target=list(targets), verbose=False).input_ids
    else:
        bodies = tokenizer(list(targets), add_special_tokens=False, verbose=False).input_ids
        after = [[first, *body, tokenizer.eos_token_id] for body in bodies]
    return list(zip(before, after, strict=True))


def check_pairs(
    pairs: Sequence[Pair], config: PreTrainedConfig, limit: int | None, name: str, error: type[TrilobiteError]
) -> None:
    """Raise `error` for pairs that the model cannot take. limit: tokens that it was made for, None = any."""
    longest = max(max(len(a), len(b)) for a, b in pairs)
    if limit and longest > limit:
        raise error(f"{name}: made for {limit} tokens, a sentence has {longest}; split it")
    last, vocabulary = max(max(max(a), max(b)) for a, b in pairs), int(config.get_text_config().vocab_size)
    if last >= vocabulary:
        raise error(
            f"{name}: the text holds token {last}, the vocabulary has {vocabulary}; tokenise with the tokenizer of "
            "this checkpoint"
        )
    if getattr(config, "decoder_start_token_id", None) is None:
        raise error(f"{name}: config.json has no decoder_start_token_id; add it")


def forced(pairs: Sequence[Pair], config: Any) -> Forced:
    """A batch in which the decoder sees each token's true predecessors."""
    padding = config.pad_token_id or 0
    source = pad([a for a, _ in pairs], padding)
    labels = pad([b for _, b in pairs], NONE)
    shifted = [[config.decoder_start_token_id, *b[:-1]] for _, b in pairs]
    mask = pad([[1] * len(a) for a, _ in pairs], 0)
    return Forced(source=source, mask=mask, decoder_input=pad(shifted, padding), labels=labels)


def pad(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """[B, the longest] int64, padded on the right."""
    return pad_sequence([torch.tensor(list(r)) for r in rows], batch_first=True, padding_value=value)
