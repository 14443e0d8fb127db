"""Text as it comes: pieces that are sure, up to a stop string."""

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor
from transformers import TextStreamer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trilobite.runtime.generate.stops import Stops

OnText = Callable[[str], None]
"""Called with each new piece of text, as soon as it is sure."""
Unwanted = Callable[[], bool]
"""Whether somebody has asked for the text to end where it is."""


class Streamer(TextStreamer):  # type: ignore[misc]
    """Hands text on instead of printing it, and keeps the time of every token.

    stops: strings that end the text and do not belong to it    unwanted: asked after every token whether to end here
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        on_text: OnText | None,
        stops: tuple[str, ...] = (),
        unwanted: Unwanted | None = None,
    ) -> None:
        """Begin before the prompt, which is passed over."""
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.unwanted = unwanted
        self.interrupted = False
        self.stops = Stops(stops)
        self.pieces: list[str] = []
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Take a token, or the prompt."""
        if not self.next_tokens_are_prompt:
            self.times.append(perf_counter())
        super().put(value)

    def stop_at(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Whether each text [B] bool has stopped: transformers' own search misses strings of half characters."""
        self.interrupted = self.unwanted is not None and self.unwanted()
        ends = self.stopped or self.interrupted
        return torch.full((input_ids.shape[0],), ends, device=input_ids.device)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Hand on what cannot change any more."""
        if sure := self.stops.take(text, last=stream_end):
            self.pieces.append(sure)
            if self.on_text:
                self.on_text(sure)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self.stops.stopped
