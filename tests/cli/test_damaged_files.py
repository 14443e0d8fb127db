"""Damaged and odd JSON beside the weights: one line and status 1, from every command that reads it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import build_checkpoint

import trilobite
from trilobite import cli
from trilobite.errors import TrilobiteError
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damaged") / "original"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16)
    return path


@pytest.fixture(scope="module")
def packed(original: Path) -> Path:
    compress(str(original), original.parent / "packed", load_recipe("rtn3"))
    return original.parent / "packed"


@pytest.fixture
def restored(original: Path, packed: Path) -> Any:
    files = [original / "config.json", packed / "trilobite.json"]
    before = [f.read_bytes() for f in files]
    yield
    for file, data in zip(files, before, strict=True):
        file.write_bytes(data)


def drop(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda report: report.pop(key)


@pytest.mark.parametrize(
    "damage",
    [
        drop("tensors"),
        drop("identity"),
        drop("rank"),
        lambda r: r.update(tensors=5),
        lambda r: r.update(tensors=["x"]),
        lambda r: r["tensors"][0].pop("bytes"),
        lambda r: r["tensors"][0].update(role="poem"),
        lambda r: r["tensors"][3].update(shape="x"),
        lambda r: r["tensors"][3].update(format="int9"),
        lambda r: r["tensors"][3].update(format=[]),
        lambda r: r["identity"].update(recipe="x"),
    ],
)
@pytest.mark.usefixtures("restored")
def test_inspect_of_a_damaged_report(
    packed: Path,
    damage: Callable[[dict[str, Any]], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = json.loads((packed / "trilobite.json").read_text())
    damage(report)
    (packed / "trilobite.json").write_text(json.dumps(report))
    monkeypatch.setattr(sys, "argv", ["trilobite", "inspect", str(packed)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "trilobite.json: damaged (" in line
    assert line.endswith("copy the file again")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_act": "sillu"}, "no MixtralForCausalLM can be made of it"),
        ({"num_key_value_heads": 0}, "no MixtralForCausalLM can be made of it"),
        ({"pad_token_id": 900}, "no MixtralForCausalLM can be made of it"),
        ({"dtype": "bfloat17"}, "no configuration of a mixtral"),
        ({"dtype": 16}, "dtype 16; expected bfloat16"),
        ({"dtype": "int8"}, "dtype 'int8'; expected bfloat16"),
        ({"sliding_window": True}, "no configuration of a mixtral"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000, and the checkpoint has 41 tensors"),
        ({"quantization_config": {}}, "has no quant_method"),
        ({"quantization_config": {"bits": 4}}, "has no quant_method"),
        ({"quantization_config": "gptq"}, "has no quant_method"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "already quantized with 'gptq'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "already quantized with 'awq'"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("restored")
def test_odd_values_in_the_configuration(
    original: Path, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    path = original / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    uses: list[Callable[[], object]] = [
        lambda: trilobite.load(str(original)),
        lambda: trilobite.compress(str(original), tmp_path / "out", load_recipe("rtn3")),
    ]
    for use in uses:
        with pytest.raises(TrilobiteError, match=said) as caught:
            use()
        assert "\n" not in str(caught.value)
        assert str(original) in str(caught.value)
    assert not (tmp_path / "out").exists()
