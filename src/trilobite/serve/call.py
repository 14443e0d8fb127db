"""One HTTP request, from the guard to the batch and back."""

from contextvars import ContextVar
from time import perf_counter

from trilobite.serve.answer import Answer


class Call:
    """What the guard, the handlers and the batch know of the request that they work on.

    answer: once it is in the batch    prompt: its tokens
    """

    def __init__(self) -> None:
        """The request has just come."""
        self.started = perf_counter()
        self.answer: Answer | None = None
        self.prompt = 0

    def begin(self, answer: Answer, prompt: int) -> None:
        """The request is in the batch."""
        self.answer, self.prompt = answer, prompt

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were in the cache."""
        if self.answer is None or not self.answer.total_tokens:
            return 0
        return self.prompt - self.answer.wish.draw.read


CALL: ContextVar[Call] = ContextVar("trilobite_call")
