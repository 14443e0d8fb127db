"""Checkpoints packed with column scales: any format, method and way to load them, and runs that are cut off."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.architectures import build_checkpoint
from support.calibrating import CONTEXT, SAMPLES, SERIAL, add_tokenizer, calibration, words
from support.runs import PlugPulled, digests
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from trilobite.checkpoint.packed import PackedWriter, read_report
from trilobite.checkpoint.roles import identify, read_matrix
from trilobite.checkpoint.source import open_source
from trilobite.errors import CalibrationError, RecipeError
from trilobite.integrations.config import TrilobiteConfig
from trilobite.quantize.columns.choose import with_column_scales
from trilobite.quantize.columns.rescaling import RescaledWeights
from trilobite.quantize.columns.streams import Stream, find_streams
from trilobite.quantize.run.compress import compress, prepare
from trilobite.quantize.run.options import Options
from trilobite.recipe import Recipe, load_recipe
from trilobite.runtime.attention import attend_natively
from trilobite.runtime.load import load


def scaled(name: str, **changes: object) -> Recipe:
    return replace(load_recipe(name), columns="sinkhorn", **changes)


MILO = scaled("milo-s1", rank="kurtosis-4", iterations=2, cap=False)


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral whose channels differ by powers of two, which the norms and matrices before them undo."""
    path = tmp_path_factory.mktemp("columns")
    build_checkpoint("mixtral", path / "plain", dtype=torch.bfloat16)
    plain = open_source(str(path / "plain"))

    def spread(stream: Stream) -> Tensor:
        generator = torch.Generator().manual_seed(len(stream.name))
        return torch.exp2(torch.randint(-3, 4, (stream.size,), generator=generator).float())

    streams = find_streams(plain, identify(plain))
    weights = RescaledWeights(plain, identify(plain), streams, spread, "planted")
    folder = path / "outliers"
    folder.mkdir()
    for file in (path / "plain").glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = {name: weights.apply(name, plain.read(name)).bfloat16() for name in plain.tensors}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(words(SAMPLES * CONTEXT))
    return path


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(1))
    found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found.float()


def distance(packed: Path, original: Path) -> float:
    expected = logits(load(str(original), dtype=torch.float32))
    found = logits(load(str(packed), dtype=torch.float32))
    return float((found - expected).norm() / expected.norm())


def test_what_is_not_quantized_stays_the_model_that_it_was(outliers: Path, tmp_path: Path) -> None:
    """The scales that are found, in float32: rounding; with routers and norms as they are stored, a little more."""
    source = with_column_scales(open_source(str(outliers)), scaled("int8"))
    distances = []
    for stored in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(stored)
        folder.mkdir()
        for file in outliers.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        tensors = {}
        for m in identify(source):
            w = read_matrix(source, m).float()
            kept = m.role.value in ("router", "norm")
            tensors[m.name] = w.to(stored).float() if kept else w
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        distances.append(distance(folder, outliers))
    assert distances[0] < 2e-6
    assert distances[1] < 1e-3


@pytest.mark.parametrize(
    ("name", "limit"), [("int8", 0.05), ("int4", 0.25), ("search3", 0.4), ("rtn3", 0.5), ("hqq3", 0.5)]
)
def test_scales_help_and_leave_the_model_as_it_is(
    name: str, limit: float, outliers: Path, tmp_path: Path
) -> None:
    """Less than half of what is lost without scales, in a model of noise, whose routers waver."""
    compress(str(outliers), tmp_path / "with", scaled(name), options=SERIAL)
    compress(str(outliers), tmp_path / "without", load_recipe(name), options=SERIAL)
    found, plain = distance(tmp_path / "with", outliers), distance(tmp_path / "without", outliers)
    assert found < limit
    assert found < 0.5 * plain


def test_every_way_to_load_gives_one_model(outliers: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    compress(str(outliers), packed, scaled("search3"), options=SERIAL)
    expected = logits(load(str(packed)))
    assert torch.equal(logits(load(str(packed), memory="4GiB")), expected)
    model = AutoModelForCausalLM.from_pretrained(packed)
    attend_natively(model)  # torch's adds up in another order
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(str(tmp_path / "saved"))), expected)
    plain = logits(load(str(packed), dtype=torch.float32).dequantize())
    exact = logits(load(str(packed), dtype=torch.float32))
    assert float((plain - exact).norm() / exact.norm()) < 1e-5


