"""Steps of models whose caches hold more than keys and values, or that look at less of them: bits, and who owns what."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.every_architecture import build
from support.steps import assert_same, conversation, feed, plain, step_of, tokens
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from trilobite.kernels import ops
from trilobite.kernels.cpu.step import Kind
from trilobite.kernels.ops import attends
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.step.index import Index
from trilobite.runtime.step.step_list import COMPARED

pytestmark = pytest.mark.skipif(not attends(torch.zeros(1, 16)), reason="the native library is not installed")

CHOSEN = 32
"""Rows that an index of keys chooses."""
CHUNKS = {"attention_chunk_size": 16}
KINDS: dict[str, tuple[dict[str, Any], set[Kind]]] = {
    "qwen3_next": ({}, {Kind.CONVOLVE, Kind.DELTA}),
    "kimi_linear": ({}, {Kind.CONVOLVE, Kind.DELTA}),
    "lfm2_moe": ({}, {Kind.CONVOLVE}),
    "nemotron_h": ({}, {Kind.CONVOLVE, Kind.SCAN}),
    "jamba": ({}, {Kind.CONVOLVE}),
    "zaya": ({}, set()),
    "llama4_text": (CHUNKS, set()),
    "gemma4_text": ({}, {Kind.PICK}),
    "mimo_v2_flash": ({}, set()),
    "deepseek_v32": ({"index_topk": CHOSEN}, set()),
    "glm_moe_dsa": ({"index_topk": CHOSEN}, set()),
    "glm5_next": ({"text_config": {"index_topk": CHOSEN}}, set()),
    "minimax_m3_vl_text": ({"index_topk_blocks": CHOSEN // 4}, set()),
}
"""Model types, values of their configurations, and kinds of nodes that their steps have."""
STATES = ("qwen3_next", "lfm2_moe", "nemotron_h")
INDEXED = ("deepseek_v32", "minimax_m3_vl_text")
Packed = Callable[[str], Path]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            build(kind, folder / "original", KINDS.get(kind, ({}, None))[0])
            compress(str(folder / "original"), folder / "packed", load_recipe("rtn3"))
            made[kind] = folder / "packed"
        return made[kind]

    return of


def begun(model: PreTrainedModel, seed: int = 0) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=tokens(6, seed)[None], past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("kind", KINDS)
def test_bits(kind: str, packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two turns, longer than windows and chunks are, and than what an index of keys chooses."""
    nodes: set[int] = set()
    program = ops.step.program
    monkeypatch.setattr(ops.step, "program", lambda n: (nodes.update(x.kind for x in n), program(n))[1])
    model = load(str(packed(kind)))
    ours = conversation(model)
    step = step_of(model)
    assert step.why is None
    assert step.compared == COMPARED
    assert nodes >= KINDS[kind][1]
    assert_same(ours, conversation(plain(model)))


