"""Budgets on the command line: what is shown, and what is refused."""

import json
from pathlib import Path

import pytest
from support.commands import Run

from trilobite.checkpoint.packed import read_report
from trilobite.checkpoint.source import open_source
from trilobite.errors import ArchitectureError
from trilobite.quantize.calibrate import model, sampled
from trilobite.quantize.run import planned


def test_plan_says_why(run: Run, original: Path) -> None:
    done = run("plan", original, "--bits", 3.4, "--importance", "none")
    assert done.status == 0, done.err
    for expected in ("gate, up", "next better", "Predicted loss", "recipe bits-3.4", "--method gptq feeds"):
        assert expected in done.out
    made = run("plan", original, "--bits", 3.4, "--importance", "none", "--json").json
    assert made["recipe"]["name"] == made["planner"]["budget"]["goal"] == "bits-3.4"
    chosen = {row["format"] for row in made["planner"]["choices"]}
    assert chosen == {row["format"] for row in made["tensors"] if row["role"] in ("attention", "expert")}


@pytest.mark.parametrize(
    ("options", "told"), [((2.6,), True), ((2.6, "--lattice"), False), ((2.2,), False), ((3.4,), False)]
)
def test_few_bits_are_told_of_lattices(
    run: Run, original: Path, options: tuple[object, ...], told: bool
) -> None:
    """But not where they were taken unasked, as fewer bits cannot be had without."""
    done = run("plan", original, "--importance", "none", "--bits", *options)
    assert ("--lattice mostly loses less" in done.out) is told


def test_compress_to_a_size_with_what_was_measured(run: Run, original: Path, tmp_path: Path) -> None:
    assert run("sensitivity", original, "--tokens", 64, "-o", tmp_path / "s.json").status == 0
    assert len(json.loads((tmp_path / "s.json").read_text())["sensitivities"]) == 8
    wide = run("compress", original, tmp_path / "wide", "-r", "int8", "--json").json["bytes_on_disk"]
    options = "--size", wide, "--sensitivity", tmp_path / "s.json", "--method", "search"
    done = run("compress", original, tmp_path / "out", *options)
    assert done.status == 0, done.err
    assert "What the planner chose" in done.out
    assert sum(p.stat().st_size for p in (tmp_path / "out").iterdir()) <= wide


def test_small_models_have_errors_fed_back(
    run: Run, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is said; larger ones have not, nor where a method, an importance or compensators are asked for."""
    monkeypatch.setattr(sampled, "FOR_HESSIANS", 4)
    monkeypatch.setattr(sampled, "LENGTH", 24)
    done = run("compress", original, tmp_path / "out", "--bits", 3.4)
    assert done.status == 0, done.err
    assert "errors are fed back (--method gptq)" in done.err
    assert {row["method"] for row in read_report(tmp_path / "out")["tensors"] if "proxy" in row} == {"gptq"}
    again = run("compress", original, tmp_path / "out", "--bits", 3.4)
    assert "already complete" in again.err
    for options in (("--method", "search"), ("--importance", "none"), ("--ranks", "2")):
        found = run("plan", original, "--bits", 3.4, *options, "--json")
        assert found.json["planner"]["budget"]["method"] == "search"
        assert found.err == ""
    monkeypatch.setattr(planned, "AFFORDABLE", 1000)
    assert run("plan", original, "--bits", 3.4, "--json").json["planner"]["budget"]["method"] == "search"


def test_what_cannot_be_run_block_by_block_is_searched(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(str(original))
    assert planned.usual_method(source) == "gptq"

    def no_stack(*_: object) -> None:
        raise ArchitectureError("is not a stack of decoder blocks")

    monkeypatch.setattr(model.BlockModel, "__init__", no_stack)
    assert planned.usual_method(source) == "search"


def test_fit_leaves_room_for_the_context(run: Run, original: Path) -> None:
    """Keys and values of a longer context leave fewer bytes to weights."""
    rooms = [
        run("plan", original, "--fit", "8GiB", "--context", n, "--importance", "none", "--json").json[
            "planner"
        ]["budget"]["reserved"]
        for n in (16, 64)
    ]
    # Two layers, keys and values of two heads of 16, two bytes each.
    assert rooms[1] - rooms[0] >= 48 * 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--bits", 0.2), "0.2 bits: the least that is possible is "),
        (("--bits", 30), "30 bits: the least that is possible is "),
        (("--size", "1kB"), "the least that is possible is"),
        (("--fit", "1MiB"), "the least that is possible is"),
        (("--bits", 3, "--sensitivity", "absent.json"), "absent.json: cannot be read"),
        (("--bits", 3, "--method", "hqq"), "method 'hqq': a budget goes with search or gptq"),
        (("--bits", 3, "--importance", "some"), "importance 'some'; expected auto, or one of none, weights"),
        (("--bits", 3, "--columns", "some"), "columns 'some'; expected auto, or one of none, sinkhorn"),
    ],
)
@pytest.mark.parametrize("importance", [(), ("--importance", "none")], ids=["default", "none"])
def test_impossible_budgets_are_one_line(
    run: Run, original: Path, arguments: tuple[object, ...], said: str, importance: tuple[str, ...]
) -> None:
    done = run("plan", original, *importance, *arguments)
    assert done.status == 1
    assert done.err.strip().startswith("error: ")
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert done.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--recipe, --bits, --size and --fit"),
        (("-r", "rtn3", "--bits", 3), "--recipe, --bits, --size and --fit"),
        (("--bits", 3, "--size", "1GB"), "--recipe, --bits, --size and --fit"),
        (("--bits", 3, "--group-size", 32), "--group-size goes with --recipe"),
        (("-r", "rtn3", "--per-expert"), "--per-expert goes with"),
    ],
)
def test_wrong_usage(run: Run, original: Path, arguments: tuple[object, ...], said: str) -> None:
    done = run("plan", original, *arguments)
    assert done.status == 2
    assert said in " ".join(done.err.split())
