"""chat: commands, messages of many lines and history in a terminal, answers as Markdown, Ctrl-C, pipes."""

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from support.commands import Run

from trilobite import signals
from trilobite.cli import terminal
from trilobite.cli.terminal import Formatted, Plain, finished_blocks
from trilobite.errors import PromptError
from trilobite.runtime.generate.conversation import load_conversation

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }};{% endfor %}a"


@pytest.fixture
def templated(packed: Path, tmp_path: Path) -> Path:
    path = Path(shutil.copytree(packed, tmp_path / "templated"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


# Commands, from a pipe.


def talk(run: Run, monkeypatch: pytest.MonkeyPatch, model: Path, *lines: str) -> tuple[str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    done = run("chat", model, "-n", 4)
    assert done.status == 0, done.err
    return done.out, done.err


def test_a_system_prompt_comes_first_and_outlives_a_reset(
    run: Run, templated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ("/system be brief", "hi", "/reset", "hi", "/system", "/system -", "/reset", "hi")
    errors = talk(run, monkeypatch, templated, *lines)[1]
    prompts = [int(n) for n in re.findall(r"prompt of (\d+) tokens", errors)]
    assert prompts == [len("sbe brief;uhi;a"), len("sbe brief;uhi;a"), len("uhi;a")]
    assert errors.count("system prompt: be brief") == 2
    assert "system prompt: none" in errors


def test_a_conversation_is_saved_and_continued(
    run: Run, templated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "talk.json"
    whole = talk(run, monkeypatch, templated, "/system s", "one", f"/save {path}", "two")[1]
    saved = json.loads(path.read_text())
    (kept,) = saved["conversations"]
    assert [m["role"] for m in kept["messages"]] == ["user", "assistant"]
    assert (saved["trilobite"], kept["title"], kept["system"]) == (1, "one", "s")
    continued = talk(run, monkeypatch, templated, f"/load {path}", "two")[1]
    prompts = [re.findall(r"prompt of (\d+) tokens", errors) for errors in (whole, continued)]
    assert prompts[0][1:] == prompts[1]
    assert int(prompts[1][0]) > len("ss;uone;utwo;a")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nothing here", "error: /nothing: no such command; /help lists them"),
        ("/save", "error: /save: names no file"),
        ("/save /no/such/folder/x.json", "error: /no/such/folder/x.json: cannot be written"),
        ("/load /no/such/file", "error: /no/such/file: cannot be read"),
        ("/help", "/system TEXT"),
        ("/stats", "0 answers of 0 tokens"),
    ],
)
def test_commands(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str) -> None:
    output, errors = talk(run, monkeypatch, packed, line, "the sea", "/stats")
    assert message in errors
    assert "1 answers of 4 tokens" in errors
    assert "ended at token 11 of a context of 256" in errors
    assert output  # the conversation went on


def test_a_path_is_no_command(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tokens/s" in talk(run, monkeypatch, packed, "/etc/passwd is a file")[1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "3",
        '{"messages": 3}',
        '{"conversations": []}',
        '{"messages": [{"role": "god", "content": ""}]}',
        '{"messages": [3]}',
    ],
)
def test_files_that_hold_no_conversation(tmp_path: Path, text: str) -> None:
    (tmp_path / "talk.json").write_text(text)
    with pytest.raises(PromptError, match=r"talk\.json"):
        load_conversation(tmp_path / "talk.json")


def test_messages_of_other_programs(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}]
    for document in ({"messages": messages}, {"trilobite": 1, "conversations": [{"messages": messages}]}):
        (tmp_path / "talk.json").write_text(json.dumps(document))
        assert load_conversation(tmp_path / "talk.json") == (messages, "")
    system = {"role": "system", "content": "s"}
    (tmp_path / "talk.json").write_text(json.dumps({"messages": [system, *messages]}))
    assert load_conversation(tmp_path / "talk.json") == (messages, "s")


# Answers.


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\ntwo\n\nthree", "one\n\ntwo\n\n"),
        ("- a\n\n  still a", ""),
        ("```\ncode\n\nmore", ""),
        ("```python\ncode\n\nmore\n```\n\nafter", "```python\ncode\n\nmore\n```\n\n"),
        ("~~~\n```\n\nx\n~~~\n\nafter", "~~~\n```\n\nx\n~~~\n\n"),
    ],
)
def test_blocks_that_are_finished(text: str, finished: str) -> None:
    assert finished_blocks(text) == (finished, text[len(finished) :])


def shown(*pieces: str) -> str:
    """What a terminal of 40 columns has been sent for an answer."""
    console = Console(file=io.StringIO(), force_terminal=True, width=40, height=10, color_system="standard")
    answer = Formatted(console)
    for piece in pieces:
        answer.write(piece)
    answer.end()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_markdown_is_formatted_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "REFRESH_SECONDS", 1e9)  # without the drafts of a block
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    text = shown("Some **bo", "ld** text\nnext line\n\n", "```python\nx = 1\n", "```\n\nend")
    assert "\x1b[1mbold\x1b[0m" in text
    assert "**" not in plain(text)
    assert "```" not in plain(text)
    assert re.search(r"text *\n *next line", plain(text))
    assert plain(text).rstrip().endswith("end")
    assert max(map(len, plain(text).splitlines())) <= 40


def test_html_and_commands_to_the_terminal_are_text() -> None:
    text = shown("<think>secret</think>\n\n<b>x</b> \x1b]0;title\x07 \x1b[2J [link](http://a.b)\n")
    assert "<think>secret</think>" in plain(text)
    assert "<b>x</b>" in plain(text)
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text
    assert "http://a.b" in plain(text)


