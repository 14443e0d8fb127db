"""Commands called in the process of the tests."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

TEXT = "the old man looked at the sea and the sea looked back. " * 30


class Outcome(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)


Run = Callable[..., Outcome]


class Left(BaseException):
    """The process would have ended here, without unwinding."""
