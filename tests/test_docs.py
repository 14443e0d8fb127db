"""What is generated is current; links lead somewhere; commands that pages show exist with their options."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from trilobite.cli import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), ROOT / "examples" / "README.md"])
each_page = pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])


def test_cli_reference_is_current() -> None:
    spec = importlib.util.spec_from_file_location("generate_cli", DOCS / "generate_cli.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert (DOCS / "cli.md").read_text() == generator.render(), "run: python docs/generate_cli.py"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    titles = re.findall(r"^#+ +(.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@each_page
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT.resolve()), f"{target}: not in a clone"
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def code(page: Path) -> Iterator[list[str]]:
    """The words of every line of code on a page, and of every `span`."""
    fenced = False
    for line in page.read_text().replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fenced = not fenced
            continue
        for text in [line] if fenced or line.startswith("    ") else re.findall(r"`([^`]+)`", line):
            try:
                yield shlex.split(text, comments=True)
            except ValueError:  # an apostrophe: no command
                continue


def options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}


@each_page
def test_commands_exist_with_their_options(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in code(page):
        match [word for word in words if word != "python"]:
            case ["trilobite", name, *rest] if name.islower() and name.isalpha():
                assert name in group.commands, words
                known = {opt for parameter in group.commands[name].params for opt in parameter.opts}
                assert options(rest) <= known, words
            case ["make", target, *_]:
                assert target in targets, words
            case [script, *rest] if re.fullmatch(r"(benchmarks|docs|examples)/\w+\.py", script):
                shared = (ROOT / "benchmarks").glob("_*.py")  # options that several scripts have
                text = "".join(file.read_text() for file in (ROOT / script, *shared))
                assert all(f'"{option}"' in text for option in options(rest)), words
