"""Hessians of encoder-decoders against hooks on the whole model, pair by pair without padding."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import SEQ2SEQ, build_checkpoint
from support.calibrating import SERIAL, add_tokenizer, calibration, run, words
from support.packing import relative_error
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from trilobite.checkpoint.packed import read_report
from trilobite.checkpoint.roles import Matrix, identify, read_matrix
from trilobite.checkpoint.source import open_source
from trilobite.errors import CalibrationError
from trilobite.models.pairs import Pair
from trilobite.quantize.calibrate import loop as calibration_loop
from trilobite.quantize.calibrate import routed as calibration_experts
from trilobite.quantize.calibrate.pairs import draw
from trilobite.quantize.calibrate.store import HessianStore
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.quantize.run import executor as work_module
from trilobite.quantize.run.options import Options
from trilobite.recipe import Role, load_recipe
from trilobite.runtime.load import load

LINES, LONGEST = 13, 32
TYPES = (*SEQ2SEQ, "t5")


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_loop, "PASS_TOKENS", 4 * LONGEST)
    monkeypatch.setattr(calibration_experts, "ROWS", 50)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("text")
    for name, seed in (("source", 0), ("target", 1)):
        lines = [words(2 + (7 * n + 11 * seed) % 19, seed=100 * seed + n) for n in range(LINES)]
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder / "source", folder / "target"


def build(model_type: str, path: Path) -> Any:
    if model_type == "t5":
        ends = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        config = T5Config(vocab_size=256, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, **ends)
        torch.manual_seed(0)
        T5ForConditionalGeneration(config).save_pretrained(path)
    else:
        build_checkpoint(model_type, path)
    add_tokenizer(path)
    return AutoModelForSeq2SeqLM.from_pretrained(path).eval()


def ground(texts: tuple[Path, Path], **settings: Any) -> Calibration:
    return calibration(texts[0], **{"target": texts[1], "samples": None, **settings})


@torch.no_grad()
def inputs_of(model: Any, pairs: list[Pair]) -> dict[str, list[tuple[Any, ...]]]:
    """What entered every linear layer and every module of experts, pair by pair."""
    seen: dict[str, list[tuple[Any, ...]]] = {}

    def look(name: str) -> Any:
        return lambda _m, args: seen.setdefault(name, []).append(args)

    handles = [
        module.register_forward_pre_hook(look(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or name.endswith(".experts")
    ]
    for source, target in pairs:
        given = [model.config.decoder_start_token_id, *target[:-1]]
        model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([given]), use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def hessians(model: Any, path: Path, pairs: list[Pair]) -> Iterator[tuple[Matrix, Tensor, int]]:
    """(matrix, E[x x^T] in float64, tokens)."""
    source, seen = open_source(str(path)), inputs_of(model, pairs)
    for m in identify(source):
        module = m.name.removesuffix(".weight")
        if not m.quantizable or (m.expert is None and module not in seen):
            continue
        if m.role is Role.EXPERT:
            assert m.expert is not None
            module = m.name.rsplit(".", 3)[0]
            x = torch.cat([states[(index == m.expert).any(-1)] for states, index, _ in seen[module]])
            if m.projection == "down":
                first = m.name.replace("fc2", "fc1").replace("wo", "wi")
                up = next(o for o in identify(source) if o.name == first)
                x = x @ read_matrix(source, up).float().T
                bias = model.get_submodule(module).up_proj_bias
                x = (x if bias is None else x + bias[m.expert].detach()).relu()
        else:
            x = torch.cat([args[0].flatten(0, -2) for args in seen[module]])
        yield m, x.double().T @ x.double() / max(1, len(x)), len(x)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("jobs", [1, 2])
def test_hessians_of_both_stacks(
    model_type: str, jobs: int, texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trilobite.quantize.methods.hessian.ENOUGH", 1e-9)
    model = build(model_type, tmp_path / "m")
    chosen = ground(texts, propagate="original", save=tmp_path / "h")
    pairs = draw(open_source(str(tmp_path / "m")), chosen).pairs
    assert len(pairs) == LINES
    run(tmp_path / "m", tmp_path / "p", chosen, options=Options(jobs=jobs, device="cpu"))
    fingerprint = open_source(str(tmp_path / "m")).fingerprint()
    store = HessianStore(tmp_path / "h", source=fingerprint, calibration=None)
    compared: set[str] = set()
    for m, wanted, tokens in hessians(model, tmp_path / "m", list(pairs)):
        if store.missing([m.name]):
            continue
        h, note = store.get(m.name, m.shape[1])
        assert note["tokens"] == tokens, m.name
        if tokens:
            close = torch.allclose(h.double(), wanted, rtol=1e-3, atol=1e-5 * float(wanted.diagonal().mean()))
            assert close, m.name
            compared.add(m.name)
    lines = [t for t in read_report(tmp_path / "p")["tensors"] if "proxy" in t]
    assert len(compared) >= len([t for t in lines if t["tokens"]]) > 20
    assert {name.split("block")[0].split("layers")[0].split(".")[-2] for name in compared} == {
        "encoder",
        "decoder",
    }


@pytest.mark.parametrize("model_type", TYPES)
def test_a_decoder_reads_the_quantized_encoder(
    model_type: str, texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(model_type, tmp_path / "m")
    found: dict[str, Tensor] = {}
    real = work_module.pack_line

    def noted(source: Any, line: Any, recipe: Any, device: Any, known: Any = None) -> Any:
        if known is not None:
            found[line.matrix.name] = known[0].clone()
        return real(source, line, recipe, device, known)

    monkeypatch.setattr(work_module, "pack_line", noted)
    chosen = ground(texts)
    pairs = list(draw(open_source(str(tmp_path / "m")), chosen).pairs)
    run(tmp_path / "m", tmp_path / "p", chosen, "gptq2")
    packed = load(str(tmp_path / "p"), dtype=torch.float32).dequantize()
    seen = inputs_of(packed, pairs)
    original = inputs_of(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "m").eval(), pairs)
    name = {"nllb-moe": "model.decoder.layers.0.cross_attention.k_proj"}.get(
        model_type, "decoder.block.0.layer.1.EncDecAttention.k"
    )
    x, other = (torch.cat([args[0].flatten(0, -2) for args in s[name]]).double() for s in (seen, original))
    wanted, unquantized = x.T @ x / len(x), other.T @ other / len(other)
    h = found[f"{name}.weight"].double()
    # Rounding sends a token at the border between two experts to the other one.
    assert 20 * relative_error(h, wanted) < relative_error(h, unquantized)


def test_every_calibrated_recipe_runs(texts: tuple[Path, Path], tmp_path: Path) -> None:
    build("switch_transformers", tmp_path / "m")
    quip = load_recipe("quip2")
    result = run(tmp_path / "m", tmp_path / "p", ground(texts, samples=5), quip, SERIAL)
    assert {str(line.format) for line in result.plan.lines if line.matrix.role is Role.EXPERT} == {"e8p-2"}
    assert load(str(tmp_path / "p")).generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4).shape[0] == 1


def test_what_does_not_fit_is_one_line(texts: tuple[Path, Path], tmp_path: Path) -> None:
    build("switch_transformers", tmp_path / "m")
    build_checkpoint("mixtral", tmp_path / "decoder")
    add_tokenizer(tmp_path / "decoder")
    chosen = ground(texts)
    for model, bad, message in [
        ("m", replace(chosen, target=None), "give the translation of the text too: --target-text"),
        ("decoder", chosen, "no use for --target-text"),
        ("m", replace(chosen, context=2), "more than 2 tokens"),
        ("m", replace(chosen, samples=0), "0 samples"),
        ("m", replace(chosen, finetune="block", samples=2), "at least 3"),
    ]:
        with pytest.raises(CalibrationError, match=message) as e:
            run(tmp_path / model, tmp_path / "dst", bad, "quip2" if bad.finetune else "gptq3")
        assert "\n" not in str(e.value)
        assert not (tmp_path / "dst").exists()
