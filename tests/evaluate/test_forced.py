"""Given translations: scores and expert counts of both stacks, against loops over single pairs written out here."""

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import oracle_seq2seq as oracle
from support.architectures import EXPERTS, build_checkpoint, build_model
from support.packing import relative_error
from torch import Tensor

from trilobite.checkpoint.source import open_source
from trilobite.errors import EvaluationError
from trilobite.evaluate.forced import forced_score
from trilobite.evaluate.frequency import forced_frequency, load_frequency, save_frequency
from trilobite.models.nllb_moe import NllbMoeSparseMLP
from trilobite.models.pairs import Pair, encode_pairs, forced, read_pairs
from trilobite.models.switch_transformers import SwitchTransformersSparseMLP
from trilobite.quantize.run.compress import compress, prepare
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe, recipe_from_dict
from trilobite.runtime.load import load

TYPES = ("nllb-moe", "switch_transformers")
SPARSE = (NllbMoeSparseMLP, SwitchTransformersSparseMLP)


def pairs() -> list[Pair]:
    generator = torch.Generator().manual_seed(2)

    def tokens(count: int) -> list[int]:
        return [*torch.randint(3, 250, (count,), generator=generator).tolist(), 2]

    return [(tokens(a), tokens(b)) for a, b in [(3, 9), (14, 2), (7, 7), (1, 1), (12, 20), (5, 6), (9, 11)]]


@torch.no_grad()
def alone(model: Any, pair: Pair) -> Tensor:
    """Log-probabilities of one pair, without padding: [T, V]."""
    source, target = pair
    given = [model.config.decoder_start_token_id, *target[:-1]]
    out = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([given]), use_cache=False)
    return out.logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_scores_are_those_of_single_pairs(model_type: str, batch: int) -> None:
    model, other = build_model(model_type, seed=0), build_model(model_type, seed=1)
    steps: list[tuple[int, int]] = []
    found = forced_score(model, pairs(), batch=batch, reference=other, progress=lambda *s: steps.append(s))
    nll = other_nll = kl = same = tokens = 0.0
    for pair in pairs():
        q, p = alone(model, pair), alone(other, pair)
        labels = torch.tensor(pair[1])[:, None]
        nll -= float(q.gather(1, labels).sum())
        other_nll -= float(p.gather(1, labels).sum())
        kl += float((p.exp() * (p - q)).sum())
        same += int((p.argmax(1) == q.argmax(1)).sum())
        tokens += len(pair[1])
    assert (found.tokens, found.sentences) == (tokens, len(pairs()))
    assert found.perplexity == pytest.approx(math.exp(nll / tokens), rel=1e-4)
    assert found.reference_perplexity == pytest.approx(math.exp(other_nll / tokens), rel=1e-4)
    assert found.kl == pytest.approx(kl / tokens, rel=1e-3)
    assert found.top1 == pytest.approx(same / tokens)
    assert steps[-1] == (len(pairs()), len(pairs()))
    assert forced_score(model, pairs(), batch=batch, reference=model).kl == pytest.approx(0, abs=1e-9)
    assert forced_score(model, pairs(), batch=batch).kl is None


@pytest.mark.parametrize("model_type", TYPES)
def test_experts_of_both_stacks_are_counted_without_padding(model_type: str, tmp_path: Path) -> None:
    model = build_checkpoint(model_type, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    wanted: dict[str, Counter[int]] = {}
    seen: dict[str, Tensor] = {}
    names = [name for name, module in model.named_modules() if isinstance(module, SPARSE)]
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _m, args, n=name: seen.update({n: args[0]})
        )
    for pair in pairs():
        alone(model, pair)
        for name in names:
            layer = {n.removeprefix(f"{name}."): w for n, w in tensors.items() if n.startswith(f"{name}.")}
            x = seen[name]
            if model_type == "nllb-moe":
                _, choices = oracle.nllb_moe(x[0], layer, model.config, [False] * x.shape[1])
            else:
                _, choices = oracle.switch(x, layer, model.config)
            key = f"{'encoder' if 'encoder.' in name else 'decoder'}.1"
            wanted.setdefault(key, Counter()).update(e for choice in choices for e, _ in choice)
    found = forced_frequency(model, pairs(), batch=3)
    assert list(found) == ["encoder.1", "decoder.1"]
    assert found == {key: [count[e] for e in range(EXPERTS)] for key, count in wanted.items()}
    assert found["encoder.1"] != found["decoder.1"]


@pytest.mark.parametrize("model_type", TYPES)
def test_frequencies_give_ranks_stack_by_stack(model_type: str, tmp_path: Path) -> None:
    build_checkpoint(model_type, tmp_path / "m", dtype=torch.bfloat16)
    counts = {"encoder.1": [9, 1, 1, 1], "decoder.1": [1, 1, 1, 9]}
    save_frequency(tmp_path / "f.json", counts, model_name="m", text="t", tokens=12)
    assert load_frequency(tmp_path / "f.json") == counts
    rules = [{"roles": ["expert"], "format": "int3-g32", "method": "rtn"}]
    recipe = recipe_from_dict({"name": "f", "rules": rules, "rank": "frequency-4", "cap": False}, "test")
    plan = prepare(open_source(str(tmp_path / "m")), recipe, frequency=load_frequency(tmp_path / "f.json"))
    ranks: dict[tuple[str | None, int | None], int] = {}
    for line in plan.lines:
        if line.format:
            ranks[line.matrix.layer_key, line.matrix.expert] = line.rank
    assert ranks["encoder.1", 0] == ranks["decoder.1", 3] > ranks["encoder.1", 3] == ranks["decoder.1", 0]
    rows = [row for row in plan.to_dict()["tensors"] if row["role"] == "expert"]
    assert {(row["stack"], row["layer"]) for row in rows} == {("encoder", 1), ("decoder", 1)}


