"""Traces say what the model did; figures say what the trace says."""

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.architectures import build_model
from support.translators import build, nllb, switch, t5
from transformers import PreTrainedModel

from trilobite.errors import EvaluationError
from trilobite.evaluate.cache_simulation import NAMES, hit_ratios, recalls
from trilobite.evaluate.frequency import expert_frequency, forced_frequency
from trilobite.evaluate.trace import RESIDUAL, Trace, forced_trace, gate, load_trace, norm, save_trace, trace

IDS = torch.arange(5, 45).view(2, 20)


def test_a_trace_counts_what_frequencies_count() -> None:
    model = build_model("deepseek")
    found = trace(model, IDS)
    assert found.experts.shape[1:] == (40, 2)
    for row, counts in zip(found.experts, expert_frequency(model, IDS, batch=1).values(), strict=True):
        assert np.bincount(row.ravel(), minlength=4).tolist() == counts
    assert found.experts_of == [4] * len(found.names)


def test_the_guess_of_a_layer_without_what_lies_between_is_right() -> None:
    """Where attention and experts add nothing, the next layer sees what this one saw: all guesses are right."""
    model = build_model("mixtral")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.experts.down_proj.zero_()
            layer.post_attention_layernorm.weight.fill_(1.0)
    found = trace(model, IDS)
    for guesser in (gate(1), norm(1), RESIDUAL):
        guess, needed = found.guesses[guesser][1:, :, :2], found.experts[1:]
        assert np.array_equal(np.sort(guess), np.sort(needed))
        assert recalls(found)[guesser][2] == 1.0
        assert (found.guesses[guesser][0] == -1).all(), "nobody can guess the first layer"
    assert found.guesses[gate(1)].shape[2] == 4


def test_layers_whose_norms_differ_are_guessed_through_their_own() -> None:
    """The next layer's gate on what this layer's norm made of the stream is wrong; on what its own makes, right."""
    model = build_model("mixtral")
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.experts.down_proj.zero_()
            gains = torch.randn(64, generator=torch.Generator().manual_seed(i))
            layer.post_attention_layernorm.weight.copy_(gains)
    found = trace(model, IDS)
    assert recalls(found)[norm(1)][2] == 1.0
    assert recalls(found)[gate(1)][2] < 0.9


def test_without_guesses_nothing_is_run_twice() -> None:
    """A trace leaves the model as it was: hooks, numbers of experts and all."""
    model = build_model("qwen2_moe")
    before = model(input_ids=IDS).logits
    trace(model, IDS)
    assert torch.equal(model(input_ids=IDS).logits, before)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_model_without_experts() -> None:
    with pytest.raises(EvaluationError, match="Mixture-of-Experts"):
        trace(build_model("llama"), IDS)


def test_an_encoder_decoder_needs_translations() -> None:
    with pytest.raises(EvaluationError, match="--target-text"):
        trace(build_model("switch_transformers"), IDS)
    with pytest.raises(EvaluationError, match="decoder-only"):
        forced_trace(build_model("mixtral"), PAIRS)
    with pytest.raises(EvaluationError, match="Mixture-of-Experts"):
        forced_trace(build(t5), PAIRS)


PAIRS = [([5, 6, 7, 8, 9, 1], [10, 11, 1]), ([30, 1], [31, 32, 33, 34, 1])]
TRANSLATED = np.array([False] * 6 + [True] * 3 + [False] * 2 + [True] * 5)


@pytest.mark.parametrize("make", [switch, nllb])
def test_both_stacks_take_turns(make: Callable[[], PreTrainedModel]) -> None:
    """A sentence's tokens have experts in the encoder, then those of its translation in the decoder."""
    model = build(make)
    found = forced_trace(model, PAIRS)
    counts = forced_frequency(model, PAIRS, batch=1)
    assert found.names == list(counts)
    assert {name.partition(".")[0] for name in found.names} == {"encoder", "decoder"}
    for name, row in zip(found.names, found.experts, strict=True):
        assert np.bincount(row[row >= 0], minlength=4).tolist() == counts[name]
        reached, own = (row >= 0).any(-1), name.startswith("decoder") == TRANSLATED
        assert not reached[~own].any()
        assert reached[own].mean() > 0.5, "Switch drops some"
    assert hit_ratios(found)["lru"][4] > 0


