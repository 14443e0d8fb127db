"""report, inspect --plot, eval --save: files that are written, and what is refused before anything is."""

import json
import shutil
import webbrowser
from pathlib import Path

import pytest
from support.commands import Run

from trilobite.checkpoint.evaluation import EVALUATION
from trilobite.quantize.run.card import CARD
from trilobite.report import svg

pytest.importorskip("matplotlib")


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "copy"))


def test_report(run: Run, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    page = tmp_path / "page.html"
    done = run("report", packed, "-o", page)
    assert done.status == 0, done.err
    assert done.out.startswith(f"written to {page}")
    assert page.read_text().startswith("<!doctype html>")
    assert opened == []
    assert run("report", packed, packed, "-o", page, "--open").status == 0
    assert opened == [page.as_uri()]
    assert "2 checkpoints" in page.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("{packed}", "-o", "{tmp}/no/page.html"), "there is no folder"),
        (("{original}", "-o", "{tmp}/page.html"), "no trilobite.json"),
        (("{tmp}", "-o", "{tmp}/page.html"), "no trilobite.json"),
    ],
)
def test_report_refuses(
    run: Run, packed: Path, original: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    refused = run("report", *(o.format(packed=packed, original=original, tmp=tmp_path) for o in options))
    assert refused.status == 1
    assert message in refused.err
    assert refused.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_it_says_what_to_install(
    run: Run, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(svg.importlib.util, "find_spec", lambda name: None)
    refused = run("report", packed, "-o", tmp_path / "page.html")
    assert (refused.status, refused.err) == (
        1,
        "error: figures need matplotlib: pip install 'trilobite[plot]'\n",
    )


def test_inspect_plot(run: Run, packed: Path, original: Path, tmp_path: Path) -> None:
    done = run("inspect", packed, "--plot", tmp_path / "packed.png", "--json")
    assert done.json["kind"] == "packed"  # the note is on standard error
    assert (tmp_path / "packed.png").read_bytes().startswith(b"\x89PNG")
    assert run("inspect", original, "--samples", 1, "--plot", tmp_path / "original.svg").status == 0
    assert b"excess kurtosis" in (tmp_path / "original.svg").read_bytes()
    refused = run("inspect", packed, "--plot", tmp_path / "packed.pdf")
    assert refused.status == 1
    assert ".png or .svg" in refused.err


def test_eval_save(run: Run, copy: Path, original: Path, text: Path, tmp_path: Path) -> None:
    command = ("eval", copy, "--text", text, "--context", 64, "--reference", original, "--json")
    measured = run(*command).json
    assert not (copy / EVALUATION).exists()
    done = run(*command, "--save")
    assert f"kept in {copy / EVALUATION}" in done.err
    (kept,) = json.loads((copy / EVALUATION).read_text())["measured"]
    assert kept["kl"] == pytest.approx(measured["kl"])
    assert (kept["text"], kept["reference"], kept["device"]) == (text.name, "original", "cpu")
    assert str(tmp_path) not in (copy / EVALUATION).read_text()
    assert f"{kept['perplexity']:.4f}" in (copy / CARD).read_text()
    (copy / CARD).write_text("mine")
    assert "stays as it is" in run(*command, "--save").err
    assert (copy / CARD).read_text() == "mine"
    assert len(json.loads((copy / EVALUATION).read_text())["measured"]) == 1
    assert run("report", copy, "-o", tmp_path / "page.html").status == 0
    assert f"{kept['kl']:.5f}" in (tmp_path / "page.html").read_text()


def test_eval_save_wants_a_folder(run: Run, text: Path) -> None:
    refused = run("eval", "somebody/model", "--text", text, "--save")
    assert refused.status == 1
    assert "not a checkpoint's folder" in refused.err
