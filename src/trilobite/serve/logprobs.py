"""Log probabilities as OpenAI's two endpoints write them."""

from collections.abc import Sequence
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trilobite.serve.sampler import Chance


def chat_logprobs(tokenizer: PreTrainedTokenizerBase, chances: Sequence[Chance]) -> dict[str, Any]:
    """Of a chunk of a chat."""
    return {
        "content": [
            _entry(tokenizer, c) | {"top_logprobs": [_entry(tokenizer, o) for o in c.others]} for c in chances
        ],
        "refusal": None,
    }


def completion_logprobs(tokenizer: PreTrainedTokenizerBase, chances: Sequence[Chance]) -> dict[str, Any]:
    """Of a chunk of a completion; offsets are left to clients, who have the whole text."""
    return {
        "tokens": [_text(tokenizer, c) for c in chances],
        "token_logprobs": [c.logprob for c in chances],
        "top_logprobs": [{_text(tokenizer, o): o.logprob for o in c.others} for c in chances],
        "text_offset": [],
    }


def _entry(tokenizer: PreTrainedTokenizerBase, chance: Chance) -> dict[str, Any]:
    text = _text(tokenizer, chance)
    return {"token": text, "logprob": chance.logprob, "bytes": list(text.encode())}


def _text(tokenizer: PreTrainedTokenizerBase, chance: Chance) -> str:
    text: str = tokenizer.decode([chance.token])
    return text
