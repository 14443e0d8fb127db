"""One answer: its text as its tokens come, until it ends for one reason or another."""

import asyncio
import json
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from transformers.cli.serving.utils import CBStreamer, _StreamError, response_events_to_chunks
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser

from trilobite.runtime.generate.stops import Stops
from trilobite.serve.sampler import Chance, Draw


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a request asks for. max_new_tokens: at most so many    ends: tokens that end an answer."""

    draw: Draw
    max_new_tokens: int
    ends: tuple[int, ...]


class Piece(str):
    """Text of the answer, with what was noted of its tokens."""

    chances: list[Chance]


class Answer(CBStreamer):  # type: ignore[misc]
    """Text of one request.

    reason: "stop" (the model, or a stop string), "length", "" while it goes on    first, last: times of tokens
    """

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        request_id: str,
        tokenizer: PreTrainedTokenizerBase,
        wish: Wish,
        parser: ResponseParser | None,
        seconds: float,
    ) -> None:
        """Begin before the first token. seconds: until it ends in any case."""
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        super().__init__(manager, request_id, tokenizer._tokenizer, loop, self.queue, response_parser=parser)
        self.wish = wish
        self.stops = Stops(wish.draw.sampling.stop)
        self.reason = ""
        self.first = self.last = 0.0
        self._told = 0
        self._deadline = loop.call_later(seconds, self.expire)

    def take(self, output: GenerationOutput) -> None:
        """Called on the event loop with every new token, or when the request failed."""
        if self.reason:
            return
        if output.error is not None:
            self.fail(output.error)
            return
        new = output.generated_tokens[self.total_tokens :]
        self.last = perf_counter()
        self.first = self.first or self.last
        for token in new:
            self.total_tokens += 1
            self._say(self.stops.take(self._decode_stream.step(self._tokenizer, token) or ""))
        if self.stops.stopped:
            self._over("stop")
            self._forget()
        elif output.is_finished():
            self._over("stop" if output.generated_tokens[-1] in self.wish.ends else "length")

    def expire(self) -> None:
        """Its time is up: the answer ends here, or fails where it has not begun."""
        if self.reason:
            return
        if self.total_tokens:
            self._over("length")
        else:
            self.fail("the time of this request was up before its answer began; try again later")
        self._forget()

    def fail(self, message: str) -> None:
        """End with an error."""
        self._end("error")
        self.queue.put_nowait(_StreamError(json.dumps(message)[1:-1]))  # handlers print it between quotes

    def cancel(self) -> None:
        """Nobody waits for it any more: its slot is free at the next step."""
        if not self.reason:
            self._end("cancelled")
            self._forget()

    def _forget(self) -> None:
        """Cancelling alone would leave the handler in the router, and late tokens in the queue that nobody reads."""
        router = self._cb.output_router
        self._cb.cancel_request(self._request_id)
        with router._lock:
            router.result_handlers.pop(self._request_id, None)
        while not router.output_queue.empty():
            router.output_queue.get_nowait()

    def _over(self, reason: str) -> None:
        self._say(self.stops.take("", last=True))
        self._end(reason)
        self.end()

    def _end(self, reason: str) -> None:
        self.reason = reason
        self._deadline.cancel()

    def _say(self, text: str) -> None:
        if not text:
            return
        pieces = [text] if self._parser is None else response_events_to_chunks(self._parser.feed(text))
        for piece in pieces:
            if self.wish.draw.chances and type(piece) is str:
                piece = Piece(piece)
                piece.chances = self.wish.draw.chances[self._told : self.total_tokens]
                self._told = self.total_tokens
            self.queue.put_nowait(piece)
