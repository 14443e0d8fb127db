"""Every command on a terminal of 40 columns, with NO_COLOR, and piped: nothing overflows, nothing leaks."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.cells import cell_len
from support.commands import Run
from support.translators import save, switch

from trilobite import cli
from trilobite.cli import console
from trilobite.cli.console import Progress

COLUMNS = 40
COMMANDS = {
    "compress": "compress {original} {out} -r rtn3 --device cpu --jobs 1",
    "plan": "plan {original} -r milo-s1 --tensors",
    "recipes": "recipes",
    "sensitivity": "sensitivity {original} --text {text} --tokens 128 -o {out}.json",
    "inspect": "inspect {packed}",
    "report": "report {packed} -o {out}.html",
    "verify": "verify {packed}",
    "generate": "generate {packed} the -n 4 --device cpu",
    "chat": "chat {packed} -n 4 --device cpu",
    "translate": "translate {translator} --device cpu",
    "eval": "eval {packed} --text {text} --context 64 --reference {original} --device cpu",
    "stats": "stats {packed} --text {text} --context 64 -o {out}.json --device cpu",
    "trace": "trace {packed} --text {text} --context 64 --samples 2 -o {out}.npz --device cpu",
    "cache": "cache {trace}",
    "bench": "bench",
    "doctor": "doctor",
    "version": "version",
}
ELSEWHERE = {"serve"}  # runs until it is stopped: tests/serve
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
COLOUR = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9]+)*m")


def test_every_command_is_here() -> None:
    group: Any = typer.main.get_command(cli.app)
    assert set(group.commands) == set(COMMANDS) | ELSEWHERE


@pytest.fixture(scope="module")
def places(
    original: Path, packed: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    from trilobite.evaluate.measure import trace_experts
    from trilobite.evaluate.trace import save_trace
    from trilobite.runtime.load import load, load_tokenizer

    folder = tmp_path_factory.mktemp("terminals")
    model, tokenizer = load(str(packed)), load_tokenizer(str(packed))
    save_trace(folder / "trace.npz", trace_experts(model, tokenizer, text, context=64, samples=1))
    return {
        "original": original,
        "packed": packed,
        "text": text,
        "trace": folder / "trace.npz",
        "translator": save(folder / "translator", switch),
    }


Call = Callable[[str], "tuple[int, str]"]


@contextmanager
def terminal_of(columns: int) -> Iterator[list[bytes]]:
    """The process's standard streams on a terminal; the list fills with what it is sent."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    kept, parts = [os.dup(1), os.dup(2)], list[bytes]()

    def listen() -> None:
        while True:
            try:
                parts.append(os.read(master, 65536))
            except OSError:
                return

    listener = threading.Thread(target=listen)
    listener.start()
    streams = sys.stdout, sys.stderr
    try:
        for number in (1, 2):
            os.dup2(slave, number)
        os.close(slave)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        yield parts
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams
        for number, handle in zip((1, 2), kept, strict=True):
            os.dup2(handle, number)
            os.close(handle)
        listener.join(10)
        os.close(master)


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch, places: dict[str, Path], tmp_path: Path) -> Call:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)

    def call(command: str) -> tuple[int, str]:
        words = [word.format(out=tmp_path / "out", **places) for word in command.split()]
        monkeypatch.setattr(sys, "argv", ["trilobite", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a cat\n")))
        status: object = 0
        with terminal_of(COLUMNS) as parts:
            try:
                cli.main()
            except SystemExit as e:
                status = e.code or 0
        return int(str(status)), b"".join(parts).decode()

    return call


def too_wide(output: str) -> list[str]:
    """Lines of tables and bars that a terminal would break; prose it may."""
    lines = re.split(r"[\r\n]+", ESCAPE.sub("", output))
    return [line for line in lines if cell_len(line) > COLUMNS and re.search(r"  |[─━]", line.strip())]


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_overflows_forty_columns(on_terminal: Call, name: str) -> None:
    if name == "report":
        pytest.importorskip("matplotlib")
    status, output = on_terminal(COMMANDS[name])
    assert status == 0, output
    assert output.strip()
    assert too_wide(output) == []
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h")  # the cursor is there again
    assert "…" not in ESCAPE.sub("", output).replace("… and", "")  # folded, not cut off


@pytest.mark.parametrize("name", COMMANDS)
def test_no_color(on_terminal: Call, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "report":
        pytest.importorskip("matplotlib")
    monkeypatch.setenv("NO_COLOR", "1")
    status, output = on_terminal(COMMANDS[name])
    assert status == 0, output
    assert COLOUR.search(output) is None


@pytest.mark.parametrize("name", COMMANDS)
def test_pipes_get_neither_colours_nor_bars(
    run: Run, places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "report":
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a cat\n")))
    words = [word.format(out=tmp_path / "out", **places) for word in COMMANDS[name].split()]
    done = run(*words)
    assert done.status == 0, done.err
    assert "\x1b" not in done.out + done.err
    assert "\r" not in done.out + done.err
    assert "━" not in done.out + done.err


def test_a_bar_fits_and_says_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with terminal_of(COLUMNS) as parts, Progress() as bars:
        for done in range(5):
            bars.show("compress", done, 4, f"{done}/4 tensors, 3.39 MB/4.75 MB, error 0.1146")
        bars.bars.refresh()
    output = b"".join(parts).decode()
    assert too_wide(output) == []
    assert "compress" in output
    assert re.search(r"\d:\d\d|--:--", output)


def test_slow_loading_has_a_bar(on_terminal: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "loading weights" not in on_terminal(COMMANDS["eval"])[1]
    monkeypatch.setattr(console, "PATIENCE", -1.0)
    status, output = on_terminal(COMMANDS["eval"])
    assert status == 0, output
    assert "loading weights" in output
    assert too_wide(output) == []


def test_downloads_keep_their_bars(packed: Path) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled

    from trilobite.runtime.load import load

    with console.quiet():
        load(str(packed))
        assert not are_progress_bars_disabled()


def test_an_overflow_is_noticed() -> None:
    assert too_wide("a table  of " + "x" * 40)
    assert too_wide("\x1b[1mcompress " + "━" * 40)
    assert not too_wide("prose that goes on and on, which the terminal may break where it likes")


def test_completion(tmp_path: Path) -> None:
    environment = {**os.environ, "_TRILOBITE_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    environment["COMP_WORDS"] = "trilobite ins"
    done = subprocess.run(
        [sys.executable, "-m", "trilobite"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["inspect"]
