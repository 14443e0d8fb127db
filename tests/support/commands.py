"""Commands called in the process of the tests."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from trilobite import cli

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


def in_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """What calls `trilobite ...`, and returns how it ended."""

    def leave(status: int) -> None:
        raise Left(status)

    def call(*args: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["trilobite", *map(str, args)])
        monkeypatch.setattr(os, "_exit", leave)
        status: object = 0
        try:
            cli.main()
        except Left as e:
            status = e.args[0]
        except SystemExit as e:
            status = e.code or 0
        captured = capsys.readouterr()
        return Outcome(int(str(status)), captured.out, captured.err)

    return call
