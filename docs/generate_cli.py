"""Write docs/cli.md from the help texts of the `trilobite` command: python docs/generate_cli.py"""

from pathlib import Path
from typing import Any

import typer

from trilobite.cli import app

WIDTH = 100
PAGE = Path(__file__).with_name("cli.md")
HEAD = """# Command line

Written by `python docs/generate_cli.py` from `trilobite COMMAND --help`; a test fails when it is out of date.

| exit status | after |
| --- | --- |
| 0 | success; in `chat` also /quit and the end of the input; in `serve` a SIGTERM, once running requests are finished |
| 1 | an error, which is one line on standard error: what was found, the rule, the remedy; damage that `verify` finds |
| 2 | wrong usage |
| 130, 143 | Ctrl-C, SIGTERM: one line, too; the same `compress` or `translate` goes on where it was |

Results go to standard output; progress, notes and speeds to standard error. `--json` prints one JSON object instead of
tables. Tables fold to the width of the terminal; what goes to a file or a pipe is never cut off, and has neither
colours nor bars. `NO_COLOR` in the environment turns colours off.

`trilobite --install-completion` completes commands and options in bash, zsh, fish and PowerShell.
"""


def render() -> str:
    """The whole page."""
    group: Any = typer.main.get_command(app)
    sections = [HEAD, _section(group, None, "trilobite")]
    for name, command in group.commands.items():
        sections.append(_section(command, group, name))
    return "\n".join(sections)


def _section(command: Any, parent: Any, name: str) -> str:
    size = {"terminal_width": WIDTH, "max_content_width": WIDTH, "help_option_names": ["-h", "--help"]}
    above = parent.context_class(parent, info_name="trilobite", **size) if parent else None
    context = command.context_class(command, info_name=name, parent=above, **size)
    title = f"trilobite {name}" if parent else name
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    return f"## `{title}`\n\n```text\n{text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(render())
