"""A model whose experts stream says what the resident one says: token by token, bit for bit."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.architectures import build_checkpoint, build_model
from torch import Tensor

from trilobite.errors import OffloadError
from trilobite.kernels.cpu import engine
from trilobite.quantize.run.compress import compress
from trilobite.recipe import Recipe, load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.offload.cache import ExpertCache
from trilobite.runtime.offload.expectation import expectation
from trilobite.runtime.offload.plan import Offload
from trilobite.runtime.offload.policies import POLICIES
from trilobite.runtime.offload.streaming import streaming
from trilobite.runtime.routing import moe_layers

pytestmark = pytest.mark.skipif(not engine.available(), reason="no native CPU engine")

RECIPES: dict[str, Callable[[], Recipe]] = {
    "int3": lambda: load_recipe("rtn3"),
    "milo": lambda: load_recipe("milo-s1"),
    "lattice": lambda: load_recipe("quip3-free"),
    "super": lambda: load_recipe("super3"),
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    made: dict[tuple[str, str], Path] = {}

    def get(model_type: str, recipe: str) -> Path:
        if (model_type, recipe) not in made:
            folder = tmp_path_factory.mktemp(f"{model_type}-{recipe}")
            build_checkpoint(model_type, folder / "original")
            compress(str(folder / "original"), folder / "packed", RECIPES[recipe]())
            made[model_type, recipe] = folder / "packed"
        return made[model_type, recipe]

    return get


def streamed(
    path: Path,
    slots: int,
    *,
    staging: int = 3,
    guesses: int = 2,
    ahead: int = 1,
    shared: bool = False,
    policy: str = "lru",
) -> tuple[Any, ExpertCache]:
    """A model with so many slots a layer."""
    layers = len(moe_layers(load(str(path))))
    wanted = Offload(
        memory=2**40,
        slots=slots * layers,
        staging=staging,
        guesses=guesses,
        ahead=ahead,
        pool=shared,
        policy=policy,
    )
    model = load(str(path), memory=wanted)
    found = streaming(model)
    assert found is not None
    assert found.cache is not None
    return model, found.cache


def answers(model: Any, ids: Tensor) -> Tensor:
    """Logits of a prompt, and of tokens one by one behind it, greedily."""
    with torch.inference_mode():
        first = model(input_ids=ids, use_cache=False).logits
        made = model.generate(
            ids,
            max_new_tokens=12,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
            pad_token_id=0,
        )
        return torch.cat([first.flatten(), *(step.flatten() for step in made.logits)])


IDS = torch.arange(7, 16)[None]


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize(
    ("model_type", "recipe"),
    [
        ("mixtral", "milo"),
        ("deepseek", "int3"),
        ("gpt_oss", "int3"),
        ("qwen2_moe", "milo"),
        ("mixtral", "lattice"),
        ("mixtral", "super"),
    ],
)
def test_streaming_changes_no_bit(
    packed: Callable[[str, str], Path], model_type: str, recipe: str, slots: int
) -> None:
    path = packed(model_type, recipe)
    model, cache = streamed(path, slots)
    assert torch.equal(answers(model, IDS), answers(load(str(path)), IDS))
    counts = cache.counters
    assert counts.misses > 0
    assert counts.bytes > 0
    cache.close()


@pytest.mark.parametrize("staging", [1, 2, 3, 5])
@pytest.mark.parametrize("guesses", [0, 1, 4])
def test_prompts_larger_than_the_cache(
    packed: Callable[[str, str], Path], staging: int, guesses: int
) -> None:
    """64 texts of 40 tokens need all experts of every layer; none of them waits in vain for a staging buffer."""
    path = packed("mixtral", "milo")
    model, cache = streamed(path, 2, staging=staging, guesses=guesses)
    ids = torch.randint(3, 256, (64, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = load(str(path))(input_ids=ids, use_cache=False).logits
        for _ in range(2):
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    assert torch.equal(answers(model, IDS), answers(load(str(path)), IDS))
    counts = cache.counters
    assert counts.guesses >= counts.used + counts.wasted
    assert (counts.guesses > 0) == (guesses > 0)


def test_a_prompt_reads_each_expert_once(packed: Callable[[str, str], Path]) -> None:
    path = packed("mixtral", "int3")
    model, cache = streamed(path, 2, guesses=0)
    with torch.inference_mode():
        model(input_ids=torch.arange(3, 131)[None], use_cache=False)
    assert cache.counters.misses == cache.store.count
    assert cache.counters.bytes == cache.store.nbytes


@pytest.fixture(scope="module")
def layer(packed: Callable[[str, str], Path]) -> tuple[Any, Any]:
    """The first experts module, streaming with two slots, and resident."""
    path = packed("mixtral", "milo")
    model, _ = streamed(path, 2, guesses=0)
    return moe_layers(model)[0].experts, moe_layers(load(str(path)))[0].experts


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_routing(layer: tuple[Any, Any], data: st.DataObject) -> None:
    """Any number of tokens and experts, the same twice and "no expert" (4, and beyond) among them."""
    tokens, active = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 4))
    index = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.integers(0, 6), min_size=active, max_size=active),
                min_size=tokens,
                max_size=tokens,
            )
        )
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 64, generator=generator).to(dtype)
    weights = torch.rand(tokens, active, generator=generator)
    streaming, resident = layer
    with torch.inference_mode():
        assert torch.equal(streaming(x, index, weights), resident(x, index, weights))


def test_a_wrong_row_of_the_table_is_noticed(packed: Callable[[str, str], Path]) -> None:
    """What these tests would see if an expert lay where another one does."""
    path = packed("mixtral", "milo")
    model, cache = streamed(path, 3)
    place = cache._place
    cache._place = lambda key, slot: place(key, 1 - slot if slot < 2 else slot)  # type: ignore[method-assign]
    assert not torch.equal(answers(model, IDS), answers(load(str(path)), IDS))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("shared", [False, True])
def test_policies_and_pools(packed: Callable[[str, str], Path], policy: str, shared: bool) -> None:
    path = packed("deepseek", "int3")
    model, cache = streamed(path, 2, policy=policy, shared=shared)
    assert torch.equal(answers(model, IDS), answers(load(str(path)), IDS))
    assert cache.counters.hits > 0


def test_right_guesses_enter_the_cache_and_wrong_ones_do_not(packed: Callable[[str, str], Path]) -> None:
    model, cache = streamed(packed("mixtral", "int3"), 2, guesses=2, staging=4)
    answers(model, IDS)
    counts = cache.counters
    assert counts.used > 0
    assert counts.guesses >= counts.used + counts.wasted
    for number in range(len(cache.tables)):
        there = (cache.tables[number][:, 1, 0] >= 0).nonzero().flatten().tolist()
        assert there == sorted(cache.slots.resident(number))


def test_guesses_begin_while_what_is_missing_still_comes(packed: Callable[[str, str], Path]) -> None:
    """So that no thread idles between the last piece of a miss and the first of a guess."""
    model, cache = streamed(packed("mixtral", "int3"), 3)
    guess, early = cache.guess, list[bool]()

    def watched(layer: int, experts: list[int]) -> None:
        early.append(any(number < layer for number, _ in cache._coming))
        guess(layer, experts)

    cache.guess = watched  # type: ignore[method-assign,assignment]
    answers(model, IDS)
    assert any(early)


def test_guesses_pass_through_the_norm_of_the_layer_they_are_for(tmp_path: Path) -> None:
    """Where attention and experts add nothing, guesses are right only with the later layer's own norm."""
    model = build_model("mixtral")
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.experts.down_proj.zero_()
            layer.post_attention_layernorm.weight.copy_(
                torch.randn(64, generator=torch.Generator().manual_seed(i))
            )
    model.save_pretrained(tmp_path / "original")
    compress(str(tmp_path / "original"), tmp_path / "packed", load_recipe("rtn3"))
    streams, cache = streamed(tmp_path / "packed", 2, guesses=2, staging=4)
    with torch.inference_mode():
        for t in range(60):
            streams(input_ids=torch.tensor([[3 + t]]), use_cache=False)
    counts = cache.counters
    assert counts.used > 10
    assert counts.wasted == 0


