"""What an expert with few tokens is given besides its own, and Hessians that are of no use."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import HIDDEN, INTERMEDIATE, build_checkpoint
from support.calibrating import CONTEXT, SAMPLES, add_tokenizer, calibration, run, words
from torch import Tensor

from trilobite.checkpoint.source import open_source
from trilobite.errors import CalibrationError
from trilobite.quantize.calibrate import routed as module
from trilobite.quantize.calibrate.model import BlockModel
from trilobite.quantize.calibrate.routed import Routed
from trilobite.quantize.run.compress import prepare
from trilobite.recipe import Recipe, Rule, load_recipe, parse_format

TOKENS = 1500


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    path = tmp_path / "mixtral"
    build_checkpoint("mixtral", path)
    add_tokenizer(path)
    (path / "words.txt").write_text(words(SAMPLES * CONTEXT))
    return path


def test_the_average_does_not_depend_on_what_is_wanted(mixtral: Path) -> None:
    """A resumed run wants less than the one before it, and has to end with the same bytes."""
    source = open_source(str(mixtral))
    plan = prepare(source, load_recipe("gptq3"))
    model = BlockModel(source, [line.matrix for line in plan.lines], torch.device("cpu"))
    model.load(model.blocks[0])
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(TOKENS, HIDDEN, generator=generator)
    index = torch.randint(3, (TOKENS, 2), generator=generator)
    index[:5, 0] = 3
    of_expert = [line for line in plan.lines if line.matrix.layer == 0 and line.matrix.expert == 3]
    averages: list[dict[str, Tensor | None]] = []
    for projections in (("gate", "up", "down"), ("gate", "up"), ("down",)):
        routed = Routed(model, f"{model.blocks[0]}.mlp.experts", lambda k, t: torch.empty(TOKENS, k, dtype=t))
        routed.put(states, index)
        routed.finish({3: [line for line in of_expert if line.matrix.projection in projections]})
        averages.append(routed.average)
    for side, k, alone in (("in", HIDDEN, averages[1]), ("mid", INTERMEDIATE, averages[2])):
        whole, part = averages[0][side], alone[side]
        assert whole is not None
        assert part is not None
        assert whole.shape == (k, k)
        assert torch.equal(whole, part)
    assert averages[1]["mid"] is None


def test_a_linear_whose_hessian_overflows_is_named(mixtral: Path, tmp_path: Path) -> None:
    """Huge values that the output projection makes small again: the block's output is finite."""
    tensors = load_file(mixtral / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1e25
    tensors["model.layers.1.self_attn.o_proj.weight"] *= 1e-25
    save_file(tensors, mixtral / "model.safetensors", {"format": "pt"})
    rule = Rule(names="*.o_proj.weight", format=parse_format("int3-g64"), method="gptq")
    ground = calibration(mixtral / "words.txt", propagate="original")
    with pytest.raises(
        CalibrationError, match=r"layers\.1\.self_attn\.o_proj\.weight: the Hessian holds NaN"
    ):
        run(mixtral, tmp_path / "dst", ground, Recipe(name="o", rules=(rule,)))


def test_an_expert_whose_hessian_overflows_is_named(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "intermediate", lambda _, e, x: torch.full((len(x), INTERMEDIATE), torch.inf))
    with pytest.raises(CalibrationError, match=r"layers\.0\.\S*experts\S*: the Hessian holds NaN"):
        run(mixtral, tmp_path / "dst", calibration(mixtral / "words.txt"))
