"""What the body of a request may say: everything that is not understood is refused, not passed over."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from trilobite.errors import PromptError
from trilobite.runtime.generate.text import Sampling
from trilobite.serve.sampler import Draw

Body = Mapping[str, Any]
COMMON = {
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "user",
    "metadata",
    "store",
    "service_tier",
}
PENALTIES = {
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "stop",
    "n",
    "stream_options",
    "ignore_eos",
}
CHAT = (
    COMMON
    | PENALTIES
    | {"messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "tools"}
)
CHAT |= {"tool_choice", "parallel_tool_calls", "response_format", "chat_template_kwargs"}
COMPLETION = COMMON | PENALTIES | {"prompt", "max_tokens", "logprobs", "echo", "best_of", "suffix"}
RESPONSE = COMMON | {
    "input",
    "instructions",
    "max_output_tokens",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
}
RESPONSE |= {"text", "truncation", "include", "background", "ignore_eos"}
ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "background": (False,),
    "tool_choice": ("auto",),
    "truncation": ("disabled",),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}}, {}),
    "include": ([],),
}
"""Fields of which only one value is understood, which is the default."""
MOST_LOGPROBS = 20
TEMPLATE_VALUES = (bool, int, float, str, type(None))
TEMPLATE_ARGUMENTS = {
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}
"""Of transformers' function, not of the template: no request sets these."""


@dataclass(frozen=True)
class Number:
    """A field that holds a number. whole: an integer."""

    low: float
    high: float
    whole: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise PromptError."""
        kinds = (int,) if self.whole else (int, float)
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        if not fits or not isfinite(value) or not self.low <= value <= self.high:
            raise PromptError(
                f"{name} is {str(value)[:40]!r}; expected a number from {self.low} to {self.high}"
            )


NUMBERS = {
    "temperature": Number(0, 2),
    "top_p": Number(0, 1),
    "top_k": Number(0, 2**31 - 1, whole=True),
    "seed": Number(-(2**63), 2**63 - 1, whole=True),
    "frequency_penalty": Number(-2, 2),
    "presence_penalty": Number(-2, 2),
    "max_tokens": Number(1, 2**31 - 1, whole=True),
    "max_completion_tokens": Number(1, 2**31 - 1, whole=True),
    "max_output_tokens": Number(1, 2**31 - 1, whole=True),
    "top_logprobs": Number(0, MOST_LOGPROBS, whole=True),
}


def check(body: Body, fields: set[str]) -> None:
    """Raise PromptError for fields that nobody knows, and for values that nobody can follow."""
    if unknown := sorted(map(str, set(body) - fields)):
        raise PromptError(f"fields that are not understood: {', '.join(unknown)[:200]}")
    for name, value in body.items():
        if value is None:
            continue
        if name in NUMBERS:
            NUMBERS[name].check(name, value)
        if name in ONLY and value not in ONLY[name]:
            raise PromptError(f"{name} {value!r:.40} is not offered here, only {ONLY[name][0]!r}")
        if name in ("stream", "ignore_eos", "parallel_tool_calls"):
            _expect(isinstance(value, bool), f"{name} is {str(value)[:40]!r}; expected true or false")
    template = body.get("chat_template_kwargs") or {}
    _expect(isinstance(template, dict), "chat_template_kwargs: expected an object")
    _expect(
        not TEMPLATE_ARGUMENTS & set(template)
        and all(isinstance(v, TEMPLATE_VALUES) for v in template.values()),
        "chat_template_kwargs: expected variables of the template, with plain values",
    )


def check_messages(messages: Any) -> None:
    """Raise PromptError for anything but a conversation of texts."""
    _expect(isinstance(messages, list) and messages, "messages: expected a list of at least one message")
    for message in messages:
        _expect(
            isinstance(message, dict) and isinstance(message.get("role"), str),
            "messages: each is an object with role and content",
        )
        _check_content(message.get("content"))
        calls = message.get("tool_calls")
        if calls is None:
            message.pop("tool_calls", None)
            continue
        _expect(
            isinstance(calls, list)
            and all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls)
            and all({"name", "arguments"} <= set(c["function"]) for c in calls),
            "tool_calls: each is an object with a function of name and arguments",
        )


def _check_content(content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    kinds = ("text", "input_text", "output_text")
    _expect(
        isinstance(content, list)
        and all(
            isinstance(p, dict) and p.get("type") in kinds and isinstance(p.get("text"), str) for p in content
        ),
        "content: expected a text, or a list of parts of type text; this model reads nothing else",
    )


def check_tools(tools: Any, taken: bool) -> None:
    """Raise PromptError for tools that are none, or where the chat template has no place for them (not `taken`)."""
    if not tools:
        return
    _expect(
        isinstance(tools, list) and all(isinstance(t, dict) and t.get("type") == "function" for t in tools),
        "tools: expected a list of functions",
    )
    _expect(taken, "tools: the chat template of this model has no place for them")


def check_prompt(prompt: Any) -> str:
    """The prompt of a completion. Raises PromptError."""
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    _expect(isinstance(prompt, str), "prompt: expected one text")
    return str(prompt)


def draw_of(body: Body, chat: bool) -> Draw:
    """How the tokens of an answer are drawn. Raises PromptError."""
    bias = body.get("logit_bias") or {}
    _expect(isinstance(bias, dict), "logit_bias: expected an object of token ids and numbers")
    return Draw(
        sampling=Sampling(
            temperature=body.get("temperature") or 0.0,
            top_p=1.0 if body.get("top_p") is None else body["top_p"],
            top_k=body.get("top_k") or 0,
            stop=_stops(body.get("stop")),
            seed=body.get("seed"),
        ),
        frequency=body.get("frequency_penalty") or 0.0,
        presence=body.get("presence_penalty") or 0.0,
        bias=dict(_bias(token, value) for token, value in bias.items()),
        logprobs=_logprobs(body, chat),
    )


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    _expect(
        isinstance(stops, list) and len(stops) <= 16 and all(isinstance(s, str) and s for s in stops),
        "stop: expected a text, or a list of at most 16",
    )
    return tuple(stops)


def _bias(token: Any, value: Any) -> tuple[int, float]:
    Number(-100, 100).check("logit_bias", value)
    _expect(str(token).isdecimal(), f"logit_bias: {str(token)[:20]!r} is no token id")
    return int(token), float(value)


def _logprobs(body: Body, chat: bool) -> int | None:
    wanted = body.get("logprobs")
    if wanted is None or wanted is False:
        return None
    if chat:
        _expect(wanted is True, "logprobs: expected true or false; how many, says top_logprobs")
        return body.get("top_logprobs") or 0
    Number(0, MOST_LOGPROBS, whole=True).check("logprobs", wanted)
    return int(wanted)


def _expect(fits: Any, message: str) -> None:
    if not fits:
        raise PromptError(message)
