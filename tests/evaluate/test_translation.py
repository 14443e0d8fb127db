"""BLEU and chrF of a model's translations, and of the original's."""

import json
import sys
from pathlib import Path

import pytest
from support.translators import build, save, switch, tokenizer

from trilobite import cli
from trilobite.checkpoint.evaluation import read_evaluations
from trilobite.errors import EvaluationError, MissingExtraError
from trilobite.evaluate.forced import forced_score
from trilobite.evaluate.translation import corpus_scores, score_forced, score_translations
from trilobite.models.pairs import read_parallel
from trilobite.runtime.translate.translator import Search, Translator

SOURCES = ["a cat", "the dog", "", "two dogs run"]


def test_a_model_is_perfect_by_its_own_translations() -> None:
    translator = Translator(build(switch, 3), tokenizer(), search=Search(beams=2, batch=2))
    own = [translation.texts[0] for translation in translator.translate(SOURCES)]
    assert any(own)
    seen: list[tuple[int, int]] = []
    score = score_translations(translator, SOURCES, own, progress=lambda *done: seen.append(done))
    assert score.chrf == pytest.approx(100)
    assert score.sentences == 4
    assert seen[-1] == (4, 4)
    worse = score_translations(translator, SOURCES, ["no"] * 4)
    assert worse.chrf < score.chrf


def test_the_distance_to_an_original_is_that_on_the_given_translations() -> None:
    translator = Translator(build(switch, 3), tokenizer(), search=Search(beams=1, batch=2))
    found = score_forced(translator, SOURCES, ["die kat", "", "x", "zwei"], build(switch, 4))
    ids = tokenizer()
    pairs = [
        (ids(a).input_ids, ids(b).input_ids) for a, b in [("a cat", "die kat"), ("two dogs run", "zwei")]
    ]
    wanted = forced_score(translator.model, pairs, batch=1, reference=build(switch, 4))
    assert (found.sentences, found.tokens) == (2, sum(len(b) for _, b in pairs))
    assert found.kl == pytest.approx(wanted.kl, rel=1e-4)
    assert score_forced(translator, SOURCES, ["a"] * 4, translator.model).kl == pytest.approx(0, abs=1e-9)


def test_scores_are_sacrebleus() -> None:
    bleu, chrf = corpus_scores(["A dog runs on the grass ."], ["A dog runs over the grass ."])
    # 6 of 7 words, 4 of 6 pairs, 2 of 5 triples; none of 4 fours, which sacrebleu smooths to 1/8
    assert bleu == pytest.approx(100 * (6 / 7 * 4 / 6 * 2 / 5 * 1 / 8) ** 0.25)
    assert 50 < chrf < 100


def test_files_that_are_no_pair(tmp_path: Path) -> None:
    one, two, bad = tmp_path / "one", tmp_path / "two", tmp_path / "bad"
    one.write_bytes(b"a\r\nb\r\n")
    two.write_bytes(b"a\n")
    bad.write_bytes(b"a\n\xff\n")
    assert read_parallel(one, one, EvaluationError) == (["a", "b"], ["a", "b"])
    with pytest.raises(EvaluationError, match=r"one has 2 lines, .*two has 1"):
        read_parallel(one, two, EvaluationError)
    with pytest.raises(EvaluationError, match="bad: line 2: not UTF-8"):
        read_parallel(one, bad, EvaluationError)
    with pytest.raises(EvaluationError, match="cannot be read"):
        read_parallel(one, tmp_path / "none", EvaluationError)


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["trilobite", "eval", *map(str, args)])
    status: object = 0
    try:
        cli.main()
    except SystemExit as e:
        status = e.code or 0
    captured = capsys.readouterr()
    return int(str(status)), captured.out, captured.err


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save(tmp_path / "model")
    source = tmp_path / "source"
    source.write_text("\n".join(SOURCES) + "\n")
    args = [model, "--translation", source, source, "--beams", 2, "--reference", model]
    status, out, err = run(monkeypatch, capsys, *args, "--json")
    assert status == 0, err
    found = json.loads(out)["translation"]
    assert found["bleu"] == found["reference_bleu"]
    assert found["sentences"] == 4
    assert (found["kl"], found["top1"]) == (pytest.approx(0, abs=1e-9), 1)
    status, out, _ = run(monkeypatch, capsys, *args)
    assert "+0.00" in out
    assert "KL divergence to the reference" in out
    for beams in (2, 1, 2):
        assert run(monkeypatch, capsys, *args, "--beams", beams, "--save")[0] == 0
    assert [entry["translation"]["beams"] for entry in read_evaluations(model)] == [1, 2]
    status, _, err = run(monkeypatch, capsys, model, "--to", "de", "--text", source)
    assert status == 2
    assert "--to goes with --translation" in err
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    status, _, err = run(monkeypatch, capsys, *args)
    assert status == 1
    assert "pip install 'trilobite[eval]'" in err
    with pytest.raises(MissingExtraError):
        corpus_scores(["a"], ["a"])