def test_a_long_block_is_drawn_by_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "REFRESH_SECONDS", -1.0)
    lines = [f"line {i}\n" for i in range(30)]
    text = shown("```\n", *lines, "```\n")
    assert "line 0 " in plain(text[-3000:])  # in the end all of it is printed
    assert text.count("line 0 ") < 15  # and was not on the screen of 10 lines all the time


@pytest.mark.parametrize(("clean", "expected"), [(True, "a[2Jb\n"), (False, "a\x1b[2Jb\n")])
def test_plain_answers(capsys: pytest.CaptureFixture[str], clean: bool, expected: str) -> None:
    answer = Plain(clean=clean)
    answer.write("a\x1b[2Jb")
    answer.end()
    assert capsys.readouterr().out == expected


# In a terminal.


class Terminal:
    """A process behind a pseudo-terminal."""

    def __init__(self, *command: object, **environment: str) -> None:
        self.pid, self.handle = pty.fork()
        if self.pid == 0:
            os.environ.update({"TERM": "xterm", "OMP_NUM_THREADS": "1", "COLUMNS": "40", **environment})
            os.execv(sys.executable, [sys.executable, "-m", "trilobite", *map(str, command)])
        self.seen = ""

    def expect(self, pattern: str, seconds: float = 60) -> str:
        """Read until the pattern comes; returns what came until then, and forgets it."""
        until = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self.handle], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{pattern!r} did not come; there is {self.seen!r}"
            try:
                data = os.read(self.handle, 65536)
            except OSError:  # Linux tells the end of a terminal so
                data = b""
            assert data, f"{pattern!r} did not come before the end; there is {self.seen!r}"
            self.seen += data.decode(errors="replace")
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self.handle, text.encode())

    def status(self) -> int:
        for _ in range(600):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        raise AssertionError(f"it goes on; there is {self.seen!r}")

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.handle)


@pytest.fixture
def endless(templated: Path) -> Path:
    """A model whose answers take a minute."""
    config = json.loads((templated / "config.json").read_text())
    (templated / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100_000}))
    generation = json.loads((templated / "generation_config.json").read_text())
    generation.pop("eos_token_id", None)
    (templated / "generation_config.json").write_text(json.dumps(generation))
    return templated


@pytest.fixture
def screen(endless: Path) -> Iterator[Terminal]:
    made = Terminal("chat", endless, "-n", 20_000, "--device", "cpu")
    yield made
    made.close()


def test_a_conversation_in_a_terminal(screen: Terminal) -> None:
    screen.expect("> ")
    screen.type("hello\n")
    screen.expect("hello")
    time.sleep(1)
    screen.type("\x03")  # the answer ends, the program does not
    assert "\x1b[?25l" in screen.expect("stopped by you")  # it was formatted
    screen.expect("> ")
    screen.type("\x1b[A")  # the line before
    screen.expect("hello")
    screen.type(" again\n")
    screen.expect("hello again|again")
    time.sleep(1)
    screen.type("\x03")
    prompt = re.search(r"prompt of (\d+) tokens", screen.expect("stopped by you"))
    assert prompt is not None
    assert int(prompt[1]) > len("uhello;a" + "uhello again;a")  # what was said before the stop is remembered
    screen.expect("> ")
    screen.type("/sys")
    screen.expect("/sys")
    time.sleep(1)
    screen.type("\x03")  # at the prompt it drops the line
    screen.expect("Ctrl-D or /quit ends")
    screen.expect("> ")
    screen.type('"""\nfirst\n')
    screen.expect(r"\. first")
    screen.type('second"""\n')
    time.sleep(1)
    screen.type("\x03")
    screen.expect("stopped by you")
    screen.expect("> ")
    screen.type("/stats\n")
    screen.expect("3 answers of")
    screen.expect("> ")
    screen.type("/quit\n")
    assert screen.status() == 0


def test_a_signal_at_the_prompt_gives_the_terminal_back(packed: Path) -> None:
    screen = Terminal("chat", packed, "-n", 8, "--device", "cpu", NO_COLOR="1")
    try:
        screen.expect("> ")
        screen.type("hello\n")
        screen.expect("tokens/s")
        assert "\x1b[" not in screen.expect("> ").replace("\x1b[?2004", "")  # plain, as NO_COLOR asks
        screen.type("half a li")
        screen.expect("half a li")
        os.kill(screen.pid, signal.SIGTERM)
        screen.expect("terminated")
        assert screen.status() == 128 + signal.SIGTERM
        assert termios.tcgetattr(screen.handle)[3] & termios.ECHO
        assert termios.tcgetattr(screen.handle)[3] & termios.ICANON
    finally:
        screen.close()


def test_a_signal_that_the_editor_misses_is_answered() -> None:
    """The main thread waits in a call that no signal interrupts: all that is known of one is that it came."""
    deaf = (
        "import os, signal, trilobite.signals as s; s.answer_signals(); s.answer_beside_an_editor(); "
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); print(flush=True); os.read(0, 1)"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", deaf], stdin=pipe, stdout=pipe, stderr=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.5)  # until it waits
        child.send_signal(signal.SIGTERM)
        try:
            assert child.wait(20) == 128 + signal.SIGTERM
        finally:
            child.kill()
        assert child.stderr is not None
        assert child.stderr.read() == b"terminated\n"


def test_a_second_ctrl_c_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(signals, "_stop", lambda number, frame: ended.append(number))
    with signals.Patience() as patience:
        assert not patience.asked
        signal.raise_signal(signal.SIGINT)
        assert patience.asked
        assert ended == []
        signal.raise_signal(signal.SIGINT)
        assert ended == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_pipe_ends_with_its_first_ctrl_c(endless: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "trilobite", "chat", str(endless), "-n", "90000", "--device", "cpu"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    assert b"/help" in process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 128 + signal.SIGINT
    process.communicate()
