"""What scripts of this folder have in common: where their inputs lie, options, and how they end.

The last line that a script prints is one JSON object.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib.markdown import insert

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
TEXT = SHARED / "data/eval/wikitext-2/wiki.test.detok.txt"
TRAINING_TEXT = SHARED / "data/train/wikipedia.txt"
WORK = Path(tempfile.gettempdir()) / "trilobite-bench"


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that prints a script's docstring as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_model(options: argparse.ArgumentParser) -> None:
    """MODEL."""
    options.add_argument("model", type=Path, help="folder of the original checkpoint")


def add_text(options: argparse.ArgumentParser, *, tokens: int) -> None:
    """--text, --context and --tokens (and its default): what models are measured on."""
    options.add_argument("--text", type=Path, default=TEXT)
    options.add_argument("--context", type=int, default=256)
    options.add_argument(
        "--tokens", type=int, default=tokens, help="of the text, from its beginning; 0 = all"
    )


def add_work(options: argparse.ArgumentParser, use: str = "packed checkpoints stay here for reuse") -> None:
    """--work: where compressed models and Hessians are kept."""
    options.add_argument("--work", type=Path, default=WORK, help=use)


def add_page(options: argparse.ArgumentParser, marker: str) -> None:
    """--page: where the report goes, too. marker: the name that its markers have there."""
    options.add_argument(
        "--page", type=Path, help=f"insert it between the markers `{marker}` of this page (docs/results.md)"
    )


def add_machine(options: argparse.ArgumentParser) -> None:
    """--machine: whose figures these are, where a page has those of several."""
    options.add_argument(
        "--machine", help="name of another machine, whose tables stand beside the first one's"
    )


def of_machine(marker: str, machine: str | None) -> str:
    """The name of a machine's markers."""
    return f"{marker}-{machine}" if machine else marker


def add_output(options: argparse.ArgumentParser) -> None:
    """-o: a file for the report alone."""
    options.add_argument("-o", "--output", type=Path, help="write the markdown here")


def publish(
    report: str,
    summary: Mapping[str, Any],
    *,
    page: Path | None,
    marker: str,
    title: str = "",
    output: Path | None = None,
) -> None:
    """Print a report and its JSON line; put the report in a file, and between the markers of a page below a title."""
    print(report)
    if output:
        output.write_text(report + "\n", encoding="utf-8")
    if page:
        insert(page, marker, f"{title}\n\n{report}" if title else report)
    print(json.dumps(summary))
