"""transformers' handlers, with what they lack: checks, stop strings, log probabilities, usage as it was.

A request takes their way: `handle_request` checks the body, renders the prompt and begins to stream. An answer in one
piece is folded from the stream, so that both say the same.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from fastapi import HTTPException
from fastapi.responses import JSONResponse, StreamingResponse
from transformers import PreTrainedModel
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, GenerationState, Modality

from trilobite.errors import PromptError
from trilobite.serve import bodies
from trilobite.serve.answer import Wish
from trilobite.serve.batching import Batching
from trilobite.serve.call import CALL
from trilobite.serve.folding import fold_chat, fold_completion, fold_response
from trilobite.serve.logprobs import chat_logprobs, completion_logprobs
from trilobite.serve.prompts import Prompter

Chunk = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class OneModel:
    """The model that is served, in the place of transformers' manager, which loads whatever a request names.

    entry: what /v1/models says of it
    """

    name: str
    model: PreTrainedModel
    prompter: Prompter
    entry: Chunk

    @property
    def force_model(self) -> str:
        """The one there is."""
        return self.name

    def get_model_modality(self, model: PreTrainedModel, processor: object = None) -> Modality:
        """Text."""
        return Modality.LLM

    def list_models(self) -> list[Chunk]:
        """What /v1/models lists."""
        return [self.entry]

    get_gen_models = list_models
    """Its name before transformers 5.24."""

    def shutdown(self) -> None:
        """It stays as long as the process."""


class OneBatch(GenerationState):  # type: ignore[misc]
    """The batch that everything runs in."""

    def __init__(self, batching: Batching) -> None:
        """Of the one model."""
        super().__init__(continuous_batching=True)
        self._cb_manager = batching

    def use_continuous_batching(self, model: PreTrainedModel, modality: Modality) -> bool:
        """Always."""
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> Batching:
        """The one there is."""
        return self._cb_manager  # type: ignore[no-any-return]


class Checked(BaseHandler, ABC):  # type: ignore[misc]
    """What our three handlers share; comes before transformers' own among their bases."""

    model_manager: OneModel
    fields: set[str]
    kind: str
    done: str = "data: [DONE]\n\n"

    def _validate_request(self, body: Chunk) -> None:
        bodies.check(body, self.fields)
        bodies.check_tools(body.get("tools"), self.model_manager.prompter.takes_tools)

    @staticmethod
    def get_processor_inputs_from_messages(messages: Any, modality: Modality) -> list[Chunk]:
        """Messages as chat templates take them. Raises PromptError."""
        bodies.check_messages(messages)
        try:
            found: list[Chunk] = BaseHandler.get_processor_inputs_from_messages(messages, modality)
        except ValueError as e:
            raise PromptError(f"tool_calls: arguments that are no JSON: {e}") from e
        return found

    def _resolve_model(self, body: Chunk) -> tuple[str, PreTrainedModel, Prompter]:
        one = self.model_manager
        if body.get("model") not in (None, one.name):
            raise HTTPException(404, f"the model {str(body['model'])[:80]!r} is not here, only {one.name!r}")
        return one.name, one.model, one.prompter

    def _build_generation_config(
        self, body: Chunk, model_generation_config: object, use_cb: bool = False
    ) -> Wish:
        draw = bodies.draw_of(body, chat=self.kind == "chatcmpl")
        vocabulary = self.model_manager.prompter.vocabulary
        if max(draw.bias, default=0) >= vocabulary:
            raise PromptError(f"logit_bias: the model's vocabulary has {vocabulary} tokens")
        limits = (body.get(f) for f in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
        ends = self.model_manager.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        return Wish(
            draw=draw,
            max_new_tokens=next((n for n in limits if n is not None), self.model_manager.prompter.context),
            ends=() if body.get("ignore_eos") else tuple(ends),
        )

    async def handle_request(self, body: Chunk, request_id: str) -> StreamingResponse | JSONResponse:
        """Answer under a name of our own: two requests of one name would share a place in the batch."""
        body["stream"] = bool(body.get("stream"))
        response: StreamingResponse | JSONResponse = await super().handle_request(
            body, f"{self.kind}-{uuid4().hex}"
        )
        return response

    def _streaming(self, *args: Any, **kwargs: Any) -> StreamingResponse:
        response: StreamingResponse = super()._streaming(*args, **kwargs)  # type: ignore[misc]
        if self.done:
            response.body_iterator = _closed(response.body_iterator, self.done)
        return response

    async def _non_streaming(self, *args: Any, **kwargs: Any) -> JSONResponse:
        response: StreamingResponse = super()._streaming(*args, **kwargs)  # type: ignore[misc]
        chunks = [chunk async for lines in response.body_iterator for chunk in _events(str(lines))]
        answer = chunks[-1] if "error" in chunks[-1] else self.fold(chunks)
        if answer.get("error"):
            raise HTTPException(503, answer["error"])
        return JSONResponse(answer)

    @abstractmethod
    def fold(self, chunks: Sequence[Chunk]) -> Chunk:
        """The chunks of a stream as one answer."""


class Choices(Checked):
    """What chats and completions share: chunks with log probabilities.

    piece: the argument of transformers' method that holds a chunk's text    logprobs: its form
    """

    piece: str
    logprobs: Callable[[Any, Any], Any]

    def _build_chunk_sse(self, *args: Any, **kwargs: Any) -> str:
        line = super()._build_chunk_sse(*args, **kwargs)
        tokenizer = self.model_manager.prompter.inner
        return _amended(
            line, kwargs.get(self.piece), lambda c: self.logprobs(tokenizer, c), kwargs.get("finish_reason")
        )


async def _closed(lines: Any, done: str) -> AsyncIterator[str]:
    async for line in lines:
        yield line
    yield done


def _events(lines: str) -> list[Chunk]:
    """The JSON of server-sent events."""
    return [json.loads(e.removeprefix("data: ")) for e in lines.split("\n\n") if e]


def _amended(line: str, content: object, entries: Any, finish_reason: str | None) -> str:
    """A chunk with log probabilities, and in the last one how the answer really ended and what the cache held."""
    chances = getattr(content, "chances", None)
    if not chances and finish_reason is None:
        return line
    chunk = _events(line)[0]
    choice = chunk["choices"][0]
    if chances:
        choice["logprobs"] = entries(chances)
    if finish_reason is not None:
        call = CALL.get()
        if finish_reason != "tool_calls" and call.answer is not None:
            choice["finish_reason"] = call.answer.reason
        chunk["usage"]["prompt_tokens_details"] = {"cached_tokens": call.cached}
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


class Chat(Choices, ChatCompletionHandler):  # type: ignore[misc]
    """/v1/chat/completions."""

    fields = bodies.CHAT
    kind, piece = "chatcmpl", "content"
    logprobs = staticmethod(chat_logprobs)

    def _validate_request(self, body: Chunk) -> None:
        super()._validate_request(body)
        body.setdefault("messages", None)
        body["chat_template_kwargs"] = body.get("chat_template_kwargs") or {}

    def fold(self, chunks: Sequence[Chunk]) -> Chunk:
        """One message."""
        return fold_chat(chunks)


class Completion(Choices, CompletionHandler):  # type: ignore[misc]
    """/v1/completions."""

    fields = bodies.COMPLETION
    kind, piece = "cmpl", "text"
    logprobs = staticmethod(completion_logprobs)

    def _validate_request(self, body: Chunk) -> None:
        super()._validate_request(body)
        body["prompt"] = bodies.check_prompt(body.get("prompt"))
        body.pop("suffix", None)

    def fold(self, chunks: Sequence[Chunk]) -> Chunk:
        """One text."""
        return fold_completion(chunks)


class Responses(Checked, ResponseHandler):  # type: ignore[misc]
    """/v1/responses."""

    fields = bodies.RESPONSE
    kind = "resp"
    done = ""

    @staticmethod
    def _normalize_input(body: Chunk) -> list[Chunk]:
        try:
            messages: list[Chunk] = ResponseHandler._normalize_input(body)
        except (LookupError, TypeError, AttributeError) as e:
            raise PromptError("input: expected a text, or a list of messages and items of calls") from e
        return messages

    def fold(self, chunks: Sequence[Chunk]) -> Chunk:
        """The last event has it all."""
        return fold_response(chunks)
