"""`resize_token_embeddings` of packed models, with a packed head and with one that is the embedding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import architectures
from support.architectures import VOCAB, build_checkpoint
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trilobite.checkpoint.summary import bytes_on_disk
from trilobite.quantize.plan.report import report
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe
from trilobite.runtime.attention import attend_natively
from trilobite.runtime.load import load
from trilobite.runtime.modules.linear import PackedLinear

IDS = torch.arange(3, 83)[None]


@pytest.fixture(scope="module", params=["packed head", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resizing")
    settings: dict[str, Any] = {**architectures.COMMON, "num_local_experts": architectures.EXPERTS}
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tied":
            settings["tie_word_embeddings"] = True
            patch.setitem(
                architectures.TINY_CONFIGS, "mixtral", lambda: AutoConfig.for_model("mixtral", **settings)
            )
        build_checkpoint("mixtral", path / "original", dtype=torch.bfloat16)
    options = Options(jobs=1, device="cpu")
    compress(str(path / "original"), path / request.param, load_recipe("rtn3"), options=options)
    return path / request.param


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


@pytest.mark.filterwarnings("ignore:the packed head")
@pytest.mark.parametrize("size", [VOCAB + 5, VOCAB - 3])
def test_resized_models_generate_and_reload(folder: Path, size: int, tmp_path: Path) -> None:
    model = load(str(folder), dtype=torch.float32)
    before = logits(model)
    embeddings = model.resize_token_embeddings(size)
    assert embeddings is model.get_input_embeddings()
    assert embeddings.num_embeddings == model.lm_head.out_features == model.config.vocab_size == size
    assert (model.lm_head.weight is embeddings.weight) == (folder.name == "tied")
    common = min(size, VOCAB)
    assert (logits(model)[..., :common] - before[..., :common]).norm() < 1e-5 * before.norm()
    tokens = model.generate(IDS[:, :4], max_new_tokens=4, do_sample=False)
    model.save_pretrained(tmp_path)
    for again in (
        load(str(tmp_path), dtype=torch.float32),
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32),
    ):
        assert any(isinstance(m, PackedLinear) for m in again.modules())
        attend_natively(again)  # torch's adds up in another order
        assert torch.equal(logits(again), logits(model))
        assert torch.equal(again.generate(IDS[:, :4], max_new_tokens=4, do_sample=False), tokens)


@pytest.mark.filterwarnings("ignore:the packed head")
def test_the_report_says_so(folder: Path, tmp_path: Path) -> None:
    model = load(str(folder))
    model.resize_token_embeddings(pad_to_multiple_of=100)
    model.save_pretrained(tmp_path)
    lines = json.loads((tmp_path / "trilobite.json").read_text())["tensors"]
    resized = {line["name"]: line for line in lines if line["role"] in ("embedding", "head")}
    assert len(resized) == (1 if folder.name == "tied" else 2)
    for line in resized.values():
        assert (line["shape"], line["bytes"]) == ([300, 64], 300 * 64 * 2)
        assert line["kept"] == f"resized from {VOCAB} tokens"
        assert "format" not in line
    report(lines, bytes_on_disk=bytes_on_disk(tmp_path))  # as `inspect` does


@pytest.mark.parametrize("folder", ["packed head"], indirect=True)
def test_the_head_stays_packed_unless_its_size_changes(folder: Path) -> None:
    model = load(str(folder))
    for size in ({}, {"new_num_tokens": VOCAB}, {"pad_to_multiple_of": 64}):
        assert model.resize_token_embeddings(**size) is model.get_input_embeddings()
        assert isinstance(model.lm_head, PackedLinear)
    with pytest.warns(UserWarning, match=r"packed head of 256 tokens is a torch\.bfloat16 one of 257"):
        model.resize_token_embeddings(VOCAB + 1)
    assert type(model.lm_head) is torch.nn.Linear
