"""Text as it comes: pieces that are sure, up to a stop string."""

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor
from transformers import TextStreamer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

OnText = Callable[[str], None]
"""Called with each new piece of text, as soon as it is sure."""


class Streamer(TextStreamer):  # type: ignore[misc]
    """Hands text on instead of printing it, and keeps the time of every token.

    stops: strings that end the text and do not belong to it; what may be the beginning of one is held back
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, on_text: OnText | None, stops: tuple[str, ...] = ()
    ) -> None:
        """Begin before the prompt, which is passed over."""
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.stops = stops
        self.pieces: list[str] = []
        self.times: list[float] = []
        self.held = ""
        self.stopped = False

    def put(self, value: Tensor) -> None:
        """Take a token, or the prompt."""
        if not self.next_tokens_are_prompt:
            self.times.append(perf_counter())
        super().put(value)

    def stop_at(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Whether each text [B] bool has stopped: transformers' own search misses strings of half characters."""
        return torch.full((input_ids.shape[0],), self.stopped, device=input_ids.device)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Hand on what cannot change any more."""
        if self.stopped:
            return
        text = self.held + text
        ends = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        self.stopped = bool(ends)
        sure = min(ends) if ends else len(text) - (0 if stream_end else self._begun(text))
        self.held = text[sure:]
        if text[:sure]:
            self.pieces.append(text[:sure])
            if self.on_text:
                self.on_text(text[:sure])

    def _begun(self, text: str) -> int:
        """Length of the longest end of a text with which a stop string begins."""
        lengths = range(1, max((len(stop) for stop in self.stops), default=0))
        return max((n for n in lengths if any(s.startswith(text[-n:]) for s in self.stops)), default=0)
