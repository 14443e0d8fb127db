"""Fine-tuning of encoder-decoders, against blocks of the whole models, pair by pair without padding."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import build_checkpoint
from support.calibrating import add_tokenizer, calibration, run, words
from torch import Tensor

import trilobite
from trilobite.checkpoint.packed import read_report
from trilobite.checkpoint.source import open_source
from trilobite.models.pairs import Pair
from trilobite.quantize.calibrate import loop as calibration_loop
from trilobite.quantize.calibrate.pairs import draw
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.quantize.finetune import train as finetune

LINES, PASS = 12, 50


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_loop, "PASS_TOKENS", PASS)
    monkeypatch.setattr(finetune, "EPOCHS", 2)
    monkeypatch.setattr(finetune, "SIGNS_RATE", 5e-3)


@pytest.fixture
def ground(tmp_path: Path) -> Calibration:
    for name, seed in (("source", 0), ("target", 1)):
        lines = [words(2 + (7 * n + 11 * seed) % 19, seed=100 * seed + n) for n in range(LINES)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return calibration(
        tmp_path / "source",
        target=tmp_path / "target",
        samples=None,
        finetune="block",
        propagate="original",
    )


@torch.no_grad()
def calls(model: Any, path: str, pair: Pair) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """What a block is called with for one pair, and what it gives."""
    seen: list[Any] = []
    hook = model.get_submodule(path).register_forward_hook(
        lambda _, args, kwargs, out: seen.append((args, kwargs, out[0] if isinstance(out, tuple) else out)),
        with_kwargs=True,
    )
    given = torch.tensor([[model.config.decoder_start_token_id, *pair[1][:-1]]])
    model(input_ids=torch.tensor([pair[0]]), decoder_input_ids=given, use_cache=False)
    hook.remove()
    found: tuple[tuple[Any, ...], dict[str, Any], Tensor] = seen[0]
    return found


@torch.no_grad()
def relative_error(original: Any, packed: Any, path: str, pairs: list[Pair]) -> tuple[float, ...]:
    """Mean squared error of a packed block on real tokens, and the mean square of what the original adds."""
    errors, added = [], []
    for pair in pairs:
        args, kwargs, y = calls(original, path, pair)
        out = packed.get_submodule(path)(*args, **kwargs)
        errors.append((out[0] if isinstance(out, tuple) else out) - y)
        x = args[0] if args else kwargs["hidden_states"]
        added.append(y - x)
    return tuple(float(torch.cat([e.flatten() for e in part]).square().mean()) for part in (errors, added))


@pytest.mark.parametrize(
    "model_type", ["switch_transformers", pytest.param("nllb-moe", marks=pytest.mark.long)]
)
def test_blocks_of_both_stacks_are_tuned_towards_the_original(
    model_type: str, ground: Calibration, tmp_path: Path
) -> None:
    build_checkpoint(model_type, tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    run(tmp_path / "m", tmp_path / "p", ground, "quip2")
    records = read_report(tmp_path / "p")["finetune"]
    original = trilobite.load(str(tmp_path / "m"), dtype=torch.float32)
    packed = trilobite.load(str(tmp_path / "p"), dtype=torch.float32)
    modules = [name for name, _ in original.named_modules()]
    blocks = [name for name in modules if name.split(".")[-2:-1] in (["block"], ["layers"])]
    assert sorted(records) == [f"{i:05d}" for i in range(len(blocks))]
    assert all(record["after"] <= record["before"] for record in records.values())
    learnt = [record["after"] < record["before"] for record in records.values()]
    assert sum(learnt) > len(blocks) / 2, "eight sentences do not help every block"
    pairs = list(draw(open_source(str(tmp_path / "m")), ground).pairs)
    size = PASS // max(len(side) for pair in pairs for side in pair)
    batches = [pairs[i : i + size] for i in range(0, LINES, size)]
    assert len(batches) == LINES // 2
    for number in (1, len(blocks) - 1):
        path = blocks[number]
        _, scale = relative_error(original, packed, path, pairs)
        errors = [relative_error(original, packed, path, batch)[0] for batch in batches[2::3]]
        after = sum(errors) / len(errors) / scale
        assert after == pytest.approx(records[f"{number:05d}"]["after"], rel=0.02), path


@torch.no_grad()
def divergence(original: Any, packed: Any, pairs: list[Pair]) -> float:
    """KL of the next token under forced targets, mean over the tokens of all pairs."""
    found = []
    for source, target in pairs:
        given = torch.tensor([[original.config.decoder_start_token_id, *target[:-1]]])
        wanted, made = (
            m(input_ids=torch.tensor([source]), decoder_input_ids=given).logits[0].log_softmax(-1)
            for m in (original, packed)
        )
        found.append((wanted.exp() * (wanted - made)).sum(-1))
    return float(torch.cat(found).mean())


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["switch_transformers", "nllb-moe"])
def test_whole_models_are_tuned_towards_the_original(
    model_type: str, ground: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder reads what the packed encoder makes; both learn from the decoder's next token."""
    monkeypatch.setattr(finetune, "SIGNS_RATE", 1e-3)
    build_checkpoint(model_type, tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    grown: dict[str, bool] = {}
    real = finetune.train

    def watched(parts: Any, loss: Any, course: Any, tick: Any) -> Any:
        if len(parts) > 1:
            loss(course.train[:1]).backward()
            for part in parts:
                signs = [part.trained[name].grad for name in part.signs]
                grown[part.path] = any(g is not None and bool(g.any()) for g in signs)
        return real(parts, loss, course, tick)

    monkeypatch.setattr(finetune, "train", watched)
    run(tmp_path / "m", tmp_path / "p", replace(ground, finetune="full"), "quip2-free")
    assert sum("encoder" in path for path in grown) == 2
    assert all(learns for path, learns in grown.items() if path), grown
    record = read_report(tmp_path / "p")["finetune"]["all"]
    assert record["after"] < record["before"]
    original = trilobite.load(str(tmp_path / "m"), dtype=torch.float32)
    packed = trilobite.load(str(tmp_path / "p"), dtype=torch.float32)
    pairs = list(draw(open_source(str(tmp_path / "m")), ground).pairs)
    size = PASS // max(len(side) for pair in pairs for side in pair)
    aside = [pairs[i : i + size] for i in range(0, LINES, size)][2::3]
    after = sum(divergence(original, packed, batch) for batch in aside) / len(aside)
    assert after == pytest.approx(record["after"], rel=0.02)


def test_few_pairs_make_three_batches(
    ground: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_loop, "PASS_TOKENS", 4096)
    build_checkpoint("switch_transformers", tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    run(tmp_path / "m", tmp_path / "p", ground, "quip2-free")
    assert read_report(tmp_path / "p")["finetune"]
