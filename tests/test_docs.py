"""What is generated is current; links lead somewhere; commands that pages show exist with their options."""

import importlib.util
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from support.paths import ROOT

from trilobite.cli import app

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "examples" / "README.md"])
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


NAMED = re.compile(r"\b(?:tests|benchmarks|csrc|tools|src|examples)/[\w/.]+\.(?:py|h|cpp|sh|md)\b")
"""A file of the repository, as pages and docstrings name it."""


def test_files_that_are_named_exist() -> None:
    scripts = [p for folder in ("src", "benchmarks", "tools") for p in (ROOT / folder).rglob("*.py")]
    named = {name: page for page in (*PAGES, *scripts) for name in NAMED.findall(page.read_text())}
    assert "tests/kernels/cpu/test_cpu.py" in named
    assert not [(name, page) for name, page in named.items() if not (ROOT / name).exists()]


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


@cache
def help_of(module: str) -> set[str]:
    """The options that a script's --help shows. module: as `python -m` takes it."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as shown:
        patch.setenv("OMP_WAIT_POLICY", "passive")  # cpu.py sets it
        patch.setattr(sys, "argv", [module, "--help"])
        try:
            with pytest.raises(SystemExit, match=r"^0$"):
                runpy.run_module(module, run_name="__main__")
        except ModuleNotFoundError as e:
            pytest.skip(f"{module} needs {e.name}")
    return options(shown.getvalue().split())


def options(words: list[str]) -> set[str]:
    # Words with spaces were quoted: they are what an option takes.
    return {word.partition("=")[0] for word in words if re.fullmatch(r"--?[a-z]\S*", word)}


@each_page
def test_commands_exist_with_their_options(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in code(page):
        match [word for word in words if word != "python"]:
            case ["trilobite", name, *rest] if name.islower() and name.isalpha():
                assert name in group.commands, words
                known = {opt for parameter in group.commands[name].params for opt in parameter.opts}
                assert options(rest) <= known, words
            case ["make", target, *_]:
                assert target in targets, words
            case ["-m", module, *rest] if module.startswith(("benchmarks.", "tools.")):
                assert options(rest) <= help_of(module), words
            case [script, *rest] if re.fullmatch(r"(docs|examples)/\w+\.py", script):
                assert (ROOT / script).exists(), words
                assert not options(rest) or options(rest) <= help_of(script[:-3].replace("/", ".")), words
