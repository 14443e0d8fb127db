"""report: a page that shows what became of a checkpoint."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from trilobite.cli.console import size
from trilobite.cli.options import named
from trilobite.errors import DestinationError


def _all_named(models: list[str]) -> list[str]:
    return [named(model) for model in models]


def report(
    packed: Annotated[
        list[str],
        typer.Argument(
            help="Packed checkpoints: folders or hub ids.", callback=_all_named, metavar="PACKED [MORE]..."
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to write the page (HTML).", metavar="FILE")
    ] = Path("report.html"),
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write a page that shows what was done to each role, where the error is, and why.

    One HTML file with its figures in it: it loads nothing and runs no script. Of several checkpoints it also shows
    bytes against perplexity and KL, BLEU and chrF, as kept by `trilobite eval --save`, and in what they differ.

    \b
    Example: trilobite report mixtral-3bit mixtral-2bit -o report.html --open
    """
    if not output.absolute().parent.is_dir():
        raise DestinationError(
            f"{output}: cannot be written, there is no folder {output.parent}; make it first"
        )
    from trilobite.checkpoint.files import explained, write_whole
    from trilobite.report.make import make_report
    from trilobite.report.read import read_packed
    from trilobite.report.svg import require_matplotlib

    require_matplotlib()
    found = [read_packed(_folder(path)) for path in packed]
    text = make_report(found).encode()
    with explained(output):
        write_whole(output, text)
    print(f"written to {output}, {size(len(text))}")
    if show:
        webbrowser.open(output.resolve().as_uri())


def _folder(path: str) -> Path:
    """The folder of a checkpoint, downloaded where it is a hub id."""
    if Path(path).is_dir():
        return Path(path)
    from trilobite.checkpoint.source import open_source

    return open_source(path).path