@pytest.mark.parametrize(("recipe", "largest"), [("int8-experts", 0.02), ("int4-experts", 0.2)])
def test_presets_for_experts_alone_keep_all_else(recipe: str, largest: float, tmp_path: Path) -> None:
    model = build_checkpoint("switch_transformers", tmp_path / "m", dtype=torch.bfloat16)
    compress(str(tmp_path / "m"), tmp_path / "p", load_recipe(recipe), options=Options(device="cpu"))
    lines = prepare(open_source(str(tmp_path / "m")), load_recipe(recipe)).lines
    assert {line.matrix.role.value for line in lines if line.format} == {"expert"}
    assert {str(line.format) for line in lines if line.format} == {f"{recipe[:4]}-channel-sym"}
    packed = load(str(tmp_path / "p")).dequantize()
    for name, kept in model.requires_grad_(False).named_parameters():
        found = packed.get_parameter(name).detach()
        if ".experts." in name:
            assert 0 < relative_error(found, kept) < largest
        else:
            assert torch.equal(found, kept)


class Words:
    """Of a tokenizer, what pairs ask for: a word is a token, 2 ends a sentence."""

    eos_token_id = 2

    def __call__(
        self,
        text: Any = None,
        *,
        text_target: Any = None,
        add_special_tokens: bool = True,
        verbose: bool = True,
    ) -> Any:
        rows = [[len(word) + 2 for word in line.split()] for line in text or text_target]
        ends = ([2] if add_special_tokens else []) if text else [5, 2]

        return SimpleNamespace(input_ids=[[*row, *ends] for row in rows])


def test_pairs_are_read_encoded_and_shifted(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x yy\n\nzzz\nw\n")
    (tmp_path / "b").write_text("y\nq\nr sss\n \n")
    sides = read_pairs(tmp_path / "a", tmp_path / "b", EvaluationError)
    assert sides == (["x yy", "zzz"], ["y", "r sss"])
    tokenizer: Any = Words()
    assert encode_pairs(tokenizer, *sides, first=9) == [([3, 4, 2], [9, 3, 2]), ([5, 2], [9, 3, 5, 2])]
    found = encode_pairs(tokenizer, *sides)
    assert found == [([3, 4, 2], [3, 5, 2]), ([5, 2], [3, 5, 5, 2])]
    config = build_model("nllb-moe").config
    batch = forced(found, config)
    assert batch.source.tolist() == [[3, 4, 2], [5, 2, 1]]
    assert batch.mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.decoder_input.tolist() == [[2, 3, 5, 1], [2, 3, 5, 5]]
    assert batch.labels.tolist() == [[3, 5, 2, -100], [3, 5, 5, 2]]


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    """What Unicode calls a line separator, and a form feed, stand inside of sentences."""
    (tmp_path / "a").write_bytes("one\u2028still one\x0cand still\r\ntwo\n".encode())
    (tmp_path / "b").write_text("eins\nzwei\n")
    sides = read_pairs(tmp_path / "a", tmp_path / "b", EvaluationError)
    assert sides == (["one\u2028still one\x0cand still", "two"], ["eins", "zwei"])


def test_bad_pairs_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\ny\n")
    (tmp_path / "b").write_text("x\n")
    (tmp_path / "c").write_bytes(b"x\xff\n")
    (tmp_path / "d").write_text(" \n")
    for one, other, message in [
        ("a", "b", "2 lines, .* has 1"),
        ("a", "none", "cannot be read"),
        ("c", "b", "line 1: not UTF-8 at byte 2"),
        ("d", "b", "no pair of sentences"),
    ]:
        with pytest.raises(EvaluationError, match=message):
            read_pairs(tmp_path / one, tmp_path / other, EvaluationError)
    model = build_model("nllb-moe")
    with pytest.raises(EvaluationError, match="made for 64 tokens, a sentence has 65"):
        forced_score(model, [([3] * 65, [4])], batch=1)
    with pytest.raises(EvaluationError, match="token 256, the vocabulary has 256"):
        forced_frequency(model, [([3], [256])], batch=1)
    with pytest.raises(EvaluationError, match="decoder-only"):
        forced_score(build_model("mixtral"), [([3], [4])], batch=1)
    with torch.no_grad():
        model.get_parameter("model.decoder.layers.0.ffn.fc1.bias").fill_(torch.nan)
    with pytest.raises(
        EvaluationError, match=r"NaN or infinite, which begins in model\.decoder\.layers\.0\.ffn"
    ):
        forced_score(model, pairs(), batch=2)
