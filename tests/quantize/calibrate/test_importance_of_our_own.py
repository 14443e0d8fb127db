"""Importance that asks the user for nothing: what weights tell, and windows that the model writes itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.architectures import build_checkpoint
from support.calibrating import SERIAL, add_tokenizer
from support.runs import PlugPulled, digests
from torch import Tensor
from transformers import AutoModelForCausalLM

from trilobite.checkpoint.packed import PackedWriter, read_report
from trilobite.checkpoint.roles import Matrix, identify, read_matrix
from trilobite.checkpoint.source import Source, open_source
from trilobite.errors import RecipeError
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.calibrate import sampled, weights
from trilobite.quantize.calibrate.model import BlockModel
from trilobite.quantize.calibrate.sampled import sample_windows, sampled_calibration
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.quantize.columns.guess import Guess
from trilobite.quantize.run import calibrated
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.quantize.run.planned import plan_within
from trilobite.recipe import Recipe, load_recipe, recipe_from_dict


def weighed(importance: str) -> Recipe:
    return replace(load_recipe("super3"), importance=importance)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "mixtral"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16)
    add_tokenizer(path)
    return path


def read(source: Source, name: str) -> Tensor:
    return read_matrix(source, next(m for m in identify(source) if m.name == name)).float()


def test_weights_tell_what_enters_each_column(mixtral: Path) -> None:
    """Gains squared; rows of v for o, shared by query heads; products of gate's and up's rows for down."""
    source = open_source(str(mixtral))
    guess = Guess(source, identify(source))

    def told(name: str) -> Tensor:
        return guess.get(name, read(source, name).shape[1])[0]

    layer = "model.layers.1."
    for norm, reader in (("input", "self_attn.q_proj"), ("post_attention", "block_sparse_moe.experts.2.w3")):
        gain = read(source, f"{layer}{norm}_layernorm.weight")
        assert torch.equal(told(f"{layer}{reader}.weight"), gain.square())
    gain = read(source, f"{layer}input_layernorm.weight")
    values = (read(source, f"{layer}self_attn.v_proj.weight") * gain).square().sum(1)
    heads = told(f"{layer}self_attn.o_proj.weight").view(
        -1, 2, 16
    )  # two query heads of 16 share a value head
    assert torch.allclose(heads, values.view(-1, 1, 16).expand_as(heads))
    gain = read(source, f"{layer}post_attention_layernorm.weight")
    gate, up = (
        read(source, f"{layer}block_sparse_moe.experts.2.{part}.weight") * gain for part in ("w1", "w3")
    )
    expected = gate.square().sum(1) * up.square().sum(1)
    assert torch.allclose(told(f"{layer}block_sparse_moe.experts.2.w2.weight"), expected)


def test_values_behind_a_latent_vector(tmp_path: Path) -> None:
    """DeepSeek's o reads some of the rows of kv_b, which reads what a norm of its own gives."""
    build_checkpoint("deepseek_v2", tmp_path)
    source = open_source(str(tmp_path))
    layer = "model.layers.1.self_attn."
    o, b = read(source, f"{layer}o_proj.weight"), read(source, f"{layer}kv_b_proj.weight")
    rows = (b * read(source, f"{layer}kv_a_layernorm.weight")).square().sum(1)
    told, _ = Guess(source, identify(source)).get(f"{layer}o_proj.weight", o.shape[1])
    heads = json.loads((tmp_path / "config.json").read_text())["num_attention_heads"]
    assert torch.allclose(told.view(heads, -1), rows.view(heads, -1)[:, -o.shape[1] // heads :])


def block_model(path: Path) -> BlockModel:
    source = open_source(str(path))
    return BlockModel(source, identify(source), torch.device("cpu"))


def one_by_one(path: Path, ids: Tensor, seeds: list[int]) -> Tensor:
    """Each token from what the whole model says behind all before it, with the same noise."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = ids.clone()
    for t in range(1, ids.shape[1]):
        with torch.no_grad():
            logits = model(ids).logits
        for row, found, seed in zip(ids, logits, seeds, strict=True):
            row[t] = sampled._drawn(found[:-1], seed)[t - 1]
    return ids


def test_as_many_passes_as_tokens_write_what_one_by_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint("mixtral", tmp_path, dtype=torch.float32)
    ground = Calibration(sampled=True, samples=3, context=8, propagate="original")
    seeds: list[int] = []
    draw = sampled._drawn
    monkeypatch.setattr(sampled, "_drawn", lambda logits, seed: (seeds.append(seed), draw(logits, seed))[1])
    few = sample_windows(block_model(tmp_path), ground)
    monkeypatch.setattr(sampled, "PASSES", 7)
    found = sample_windows(block_model(tmp_path), ground, jobs=2)
    monkeypatch.setattr(sampled, "_drawn", draw)
    expected = one_by_one(tmp_path, found, seeds[:3])
    assert torch.equal(found, expected)
    assert torch.equal(few[:, :5], expected[:, :5])
    assert len(set(map(tuple, found.tolist()))) == 3


def test_a_loaded_block_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights would lie in memory twice."""
    build_checkpoint("mixtral", tmp_path)
    model = block_model(tmp_path)
    reads: list[str] = []
    read = weights._original

    def original(source: Source, matrix: Matrix) -> tuple[str, Tensor]:
        reads.append(matrix.name)
        return read(source, matrix)

    monkeypatch.setattr(weights, "_original", original)
    model.load(model.blocks[0])
    once = list(reads)
    model.load(model.blocks[0])
    assert once
    assert reads == once
    model.drop(model.blocks[0])
    model.load(model.blocks[0])
    assert reads == 2 * once


def by_feedback(importance: str = "auto") -> Budget:
    """Errors of columns are fed back, by Hessians."""
    return Budget(bits=2.35, method="gptq", importance=importance)


@pytest.mark.parametrize(
    "wanted",
    [weighed("weights"), weighed("self"), pytest.param(by_feedback(), marks=pytest.mark.long)],
    ids=str,
)
def test_resumed_to_the_same_bytes(
    wanted: Recipe | Budget, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled, "LENGTH", 24)
    finished, dst = tmp_path / "finished", tmp_path / "dst"
    compress(str(mixtral), finished, wanted, options=SERIAL)
    rows = [r for r in read_report(finished)["tensors"] if "proxy" in r]
    assert {row["role"] for row in rows} == {"attention", "expert"}
    write, count = PackedWriter.write, []

    def stop(self: PackedWriter, *args: object) -> None:
        if len(count) >= 25:
            raise PlugPulled
        count.append(1)
        write(self, *args)

    two = Options(jobs=2, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(PackedWriter, "write", stop)
        with pytest.raises(PlugPulled):
            compress(str(mixtral), dst, wanted, options=two)
    result = compress(str(mixtral), dst, wanted, options=two)
    assert 0 < result.fresh < len(result.plan.lines)
    assert digests(dst) == digests(finished)


@pytest.mark.parametrize("importance", ["weights", "self"])
def test_planned(importance: str, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "LENGTH", 24)
    compress(str(mixtral), tmp_path / "dst", Budget(bits=3.4, importance=importance), options=SERIAL)
    report = read_report(tmp_path / "dst")
    assert report["identity"]["recipe"]["importance"] == importance
    assert any(row.get("importance") == importance for row in report["tensors"])


def test_errors_fed_back_without_a_text(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formats as for `search`; integers by gptq and lattices by ldlq, against Hessians of what the model writes."""
    monkeypatch.setattr(sampled, "LENGTH", 24)
    compress(str(mixtral), tmp_path / "dst", by_feedback(), options=SERIAL)
    report = read_report(tmp_path / "dst")
    assert report["identity"]["recipe"]["importance"] == "self"
    assert report["identity"]["calibration"]["samples"] == sampled.FOR_HESSIANS
    body = [
        row for row in report["tensors"] if row.get("role") in ("attention", "expert") and "format" in row
    ]
    assert {(row["format"].startswith("e8p"), row["method"]) for row in body} == {
        (False, "gptq"),
        (True, "ldlq"),
    }
    assert {row["tokens"] for row in body if row["role"] == "attention"} == {24 * sampled.FOR_HESSIANS}
    search = plan_within(open_source(str(mixtral)), replace(by_feedback("self"), method="search")).recipe
    found = recipe_from_dict(report["identity"]["recipe"], "found")
    assert [rule.format for rule in found.rules] == [rule.format for rule in search.rules]


def test_hessians_of_its_own_text_are_kept(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run takes them, writes nothing, and finds the same codes."""
    monkeypatch.setattr(sampled, "LENGTH", 24)
    monkeypatch.setattr(sampled, "FOR_HESSIANS", 8)
    kept = tmp_path / "hessians"
    compress(str(mixtral), tmp_path / "a", by_feedback(), calibration=Calibration(save=kept), options=SERIAL)
    assert read_report(tmp_path / "a")["identity"]["recipe"]["importance"] == "self"
    monkeypatch.setattr(calibrated, "sample_windows", None)
    again = Calibration(hessians=kept)
    compress(str(mixtral), tmp_path / "b", by_feedback(), calibration=again, options=SERIAL)
    made = [
        {
            name: t
            for file in sorted((tmp_path / run).glob("*.safetensors"))
            for name, t in load_file(file).items()
        }
        for run in "ab"
    ]
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(t, made[1][name]) for name, t in made[0].items())


def test_refusals(mixtral: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    for wanted in (replace(load_recipe("gptq3"), importance="weights"), by_feedback("weights")):
        with pytest.raises(RecipeError, match=r"importance weights runs nothing.*choose importance self"):
            compress(str(mixtral), dst, wanted, options=SERIAL)
    build_checkpoint("gpt_oss", tmp_path / "other")
    with pytest.raises(RecipeError, match=r"known for axk1.*choose --importance builtin or none"):
        compress(str(tmp_path / "other"), dst, weighed("weights"), options=SERIAL)
    build_checkpoint("switch_transformers", tmp_path / "pairs")
    with pytest.raises(RecipeError, match="importance self is for decoder-only models"):
        compress(str(tmp_path / "pairs"), dst, weighed("self"), options=SERIAL)
    assert not dst.exists()


def test_windows_are_no_longer_than_the_model_takes(mixtral: Path, tmp_path: Path) -> None:
    config = json.loads((mixtral / "config.json").read_text()) | {"max_position_embeddings": 128}
    for file in mixtral.glob("*.safetensors"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert sampled_calibration(open_source(str(tmp_path))).context == 128
