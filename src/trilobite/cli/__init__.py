"""The command line: its commands, one module for each group of them, and what their errors become."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from trilobite.cli import (
    bench,
    chat,
    compress,
    evaluate,
    inspect,
    offload,
    plan,
    report,
    run,
    sensitivity,
    serve,
    translate,
    verify,
)
from trilobite.cli.streams import fail, standard_streams
from trilobite.cli.threads import sleep_at_once
from trilobite.errors import TrilobiteError, refuse_exhausted

app = typer.Typer(
    name="trilobite",
    help="Make Mixture-of-Experts language models small enough for your machine, and run them there.",
    epilog="Begin with: trilobite compress MODEL OUT --bits 3.5, then trilobite chat OUT.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for command in (
    compress.compress,
    plan.plan,
    plan.recipes,
    sensitivity.sensitivity,
    inspect.inspect,
    report.report,
    verify.verify,
    run.generate,
    chat.chat,
    translate.translate,
    serve.serve,
    evaluate.evaluate,
    evaluate.stats,
    offload.trace,
    offload.cache,
    bench.bench,
    inspect.doctor,
    inspect.version,
):
    app.command({"evaluate": "eval"}.get(command.__name__))(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        inspect.version()
        raise typer.Exit()


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """The options of `trilobite` itself."""


@contextmanager
def _within_the_system() -> Iterator[None]:
    """Raise ResourceError where memory or threads end."""
    try:
        yield
    except TrilobiteError:
        raise
    except Exception as e:
        refuse_exhausted("trilobite", e)
        raise


def main() -> None:
    """Run the command line of this process. Exit status: 0, 1 after an error, 2 for wrong usage.

    Signals end it with 130 (Ctrl-C) or 143 (SIGTERM): `trilobite.signals`.
    """
    sleep_at_once()
    try:
        with standard_streams(), _within_the_system():
            app(prog_name="trilobite")
    except TrilobiteError as e:
        fail(str(e))
    except OSError as e:
        if e.errno is None:  # not the operating system's: a bug
            raise
        where = f"{e.filename}: " if e.filename else ""
        fail(
            f"{where}{e.strerror}; check the path, its permissions and free space, and run the command again"
        )
