"""The scripts that measure translation run to their last line of JSON, on tiny inputs."""

import json
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.translators import build, nllb, save, switch

from benchmarks.lib import dense_ctranslate2
from benchmarks.lib.translating import counted, decoder_experts, routed_like, spread_batches
from benchmarks.quality import translation
from benchmarks.speed import translate
from trilobite.recipe import PRESETS

SOURCES = ["a cat", "the dog", "two dogs run", "x", "cats and dogs", "b c"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Run the `main` of a script on a tiny model; returns what it printed, and the object of its last line."""
    model, pairs = save(tmp_path / "model", partial(switch, 2)), tmp_path / "pairs"
    pairs.write_text("\n".join(SOURCES) + "\n")

    def call(script: Any, *arguments: object) -> tuple[str, Any]:
        work = ["--work", tmp_path / "work", "--pairs", pairs, pairs]
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, [model, *arguments, *work])])
        script.main()
        out = capsys.readouterr().out
        return out, json.loads(out.splitlines()[-1])

    return call


@pytest.mark.long
def test_speed(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translate, "installed", lambda: False)  # has a test of its own
    options = ("--batches", 1, 3, "--beams", 1, 2, "--sentences", 3, "--rounds", 1, "--recipes", "int4")
    out, found = run(translate, *options, "--price", 2)
    assert list(found["cells"])[:2] == ["transformers fp32", "transformers bf16"]
    assert all(100e6 < found["peak"][name] < 4e9 for name in found["cells"])
    assert "peak, MB" in out
    assert {len(cells) for cells in found["cells"].values()} == {4}
    whole, pruned, masked = (
        [tokens for _, tokens, _ in found["cells"][f"int4{s}"]] for s in translate.PRUNINGS
    )
    assert whole == pruned == masked
    best = max(tokens / seconds for seconds, tokens, _ in found["cells"]["int4"])
    assert f"{2 / (best * 3600) * 1e6:.4f}" in out
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps(found))
    again, _ = run(translate, "--price", 2, "--from", measured)
    assert f"{2 / (best * 3600) * 1e6:.4f}" in again


def test_without_ctranslate2(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    found = translate.Found()
    monkeypatch.setattr(translate, "installed", lambda: False)
    translate.Bench.ctranslate2(None, found, said.append)  # type: ignore[arg-type]
    assert said == ["ctranslate2: is not installed, left out (pip install ctranslate2)"]
    assert not found.cells


@pytest.mark.skipif(not dense_ctranslate2.installed(), reason="ctranslate2 is not installed")
def test_a_dense_model_in_ctranslate2(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs"
    pairs.write_text("\n".join(SOURCES) + "\n")
    options = Namespace(batches=[1, 3], beams=[2], sentences=3, rounds=1, pairs=[pairs, pairs], work=tmp_path)
    options.model = save(tmp_path / "model", partial(switch, 2))
    found = translate.Found()
    translate.Bench(options).ctranslate2(found, lambda _: None)
    for name in ("CTranslate2, dense, fp32", "CTranslate2, dense, int8"):
        assert [count for *_, count in found.cells[name]] == [3, 3]


def test_quality(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("int8-experts", "gptq3")
    monkeypatch.setattr(translation, "recipes", lambda: {name: PRESETS[name] for name in names})
    pairs = tmp_path / "pairs"
    out, found = run(translation, "--beams", 1, 2, "--calibration", pairs, pairs)
    assert list(found) == ["16 bit", *names]
    assert found["int8-experts"]["bytes"] < found["16 bit"]["bytes"]
    assert "chrF" in out


def test_batches_spread_over_the_lengths() -> None:
    lengths = list(range(100))
    assert [lengths[b[0]] for b in spread_batches(lengths, 10, 30)] == [89, 49, 19]
    assert len(spread_batches(lengths, 1, 7)) == 7


def test_experts_are_drawn_by_shares() -> None:
    model = build(nllb)
    ids = torch.randint(3, 50, (8, 9))
    with counted(model) as counts, routed_like(model, torch.tensor([1, 0])):
        model(input_ids=ids, decoder_input_ids=ids)
    # hooks run in the order in which they came: these counts are of the model's own choice
    assert int(counts.sum()) == 2 * ids.numel() * len(decoder_experts(model))
    with routed_like(model, torch.tensor([1, 0])), counted(model) as counts:
        model(input_ids=ids, decoder_input_ids=ids)
    assert counts[:2].sum() > 100 * counts[2:].sum()
