"""Formats under super-scales through plan, files, checks and a model that streams its experts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import build_checkpoint
from transformers import AutoModelForCausalLM

from trilobite.checkpoint.source import open_source
from trilobite.checkpoint.verify import verify
from trilobite.errors import TrilobiteError
from trilobite.quantize.plan.report import account
from trilobite.quantize.run.compress import compress, prepare
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load

NAMES = ("super2", "super3", "super4")
IDS = torch.arange(2, 34)[None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("super")
    build_checkpoint("mixtral", folder / "original", dtype=torch.bfloat16)
    for name in NAMES:
        compress(
            str(folder / "original"), folder / name, load_recipe(name), options=Options(jobs=1, device="cpu")
        )
    return {name: folder / name for name in (*NAMES, "original")}


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_counts_every_byte(made: dict[str, Path], name: str) -> None:
    plan = prepare(open_source(str(made["original"])), load_recipe(name))
    stored = open_source(str(made[name])).tensors
    for line in plan.lines:
        assert line.nbytes == sum(stored[t.name].nbytes for t in line.stored)
    packed = [line for line in plan.lines if "super" in str(line.format)]
    assert packed
    for line in packed:
        n, k = line.matrix.shape
        assert f"{line.matrix.name}_scale" in stored
        fmt = line.format
        bits = fmt.bits + 8 / fmt.group + 16 * -(-k // 256) / k
        assert line.nbytes * 8 == -(-n // 16) * 16 * k * bits


def test_where_the_bits_go(made: dict[str, Path]) -> None:
    plan = prepare(open_source(str(made["original"])), load_recipe("super3"))
    rows = [
        {
            "role": m.matrix.role.value,
            "format": str(m.format),
            "shape": m.matrix.shape,
            "bytes": m.nbytes,
            "rank": 0,
        }
        for m in plan.lines
        if "super" in str(m.format)
    ]
    for entry in account(rows):
        assert entry.bits["codes"] == 3
        assert 0.5 < entry.bits["scales"] <= 0.5 + 16 / 32 + 1e-9  # these matrices have K of 32 to 256
        assert entry.bits["signs"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_model_says_what_its_dequantized_weights_say(made: dict[str, Path], name: str) -> None:
    assert not [checked for checked in verify(open_source(str(made[name]))) if checked.damage]
    model = load(str(made[name]), dtype=torch.float32)
    with torch.no_grad():
        found = model(IDS).logits
        expected = model.dequantize()(IDS).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_a_lost_super_scale_is_found(made: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in made["super3"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    lost = next(name for name in tensors if name.endswith("q_proj.weight_scale"))
    del tensors[lost]
    save_file(tensors, weights, {"format": "pt"})
    weights.rename(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    found = {checked.name: checked.damage for checked in verify(open_source(str(folder))) if checked.damage}
    assert found == {lost: "is missing"}
    # Its tiles are as large as those of another format.
    for loaded in (load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(TrilobiteError, match=f"'{lost}' of trilobite.json is missing"):
            loaded(str(folder))
