"""The model card: what the hub wants to read, and what a person wrote stays."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.architectures import build_checkpoint

from trilobite.checkpoint.packed import PARTIAL, TIMES, PackedWriter, read_report
from trilobite.quantize.run.card import CARD, base_license, is_ours, model_card, update_card
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.metadata import source_name
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe

README = "---\nlicense: other\nlicense_name: mine\nlanguage: en\n---\n# A model\n"
MEASURED = [
    {"text": "wi|ki<b>.txt", "windows": 2, "context": 64, "perplexity": 7.25},
    {"tasks": {"piqa": {"acc": 0.5, "acc_stderr": 0.1, "n": 10}}},
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("card") / "original"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16)
    (path / CARD).write_text(README)
    return path


@pytest.fixture(scope="module")
def packed(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dst = tmp_path_factory.mktemp("card") / "packed"
    compress(str(original), dst, load_recipe("rtn3"), options=Options(jobs=1, device="cpu"))
    return dst


def front_matter(card: str) -> dict[str, Any]:
    data = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(data, dict)
    return data


def test_the_front_matter(packed: Path) -> None:
    front = front_matter((packed / CARD).read_text())
    assert front["license"] == "other"
    assert front["license_name"] == "mine"
    assert front["library_name"] == "trilobite"
    assert front["pipeline_tag"] == "text-generation"
    assert "base_model" not in front  # a folder's name is no hub id
    assert "trilobite" in front["tags"]


def test_the_base_model_is_a_hub_id() -> None:
    cached = Path("/hub/models--mistralai--Mixtral-8x7B-v0.1/snapshots/0123abc")
    assert source_name(str(cached), cached) == "mistralai/Mixtral-8x7B-v0.1"
    assert source_name("a/b", Path("/elsewhere")) == "a/b"


def card_of(packed: Path, **head: Any) -> str:
    return model_card(read_report(packed) | head, json.loads((packed / "config.json").read_text()), MEASURED)


def test_a_hub_id_is_the_base_model(packed: Path) -> None:
    front = front_matter(card_of(packed, source="mistralai/Mixtral-8x7B-v0.1"))
    assert front["base_model"] == "mistralai/Mixtral-8x7B-v0.1"
    assert front["base_model_relation"] == "quantized"


def test_what_it_says(packed: Path) -> None:
    card = card_of(packed)
    assert "import trilobite" in card
    assert "| expert | int3-" in card
    assert "| wi\\|ki\\<b\\>.txt, 2 windows of 64 tokens | perplexity | 7.2500 |" in card
    assert "| piqa, 10 items | acc | 0.5000 |" in card


def test_hostile_names_stay_names(packed: Path) -> None:
    source = "x\n---\nlicense: stolen\n# <script>alert(1)</script>"
    card = card_of(packed, source=source, rank="`x` |")
    assert front_matter(card)["license"] == "other"
    assert "<script>" not in card
    assert "\nlicense: stolen" not in card


@pytest.mark.parametrize(
    "readme",
    ["", "no front matter", "---\n[]\n---\n", "---\n: : :\n---\n", "---\nlicense: [1]\n---\n", "---\n" * 9],
)
def test_other_readmes_say_nothing_of_a_licence(tmp_path: Path, readme: str) -> None:
    (tmp_path / CARD).write_text(readme)
    assert base_license(tmp_path) == {}


def test_the_mark(packed: Path, tmp_path: Path) -> None:
    card = (packed / CARD).read_text()
    path = tmp_path / CARD
    assert is_ours(path)  # none
    path.write_text(card)
    assert is_ours(path)
    for changed in (card.replace("packed by", "Packed by"), card + "more\n", "x" + card, card[:-200], ""):
        path.write_text(changed)
        assert not is_ours(path)
    path.write_bytes(b"\xff")
    assert not is_ours(path)


def test_an_update_leaves_what_a_person_wrote(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    shutil.copytree(packed, folder)
    config = json.loads((folder / "config.json").read_text())
    assert update_card(folder, read_report(folder), config, MEASURED)
    assert "7.2500" in (folder / CARD).read_text()
    assert is_ours(folder / CARD)
    (folder / CARD).write_text("mine")
    assert not update_card(folder, read_report(folder), config, [])
    assert (folder / CARD).read_text() == "mine"


def test_a_resumed_run_leaves_what_a_person_wrote(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "dst"

    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PackedWriter, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            compress(str(original), dst, load_recipe("rtn3"), options=Options(jobs=1, device="cpu"))
    assert (dst / PARTIAL).exists()
    (dst / CARD).write_text("mine")
    compress(str(original), dst, load_recipe("rtn3"), options=Options(jobs=1, device="cpu"))
    assert (dst / "config.json").exists()
    assert (dst / CARD).read_text() == "mine"


def test_seconds_are_kept_apart(packed: Path) -> None:
    """trilobite.json holds no clock; the file beside it has the seconds of every tensor."""
    rows = read_report(packed)["tensors"]
    times = json.loads((packed / TIMES).read_text())
    assert times["version"] == 1
    assert set(times["seconds"]) == {row["name"] for row in rows}
    assert not any("seconds" in row for row in rows)
    assert all("kurtosis" in row for row in rows if "format" in row)