def test_what_the_disk_allows(packed: Callable[[str, str], Path]) -> None:
    """As many tokens as it has experts to give, of those without a slot: half of four, two a token in each layer."""
    path = packed("mixtral", "int3")
    model, cache = streamed(path, 2)
    found = streaming(model)
    assert found is not None
    expected = expectation(found)
    assert expected is not None
    missed = cache.store.nbytes / cache.store.count * 2 * len(cache.tables) / 2
    assert expected.tokens == pytest.approx(expected.bandwidth / missed)
    assert cache.counters.bytes == 0
    assert torch.equal(answers(model, IDS), answers(load(str(path)), IDS))


def failing(error: Callable[[], BaseException]) -> Callable[..., int]:
    def read(*_: object) -> int:
        raise error()

    return read


def test_after_a_failure_the_cache_is_as_good_as_new(
    packed: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed("mixtral", "int3")
    model, cache = streamed(path, 2)
    expected = answers(load(str(path)), IDS)
    monkeypatch.setattr(os, "preadv", failing(lambda: OSError(5, "Input/output error")))
    for _ in range(3):
        with pytest.raises(OffloadError, match="Input/output error"):
            answers(model, IDS)
    monkeypatch.undo()
    assert torch.equal(answers(model, IDS), expected)
    assert len(cache._staging) + len(cache._leaving) + len(cache._guesses) == 3


def test_ctrl_c_during_a_read(packed: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed("mixtral", "int3")
    model, cache = streamed(path, 2)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_wait", interrupted)
    for ids in (IDS, torch.arange(3, 131)[None]):
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=ids, use_cache=False)
    monkeypatch.undo()
    assert torch.equal(answers(model, IDS), answers(load(str(path)), IDS))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_memory_does_not_grow(packed: Callable[[str, str], Path]) -> None:
    """Two slots, many tokens, each as the resident model says. What an hour would lose, this loses in parts of 1 MiB."""
    path = packed("mixtral", "int3")
    model, _ = streamed(path, 2)
    token, resident = torch.tensor([[5]]), load(str(path))
    with torch.inference_mode():
        expected = [resident(input_ids=token + i, use_cache=False).logits for i in range(200)]

    def run(count: int) -> None:
        with torch.inference_mode():
            for i in range(count):
                made = model(input_ids=token + i % 200, use_cache=False).logits
                assert torch.equal(made, expected[i % 200])

    run(200)
    before = resident_bytes()
    run(1000)
    assert resident_bytes() - before < 2**20


def test_a_copy_of_the_model_settles_in_the_mapped_file(packed: Callable[[str, str], Path]) -> None:
    import copy

    path = packed("mixtral", "int3")
    model, _ = streamed(path, 2)
    ids = IDS
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(copy.deepcopy(model)(input_ids=ids, use_cache=False).logits, expected)


def test_the_weights_are_saved_as_they_were(packed: Callable[[str, str], Path]) -> None:
    path = packed("mixtral", "milo")
    model, _ = streamed(path, 2)
    answers(model, IDS)
    saved, original = model.state_dict(), load(str(path)).state_dict()
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)