def test_the_report_says_which_matrices_have_scales(outliers: Path, tmp_path: Path) -> None:
    compress(str(outliers), tmp_path / "packed", scaled("search3"), options=SERIAL)
    report = read_report(tmp_path / "packed")
    assert report["identity"]["recipe"]["columns"] == "sinkhorn"
    found = {row["role"]: row.get("columns") for row in report["tensors"] if "format" in row}
    assert found == {"attention": "sinkhorn", "expert": "sinkhorn", "head": None}


@pytest.fixture(scope="module")
def finished(outliers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dst = tmp_path_factory.mktemp("finished") / "packed"
    compress(str(outliers), dst, MILO, options=SERIAL)
    return dst


@pytest.mark.parametrize("jobs", [1, 2])
def test_resumed_to_the_same_bytes(
    jobs: int, finished: Path, outliers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of a kurtosis policy are those of rescaled matrices, before and after the kill."""
    options, write, count = Options(jobs=jobs, device="cpu"), PackedWriter.write, []

    def stop(self: PackedWriter, *args: object) -> None:
        if len(count) >= 20:
            raise PlugPulled
        count.append(1)
        write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PackedWriter, "write", stop)
        with pytest.raises(PlugPulled):
            compress(str(outliers), tmp_path / "dst", MILO, options=options)
    result = compress(str(outliers), tmp_path / "dst", MILO, options=options)
    assert 0 < result.fresh < len(result.plan.lines)
    assert digests(tmp_path / "dst") == digests(finished)


def test_planned_as_made(finished: Path, outliers: Path) -> None:
    plan = prepare(with_column_scales(open_source(str(outliers)), MILO), MILO)
    ranks = {row["name"]: row["rank"] for row in read_report(finished)["tensors"] if "rank" in row}
    assert {line.matrix.name: line.rank for line in plan.lines if line.format} == ranks
    unscaled = prepare(open_source(str(outliers)), replace(MILO, columns="none"))
    assert {line.matrix.name: line.rank for line in unscaled.lines if line.format} != ranks


def test_calibration_sees_the_rescaled_model(outliers: Path, text: Path, tmp_path: Path) -> None:
    """GPTQ with scales, straight and through kept Hessians, which are those of the rescaled model alone."""
    recipe = scaled("gptq3")
    straight = calibration(text, propagate="original")
    compress(str(outliers), tmp_path / "a", recipe, calibration=straight, options=SERIAL)
    kept = calibration(text, propagate="original", save=tmp_path / "h")
    compress(str(outliers), tmp_path / "b", recipe, calibration=kept, options=SERIAL)
    names = [p.name for p in (tmp_path / "a").glob("*.safetensors")]
    assert names
    assert all((tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names)
    compress(
        str(outliers), tmp_path / "c", load_recipe("gptq3"), calibration=calibration(text), options=SERIAL
    )
    assert distance(tmp_path / "a", outliers) < 0.5 * distance(tmp_path / "c", outliers)
    with pytest.raises(CalibrationError, match="another checkpoint"):
        compress(str(outliers), tmp_path / "d", load_recipe("gptq3"), calibration=kept, options=SERIAL)


def test_lattice_formats_gain_as_well(outliers: Path, tmp_path: Path) -> None:
    compress(str(outliers), tmp_path / "a", scaled("quip2-free"), options=SERIAL)
    compress(str(outliers), tmp_path / "b", load_recipe("quip2-free"), options=SERIAL)
    assert distance(tmp_path / "a", outliers) < 0.8 * distance(tmp_path / "b", outliers)


def test_what_cannot_be_scaled_is_refused(outliers: Path, tmp_path: Path) -> None:
    build_checkpoint("gpt_oss", tmp_path / "gpt_oss", dtype=torch.bfloat16)
    with pytest.raises(RecipeError, match=r"known for .*mixtral.* this is 'gpt_oss'; .*--columns none"):
        compress(str(tmp_path / "gpt_oss"), tmp_path / "dst", scaled("int8"), options=SERIAL)
    assert not (tmp_path / "dst").exists()
    chosen = TrilobiteConfig(scaled("int8").to_dict())
    with pytest.raises(RecipeError, match=r"norms too.*trilobite compress"):
        AutoModelForCausalLM.from_pretrained(outliers, quantization_config=chosen)
