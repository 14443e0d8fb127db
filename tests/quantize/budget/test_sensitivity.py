"""What errors in one part of a model cost: against the whole model, run at once with these errors in it."""

from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint
from support.calibrating import add_tokenizer, words
from transformers import AutoModelForCausalLM

from trilobite.checkpoint.source import open_source
from trilobite.errors import CalibrationError
from trilobite.formats.weight import dequantize
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.calibrate.windows import Calibration, draw_windows
from trilobite.quantize.methods.registry import METHODS
from trilobite.quantize.run import planned, sensitivity
from trilobite.quantize.run.sensitivity import PROBE, measure_sensitivity


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sensitivity") / "mixtral"
    build_checkpoint("mixtral", path, dtype=torch.float32)
    add_tokenizer(path)
    (path.parent / "text.txt").write_text(words(1000))
    return path


def test_as_the_whole_model_with_one_part_rounded(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without column scales, and all columns alike, so that rounding is `search` alone."""
    calibration = Calibration(text=original.parent / "text.txt", samples=6, context=32, propagate="original")
    source = open_source(str(original))
    monkeypatch.setattr(planned, "find_streams", lambda *_: [])
    monkeypatch.setattr(sensitivity, "of_columns", lambda *_: torch.ones(64))
    found = measure_sensitivity(source, tokens=96, calibration=calibration)
    row = next(r for r in found["measured"] if (r["layer"], r["part"]) == ("1", "q, k, v"))

    ids = draw_windows(source, calibration).ids[:3]
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(ids).logits.log_softmax(-1)
        for name in ("q_proj", "k_proj", "v_proj"):
            w = model.get_submodule(f"model.layers.1.self_attn.{name}").weight
            w.copy_(dequantize(METHODS["search"](w.detach().clone(), PROBE, hessian=torch.ones(64)).weight))
        got = model(ids).logits.log_softmax(-1)
    kl = float((wanted.exp() * (wanted - got)).sum(-1).mean())
    assert kl > 1e-7
    assert row["kl"] == pytest.approx(kl, rel=1e-3)
    assert found["tokens"] == 96


def test_every_part_is_measured_and_understood_by_the_planner(original: Path) -> None:
    source = open_source(str(original))
    found = measure_sensitivity(source, tokens=64)
    parts = ["attention: q, k, v", "attention: o", "expert: gate, up", "expert: down"]
    assert list(found["sensitivities"]) == [f"{layer} {part}" for layer in (0, 1) for part in parts]
    choice = planned.plan_within(source, Budget(bits=3.3, sensitivities=found["sensitivities"]))
    used = {f"{r['layer']} {r['role']}: {r['part']}": r["sensitivity"] for r in choice.account["choices"]}
    assert used == pytest.approx(found["sensitivities"])


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    build_checkpoint("nllb-moe", tmp_path / "nllb")
    with pytest.raises(CalibrationError, match="measured of decoder-only models"):
        measure_sensitivity(open_source(str(tmp_path / "nllb")))