@pytest.mark.parametrize("kind", [*STATES, *INDEXED])
def test_two_texts_in_turns(kind: str, packed: Packed) -> None:
    """Each text's states are its own, also while another one's are where the step has them."""
    model = load(str(packed(kind)))

    def both() -> list[list[Tensor]]:
        caches, made = [begun(model, seed) for seed in (1, 2)], [[], []]  # type: ignore[var-annotated]
        for i in range(16):
            for text, cache in enumerate(caches):
                made[text] += feed(model, cache, tokens(3, 10 * i + text))
        return made

    ours = both()
    assert step_of(model).ready is not None
    plain(model)
    for one, other in zip(ours, both(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", [*STATES, *INDEXED])
def test_a_copy_goes_on_by_itself(kind: str, packed: Packed) -> None:
    """As does what it was copied from, and a cache that lost its text."""
    model = load(str(packed(kind)))

    def told() -> tuple[list[Tensor], DynamicCache]:
        cache = begun(model)
        made = feed(model, cache, tokens(12))
        other = copy.deepcopy(cache)
        made += feed(model, cache, tokens(4, 1))
        made += feed(model, other, tokens(4, 2))
        made += feed(model, cache, tokens(4, 3))
        del cache
        made += feed(model, other, tokens(4, 4))
        other.reset()
        with torch.inference_mode():
            model(input_ids=tokens(6, 9)[None], past_key_values=other, use_cache=True)
        return made + feed(model, other, tokens(6, 5)), other

    ours = told()
    assert step_of(model).ready is not None
    plain(model)
    assert_same(ours, told())


@pytest.mark.parametrize("at", ["logits", "states", "memory"])
def test_what_a_comparison_undoes(at: str, packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that is wrong, or fails, leaves the states as they were before it."""
    model = load(str(packed("qwen3_next")))
    step, cache = step_of(model), begun(model)
    made = feed(model, cache, tokens(2))
    assert step.ready is not None
    run = step._run_list

    def broken(ready: Any, *where: Any) -> Tensor:
        logits = run(ready, *where)
        if at == "memory":
            raise MemoryError("of nothing")
        if at == "states":
            next(iter(ready.states.values())).places["conv_states", 0].add_(1)
        return logits + 1 if at == "logits" else logits

    with monkeypatch.context() as patch:
        patch.setattr(step, "_run_list", broken)
        made += feed(model, cache, tokens(1, 1))
    assert step.why is not None
    made += feed(model, cache, tokens(20, 2))
    plain(model)
    other = begun(model)
    expected = [t for part in (tokens(2), tokens(1, 1), tokens(20, 2)) for t in feed(model, other, part)]
    assert_same((made, cache), (expected, other))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("deepseek_v4", "its cache has layers that are DeepseekV4CSACache, DeepseekV4HCACache"),
        ("minimax", "its cache is a MiniMaxCache"),
        ("jetmoe", "it reads values of tensors (tolist)"),
    ],
)
def test_one_line_says_why_not(kind: str, why: str, packed: Packed, caplog: pytest.LogCaptureFixture) -> None:
    model = load(str(packed(kind)))
    ids = tokens(6)[None]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert step_of(model).ready is None
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("trilobite.runtime.step")]
    assert lines == [f"{type(model).__name__}: steps run as transformers runs them: {why}"]


@pytest.mark.parametrize("kind", INDEXED)
def test_an_index_that_chooses(kind: str, packed: Packed, caplog: pytest.LogCaptureFixture) -> None:
    """Up to what it chooses steps come from a list, behind that they do not, as one line says, once."""
    model = load(str(packed(kind)))
    step, ran = step_of(model), list[int]()
    run = step._run_list
    step._run_list = lambda ready, *where: (ran.append(where[-1]), run(ready, *where))[1]  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        long, _ = conversation(model, turns=1, steps=CHOSEN)
        first = ran[:]
        short, _ = conversation(model, turns=1, steps=8)
    assert first == [*range(8, CHOSEN)]
    assert ran[len(first) :] == [*range(6, 14)]
    assert all(map(torch.equal, long, short))
    (line,) = (r.getMessage() for r in caplog.records if r.name.startswith("trilobite.runtime.step"))
    assert line.endswith(f"from token {CHOSEN + 1} on its index of keys chooses rows")


@pytest.mark.parametrize("lost", ["row", "index"])
def test_an_index_that_lost_its_keys(lost: str, packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that keeps other keys is not taken, and a cache without an index is left to the model."""
    model = load(str(packed("deepseek_v32")))
    step, cache = step_of(model), begun(model)
    with monkeypatch.context() as patch:
        if lost == "row":
            patch.setattr(Index, "advance", lambda self, layer: None)
        made = feed(model, cache, tokens(4))
    if lost == "row":
        assert step.why == "what it keeps in its cache is something else"
        plain(model)
        other = begun(model)
        assert_same((made, cache), (feed(model, other, tokens(4)), other))
    else:
        cache.layers[0].indexer_keys = None
        with pytest.raises(TypeError):  # as without a list: torch has nothing to append to
            feed(model, cache, tokens(1))
        assert step.why == "its cache holds no keys of an index"


@pytest.mark.parametrize("kind", INDEXED)
def test_a_long_text_does_not_spoil_a_short_one(kind: str, packed: Packed) -> None:
    """Nothing is recorded of a text behind what an index chooses, and nothing is said against the model."""
    model = load(str(packed(kind)))
    step, cache = step_of(model), DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=tokens(CHOSEN + 2)[None], past_key_values=cache, use_cache=True)
    feed(model, cache, tokens(6))
    assert step.why is None
    assert step.ready is None
    cache.crop(-20)
    ours = feed(model, cache, tokens(16)), cache
    assert step.compared == COMPARED
    plain(model)
    other = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=tokens(CHOSEN + 2)[None], past_key_values=other, use_cache=True)
    feed(model, other, tokens(6))
    other.crop(-20)
    assert_same(ours, (feed(model, other, tokens(16)), other))


def test_a_position_that_python_counts(packed: Packed) -> None:
    """Llama 4's layers without rotation scale queries by where the token stands, which they add to a range."""
    model = load(str(packed("llama4_text")))
    for name in ("floor_scale", "attn_scale"):
        assert hasattr(model.config, name)
    model.config.floor_scale = 4
    for layer in model.model.layers:
        layer.self_attn.floor_scale = 4
    ours = conversation(model, turns=1, steps=40)
    assert step_of(model).ready is not None
    assert_same(ours, conversation(plain(model), turns=1, steps=40))
