"""Checksums of packed checkpoints: every damaged byte is found, and nothing else is called damage."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import build_checkpoint

import trilobite
from trilobite import cli
from trilobite.checkpoint.source import open_source
from trilobite.checkpoint.verify import check_intact, verify
from trilobite.errors import CheckpointError
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe

WEIGHTS = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    build_checkpoint("mixtral", folder / "original", dtype=torch.bfloat16)
    (folder / "original" / "tokenizer_config.json").write_text("{}")
    options = Options(jobs=1, device="cpu")
    compress(str(folder / "original"), folder / "packed", load_recipe("milo-s1"), options=options)
    return folder / "packed"


@pytest.fixture
def packed(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "packed"))


def damaged(path: Path) -> dict[str, str]:
    return {checked.name: checked.damage for checked in verify(open_source(str(path))) if checked.damage}


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["trilobite", *args])
    try:
        cli.main()
    except SystemExit as e:
        return int(e.code or 0), *capsys.readouterr()
    return 0, *capsys.readouterr()


def test_every_tensor_and_file_is_compared(made: Path) -> None:
    source = open_source(str(made))
    names = {checked.name for checked in verify(source)}
    assert names == {*source.tensors, "config.json", "generation_config.json", "tokenizer_config.json"}
    assert damaged(made) == {}
    trilobite.load(str(made), verify=True)


def test_one_flipped_bit_anywhere_is_found(packed: Path) -> None:
    source = open_source(str(packed))
    data = bytearray((packed / WEIGHTS).read_bytes())
    for name, info in source.tensors.items():
        for position in {info.offset, info.offset + info.nbytes // 2, info.offset + info.nbytes - 1}:
            data[position] ^= 16
            (packed / WEIGHTS).write_bytes(data)
            data[position] ^= 16
            assert list(damaged(packed)) == [name]


def test_another_dtype_of_the_same_bytes_is_found(packed: Path) -> None:
    whole, name = (packed / WEIGHTS).read_bytes(), "model.norm.weight"
    at = whole.index(b'"BF16"', whole.index(name.encode()))
    (packed / WEIGHTS).write_bytes(whole[:at] + b'"F16" ' + whole[at + 6 :])
    found = damaged(packed)
    assert list(found) == [name]
    assert "checksum F16 " in found[name]
    assert "not BF16 " in found[name]


def test_reports_without_dtypes_still_serve(packed: Path) -> None:
    report = json.loads((packed / "trilobite.json").read_text())
    for row in report["tensors"]:
        row["checksums"] = {name: value.partition(" ")[2] for name, value in row["checksums"].items()}
    (packed / "trilobite.json").write_text(json.dumps(report))
    assert damaged(packed) == {}


def test_loading_asks_only_when_told(packed: Path) -> None:
    data = bytearray((packed / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (packed / WEIGHTS).write_bytes(data)
    trilobite.load(str(packed))
    with pytest.raises(CheckpointError, match=r"is not as it was written .* copy the folder again"):
        trilobite.load(str(packed), verify=True)


def test_swapped_missing_and_strange_tensors(packed: Path) -> None:
    tensors = load_file(packed / WEIGHTS)
    first, second = (f"model.layers.{i}.self_attn.q_proj.weight_packed" for i in range(2))
    tensors[first], tensors[second] = tensors[second], tensors[first]
    tensors["stranger"] = tensors.pop("model.norm.weight")
    save_file(tensors, packed / WEIGHTS, {"format": "pt"})
    (packed / "model.safetensors.index.json").unlink()
    found = damaged(packed)
    assert found.keys() == {first, second, "stranger", "model.norm.weight"}
    assert found["stranger"] == "is not in trilobite.json"
    assert found["model.norm.weight"] == "is missing"


def test_the_command(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(monkeypatch, capsys, "verify", str(packed))
    assert status == 0
    assert "as they were written" in out
    (packed / "tokenizer_config.json").write_text('{"a": 1}')
    (packed / "generation_config.json").unlink()
    status, out, err = run(monkeypatch, capsys, "verify", str(packed))
    assert status == 1
    assert [line.split()[0] for line in out.splitlines()] == [
        "generation_config.json",
        "tokenizer_config.json",
    ]
    assert err.splitlines()[-1].startswith(f"error: {packed}: generation_config.json cannot be read")
    status, out, _ = run(monkeypatch, capsys, "verify", str(packed), "--json")
    assert (status, len(json.loads(out)["damaged"])) == (1, 2)


def forget(report: dict[str, Any]) -> None:
    for row in report["tensors"]:
        del row["checksums"]


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (forget, "holds no checksums"),
        (lambda r: r.update(checksums=3), "damaged"),
        (lambda r: r.update(tensors=3), "damaged"),
        (lambda r: r["tensors"][0].update(checksums=[1]), "damaged"),
        (lambda r: r["tensors"][0]["checksums"].update({"": 0}), "that are no strings"),
        (lambda r: r["checksums"].update({"../original/config.json": "00000000"}), "damaged"),
    ],
)
def test_reports_without_checksums_and_odd_ones(
    packed: Path, edit: Callable[[dict[str, Any]], object], line: str
) -> None:
    report = json.loads((packed / "trilobite.json").read_text())
    edit(report)
    (packed / "trilobite.json").write_text(json.dumps(report))
    with pytest.raises(CheckpointError, match=line):
        check_intact(open_source(str(packed)))


def test_an_original_has_none(made: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no trilobite\.json"):
        trilobite.load(str(made.parent / "original"), verify=True)


def test_what_save_pretrained_writes_holds_its_own(made: Path, tmp_path: Path) -> None:
    model = trilobite.load(str(made))
    with torch.no_grad():
        model.model.norm.weight += 1
    model.save_pretrained(tmp_path)
    assert damaged(tmp_path) == {}
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert list(damaged(tmp_path)) == ["model.norm.weight"]
