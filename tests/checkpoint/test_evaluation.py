"""What `eval --save` keeps: one entry for each measurement, whole at any moment, of a known version."""

import json
import math
from pathlib import Path

import pytest

from trilobite.checkpoint.evaluation import EVALUATION, read_evaluations, save_evaluation
from trilobite.errors import CheckpointError, DestinationError, FormatVersionError

WIKI = {"text": "wiki.txt", "context": 128, "windows": 3, "perplexity": 7.5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_nothing_is_kept_at_first(folder: Path) -> None:
    assert read_evaluations(folder) == []


def test_the_same_measurement_replaces_the_older_one(folder: Path) -> None:
    save_evaluation(folder, WIKI)
    save_evaluation(folder, {**WIKI, "context": 256})
    save_evaluation(folder, {**WIKI, "perplexity": 7.0})
    assert [(e["context"], e["perplexity"]) for e in read_evaluations(folder)] == [(256, 7.5), (128, 7.0)]


def test_tasks_are_told_apart_by_their_names(folder: Path) -> None:
    for tasks in ({"piqa": {"acc": 0.5}}, {"mmlu": {"acc": 0.3}}, {"piqa": {"acc": 0.6}}):
        save_evaluation(folder, {"tasks": tasks})
    assert [e["tasks"] for e in read_evaluations(folder)] == [{"mmlu": {"acc": 0.3}}, {"piqa": {"acc": 0.6}}]


def test_numbers_that_are_not_finite_become_null(folder: Path) -> None:
    save_evaluation(folder, {**WIKI, "perplexity": math.inf, "tasks": {"piqa": {"acc": math.nan}}})
    text = (folder / EVALUATION).read_text()
    assert "Infinity" not in text
    assert "NaN" not in text
    (kept,) = read_evaluations(folder)
    assert kept["perplexity"] is None
    assert kept["tasks"]["piqa"]["acc"] is None


def test_a_later_version_is_refused_and_stays(folder: Path) -> None:
    document = {"kind": "trilobite evaluation", "version": 2, "measured": []}
    (folder / EVALUATION).write_text(json.dumps(document))
    with pytest.raises(FormatVersionError, match="version 2, this release reads 1"):
        save_evaluation(folder, WIKI)
    assert json.loads((folder / EVALUATION).read_text()) == document


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "trilobite evaluation", "version": 1, "measured": [3]}']
)
def test_a_damaged_file_is_named(folder: Path, text: str) -> None:
    (folder / EVALUATION).write_text(text)
    with pytest.raises(CheckpointError, match=EVALUATION):
        read_evaluations(folder)


def test_only_beside_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DestinationError, match="not a checkpoint's folder"):
        save_evaluation(tmp_path, WIKI)
    assert not (tmp_path / EVALUATION).exists()
