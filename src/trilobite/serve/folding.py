"""The chunks of a stream as one answer."""

from collections.abc import Sequence
from typing import Any

Chunk = dict[str, Any]


def fold_chat(chunks: Sequence[Chunk]) -> Chunk:
    """A chat completion out of its chunks."""
    message: Chunk = {"role": "assistant", "content": ""}
    logprobs: list[Chunk] = []
    for chunk in chunks:
        choice = chunk["choices"][0]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls") or ():
            message.setdefault("tool_calls", []).append({k: v for k, v in call.items() if k != "index"})
        logprobs += (choice.get("logprobs") or {}).get("content") or ()
    choice = {"index": 0, "message": message, "finish_reason": chunks[-1]["choices"][0]["finish_reason"]}
    choice["logprobs"] = {"content": logprobs, "refusal": None} if logprobs else None
    return _answer(chunks[-1], choice, "chat.completion")


def fold_completion(chunks: Sequence[Chunk]) -> Chunk:
    """A completion out of its chunks."""
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(choice["text"] for choice in choices)
    logprobs: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in (choice.get("logprobs") or {}).items():
            logprobs.setdefault(name, []).extend(values)
    choice = {
        "index": 0,
        "text": text,
        "finish_reason": choices[-1]["finish_reason"],
        "logprobs": logprobs or None,
    }
    return _answer(chunks[-1], choice, "text_completion")


def fold_response(chunks: Sequence[Chunk]) -> Chunk:
    """A response: its last event has it all."""
    last = chunks[-1]
    if last["type"] == "response.completed":
        found: Chunk = last["response"]
        return found
    return {"error": last["response"]["error"]["message"]}


def _answer(last: Chunk, choice: Chunk, kind: str) -> Chunk:
    return {
        "id": last["id"],
        "object": kind,
        "created": last["created"],
        "model": last["model"],
        "choices": [choice],
        "usage": last["usage"],
    }