def test_the_encoder_does_not_guess_for_the_decoder() -> None:
    model = build(switch)  # the last sparse layer of the encoder stands just before two of the decoder
    found = forced_trace(model, PAIRS)
    assert found.names == ["encoder.1", "decoder.1", "decoder.3"]
    reached = (found.guesses[gate(1)] >= 0).any((1, 2))
    assert reached.tolist() == [False, False, True]
    assert not (found.guesses[gate(1)][2] >= 0).any(-1)[~TRANSLATED].any()


def test_a_token_that_a_guesser_drops_is_no_guess(tmp_path: Path) -> None:
    """Switch's own routing code sends what exceeds an expert's capacity to expert E, which is none."""
    model = build(switch)
    for module in model.modules():
        if hasattr(module, "expert_capacity"):
            module.expert_capacity = 1
    found = forced_trace(model, PAIRS)
    assert (found.experts[2] >= 0).sum() < 8
    save_trace(tmp_path / "t.npz", found)
    assert np.array_equal(load_trace(tmp_path / "t.npz").guesses[gate(1)], found.guesses[gate(1)])


SMALL = Trace(
    experts=np.array([[[0, 1], [0, 2], [0, 1], [3, -1]]], np.int16),
    experts_of=[4],
    names=["a"],
    model="m",
    text="t",
    guesses={"gate+1": np.array([[[-1, -1], [0, 1], [1, 0], [2, 3]]], np.int16)},
)


def test_hit_ratios_by_hand() -> None:
    found = hit_ratios(SMALL)
    assert set(found) == set(NAMES)
    # 0 1 | 0 2 | 0 1 | 3: of 7 needs the second and third 0 hit with one slot and two; with three also the second 1
    assert found["lru"] == {1: 2 / 7, 2: 2 / 7, 3: 3 / 7, 4: 3 / 7}
    assert found["belady"][3] == 3 / 7
    assert hit_ratios(SMALL, tokens=2)["lru"][2] == 1 / 4


def test_recalls_by_hand() -> None:
    found = recalls(SMALL)
    assert found["gate+1"] == {1: 2 / 5, 2: 4 / 5}  # tokens 2 to 4 need 0 2 0 1 3
    assert found["repeat"][1] == pytest.approx(2 / 5)
    assert found["frequency"][1] == pytest.approx(2 / 5)


def test_a_bound_is_a_bound() -> None:
    experts = np.random.default_rng(0).integers(0, 8, (3, 50, 2)).astype(np.int16)
    found = hit_ratios(Trace(experts=experts, experts_of=[8] * 3, names=list("abc")))
    for k in range(1, 9):
        assert all(found["belady"][k] >= found[policy][k] for policy in NAMES)


def test_traces_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "a trace.npz"
    save_trace(path, SMALL)
    found = load_trace(path)
    assert np.array_equal(found.experts, SMALL.experts)
    assert np.array_equal(found.guesses["gate+1"], SMALL.guesses["gate+1"])
    assert replace(found, experts=SMALL.experts, guesses=SMALL.guesses) == SMALL


def pickled(path: Path) -> None:
    np.savez(path, kind=np.array([print], dtype=object), experts=SMALL.experts)


def another_shape(path: Path) -> None:
    save_trace(path, replace(SMALL, names=["a", "b"]))


def an_expert_too_many(path: Path) -> None:
    save_trace(path, replace(SMALL, experts_of=[3]))


def cut_off(path: Path) -> None:
    save_trace(path, SMALL)
    path.write_bytes(path.read_bytes()[:-30])


def flipped(path: Path) -> None:
    save_trace(path, SMALL)
    data = bytearray(path.read_bytes())
    info = zipfile.ZipFile(path).getinfo("experts.npy")
    data[info.header_offset + info.compress_size] ^= 255
    path.write_bytes(data)


@pytest.mark.parametrize(
    "make",
    [
        pickled,
        another_shape,
        an_expert_too_many,
        cut_off,
        flipped,
        lambda p: p.write_bytes(b""),
        lambda p: p.write_text("no"),
        lambda p: np.savez(p, x=np.zeros(3)),
        lambda p: p.mkdir(),
        lambda p: None,
    ],
)
def test_what_is_no_trace(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "t.npz")
    with pytest.raises(EvaluationError, match="trilobite trace") as caught:
        load_trace(tmp_path / "t.npz")
    assert "\n" not in str(caught.value)
