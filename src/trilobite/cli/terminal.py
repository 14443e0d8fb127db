"""A conversation's two sides: messages from a terminal or a pipe, and answers shown as they come."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trilobite.cli.console import note
from trilobite.signals import answer_beside_an_editor, keep_terminal

if TYPE_CHECKING:
    from rich.console import Console

PROMPT, MORE, BLOCK = "> ", ". ", '"""'
REFRESH_SECONDS = 0.1
"""How often an answer is drawn anew at most: drawing takes time from the model."""
_UNPRINTABLE = {c: None for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}
"""Control characters: a model's text gives the terminal no commands."""


class Input:
    """Messages, one at a time: lines of a pipe; from a terminal, of one line or more, with an editor and a history."""

    def __init__(self) -> None:
        """Look where they come from."""
        self.edits = sys.stdin.isatty() and sys.stdout.isatty()
        if self.edits:
            import readline  # noqa: F401 - from now on input() edits lines and remembers them

            keep_terminal()
            answer_beside_an_editor()

    def read(self) -> str | None:
        """The next message, stripped, perhaps empty; None at the end."""
        if not self.edits:
            if sys.stdin.isatty():
                print(PROMPT, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            return line.strip() if line else None
        try:
            with _raising():
                return self._message().strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            note("Ctrl-D or /quit ends the conversation")
            return ""

    def _message(self) -> str:
        """A line; with the next ones where it ends in a backslash, or begins a block of three quotes."""
        line = input(PROMPT)
        if line.lstrip().startswith(BLOCK):
            lines = [line.lstrip().removeprefix(BLOCK)]
            while not lines[-1].rstrip().endswith(BLOCK):
                lines.append(input(MORE))
            lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
            return "\n".join(lines)
        while line.endswith("\\"):
            line = line[:-1] + "\n" + input(MORE)
        return line


@contextmanager
def _raising() -> Iterator[None]:
    """Ctrl-C is a KeyboardInterrupt here: the editor of lines then gives the terminal back."""
    import signal

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Plain:
    """An answer as it is: for pipes, for terminals without colours, for text that is no Markdown."""

    def __init__(self, *, clean: bool) -> None:
        """clean: without control characters, for a terminal."""
        self.clean = clean

    def write(self, text: str) -> None:
        """Show the next piece."""
        sys.stdout.write(text.translate(_UNPRINTABLE) if self.clean else text)
        sys.stdout.flush()

    def end(self, *, nothing: bool = False) -> None:
        """The answer is complete, or there is none."""
        if not nothing:
            self.write("\n")


class Formatted:
    """An answer as Markdown: finished blocks stay on the screen, the last one is drawn anew as it grows."""

    def __init__(self, console: "Console") -> None:
        """console: a terminal."""
        from rich.live import Live

        self.console = console
        self.block, self.drawn = "", 0.0
        self.live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self.live.start()

    def write(self, text: str) -> None:
        """Show the next piece."""
        self.block += text.translate(_UNPRINTABLE)
        finished, self.block = finished_blocks(self.block)
        if finished:
            self.live.update("")
            self.console.print(_markdown(finished))
            self.console.print()
        if finished or time.monotonic() - self.drawn > REFRESH_SECONDS:
            self.live.update(_Tail(self.block), refresh=True)
            self.drawn = time.monotonic()

    def end(self, *, nothing: bool = False) -> None:
        """The answer is complete, or there is none."""
        self.live.update("", refresh=True)
        self.live.stop()
        if self.block.strip():
            self.console.print(_markdown(self.block))


def answer(markdown: bool) -> Plain | Formatted:
    """How to show an answer. markdown: whether it may be formatted, where the terminal can."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    able = console.is_terminal and not console.is_dumb_terminal and not os.environ.get("NO_COLOR")
    return Formatted(console) if markdown and able else Plain(clean=console.is_terminal)


def finished_blocks(text: str) -> tuple[str, str]:
    """A text up to its last empty line that ends a block, and the rest: no block goes on behind that line."""
    cut, position, fence = 0, 0, ""
    lines = text.splitlines(keepends=True)
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        position += len(line)
        stripped = line.strip()
        mark = stripped[:3]
        if mark in ("```", "~~~") and (not fence or (mark == fence and not stripped.strip(mark[0]))):
            fence = "" if fence else mark
        elif not fence and not stripped and following and not following[0].isspace():
            cut = position
    return text[:cut], text[cut:]


def _markdown(text: str) -> Any:
    """Text as Markdown: HTML in it is shown as it stands, line breaks stay, links show where they lead."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    made = Markdown(text, hyperlinks=False)
    parser = MarkdownIt().enable("strikethrough").enable("table").disable(["html_block", "html_inline"])
    made.parsed = parser.parse(text)
    for token in made.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return made


class _Tail:
    """The last lines of a block, as many as the screen shows."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_console__(self, console: "Console", options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        lines = console.render_lines(_markdown(self.text), options, pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()
