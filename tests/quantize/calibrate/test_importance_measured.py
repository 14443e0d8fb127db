"""What enters each column, measured on a text of ours or of the user's; runs that are cut off; refusals."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import build_checkpoint
from support.calibrating import CONTEXT, SAMPLES, SERIAL, add_tokenizer, calibration, words
from support.runs import PlugPulled, digests
from torch import Tensor
from transformers import AutoModelForCausalLM

import trilobite
from trilobite.checkpoint.packed import PackedWriter, read_report
from trilobite.errors import CalibrationError, RecipeError
from trilobite.quantize.calibrate.protocols import Records
from trilobite.quantize.calibrate.store import HessianStore
from trilobite.quantize.plan.plan import PlanLine
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.executor import Threads
from trilobite.quantize.run.options import Options
from trilobite.recipe import Recipe, load_recipe


def weighed(name: str = "search3", importance: str = "builtin", **changes: object) -> Recipe:
    return replace(load_recipe(name), importance=importance, **changes)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "mixtral"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16)
    add_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(words(SAMPLES * CONTEXT))
    return path


@pytest.fixture(scope="module")
def finished(mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dst = tmp_path_factory.mktemp("finished") / "packed"
    compress(str(mixtral), dst, weighed(), options=SERIAL)
    return dst


def test_importance_is_the_diagonal_of_the_hessian(
    mixtral: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of linears and of experts, each expert's own; of nothing but a diagonal is there more than K numbers."""
    monkeypatch.setattr("trilobite.quantize.methods.hessian.ENOUGH", 1e-9)
    monkeypatch.setattr("trilobite.quantize.methods.hessian.DIAGONAL_ENOUGH", 1e-9)
    seen: dict[str, Tensor] = {}
    pack = Threads.pack

    def spy(self: Threads, lines: Sequence[PlanLine], known: Any = None) -> Records:
        if known is not None:
            seen.update((line.matrix.name, known[0]) for line in lines)
        return pack(self, lines, known)

    monkeypatch.setattr(Threads, "pack", spy)
    ground = calibration(text, propagate="original")
    compress(str(mixtral), tmp_path / "a", weighed(importance="text"), calibration=ground, options=SERIAL)
    diagonals = dict(seen)
    assert {h.dim() for h in diagonals.values()} == {1}
    kept = calibration(text, propagate="original", save=tmp_path / "h")
    compress(str(mixtral), tmp_path / "b", load_recipe("gptq3"), calibration=kept, options=SERIAL)
    store = HessianStore(tmp_path / "h", source=_fingerprint(mixtral), calibration=None)
    assert len(diagonals) == 2 * (4 + 3 * 4)
    for name, h in diagonals.items():
        full, _ = store.get(name, len(h))
        assert torch.allclose(full.diagonal(), h, rtol=1e-4), name


def _fingerprint(path: Path) -> str:
    return trilobite.checkpoint.source.open_source(str(path)).fingerprint()


def test_the_text_that_comes_with_us(finished: Path) -> None:
    """Every matrix of the body, not the head in 8 bits, is weighed; the report says by what."""
    rows = [row for row in read_report(finished)["tensors"] if "format" in row]
    weighed_rows = {row["name"]: row for row in rows if row.get("importance") == "builtin"}
    assert {row["role"] for row in weighed_rows.values()} == {"attention", "expert"}
    assert {row["name"] for row in rows} - set(weighed_rows) == {"lm_head.weight"}
    assert all(row["proxy"] > 0 for row in weighed_rows.values())
    attention = [row for row in weighed_rows.values() if row["role"] == "attention"]
    assert min(row["tokens"] for row in attention) > 500


@pytest.mark.parametrize("jobs", [1, 2])
def test_resumed_to_the_same_bytes(
    jobs: int, finished: Path, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, write, count = Options(jobs=jobs, device="cpu"), PackedWriter.write, []

    def stop(self: PackedWriter, *args: object) -> None:
        if len(count) >= 25:
            raise PlugPulled
        count.append(1)
        write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PackedWriter, "write", stop)
        with pytest.raises(PlugPulled):
            compress(str(mixtral), tmp_path / "dst", weighed(), options=options)
    result = compress(str(mixtral), tmp_path / "dst", weighed(), options=options)
    assert 0 < result.fresh < len(result.plan.lines)
    assert digests(tmp_path / "dst") == digests(finished)


def test_with_compensators_column_scales_and_kept_hessians(mixtral: Path, text: Path, tmp_path: Path) -> None:
    """One folder of Hessians serves gptq and importance, whose part of them is the diagonal."""
    recipe = weighed("milo-s1", "text", rank="uniform-2", iterations=2, columns="sinkhorn")
    ground = calibration(text, propagate="original", save=tmp_path / "h")
    compress(str(mixtral), tmp_path / "a", recipe, calibration=ground, options=SERIAL)
    again = calibration(None, propagate="original", hessians=tmp_path / "h")
    compress(str(mixtral), tmp_path / "b", recipe, calibration=again, options=SERIAL)
    names = [p.name for p in (tmp_path / "a").glob("*.safetensors")]
    assert names
    assert all((tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names)
    ids = torch.arange(20)[None]
    assert bool(torch.isfinite(trilobite.load(str(tmp_path / "a"))(input_ids=ids).logits).all())


def test_refusals(mixtral: Path, text: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    with pytest.raises(RecipeError, match="needs a text to calibrate on; pass --calibration"):
        compress(str(mixtral), dst, weighed(importance="text"), options=SERIAL)
    with pytest.raises(RecipeError, match=r"takes no text of yours.*importance text with --calibration"):
        compress(str(mixtral), dst, weighed(), calibration=calibration(text), options=SERIAL)
    with pytest.raises(RecipeError, match="which from_pretrained cannot do"):
        AutoModelForCausalLM.from_pretrained(
            mixtral, quantization_config=trilobite.TrilobiteConfig(weighed().to_dict())
        )
    build_checkpoint("switch_transformers", tmp_path / "pairs", dtype=torch.bfloat16)
    with pytest.raises(RecipeError, match="is for decoder-only models"):
        compress(str(tmp_path / "pairs"), dst, weighed(), options=SERIAL)
    build_checkpoint("mixtral", tmp_path / "mute", dtype=torch.bfloat16)
    with pytest.raises(CalibrationError, match="tokenizer"):
        compress(str(tmp_path / "mute"), dst, weighed(), options=SERIAL)
    assert not dst.exists()
