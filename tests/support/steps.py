"""Steps of decoding for tests: conversations, each token by itself, and what they leave in a cache."""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from trilobite.runtime.step.index import INDICES
from trilobite.runtime.step.replay import Step
from trilobite.runtime.step.states import states_of


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same, but that its forward is transformers'."""
    model.__dict__.pop("forward")
    return model


def step_of(model: PreTrainedModel) -> Step:
    step = model.forward
    assert isinstance(step, Step)
    return step


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def feed(model: PreTrainedModel, cache: DynamicCache, ids: Tensor) -> list[Tensor]:
    """Logits of tokens, one at a time."""
    return [model(input_ids=i.view(1, 1), past_key_values=cache, use_cache=True).logits for i in ids]


def conversation(
    model: PreTrainedModel, turns: int = 2, steps: int = 32
) -> tuple[list[Tensor], DynamicCache]:
    """Logits of all steps of some turns, each a prompt and tokens one at a time."""
    cache, made = DynamicCache(config=model.config), []
    for turn in range(turns):
        prompt = tokens(6, 100 + turn)[None]
        with torch.inference_mode():
            model(input_ids=prompt, past_key_values=cache, use_cache=True)
        made += feed(model, cache, tokens(steps, turn))
    return made, cache


def assert_same(ours: tuple[list[Tensor], DynamicCache], theirs: tuple[list[Tensor], DynamicCache]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
    for a, b in zip(ours[1].layers, theirs[1].layers, strict=True):
        held, expected = states_of(a), states_of(b)
        assert held.keys() == expected.keys()
        assert all(torch.equal(t, expected[key]) for key, t in held.items())
        if not isinstance(a, DynamicLayer):
            continue
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
        indices = [[getattr(x, field, None) for _, field in INDICES.values()] for x in (a, b)]
        assert [t is None for t in indices[0]] == [t is None for t in indices[1]]
        assert all(torch.equal(t, e) for t, e in zip(*indices, strict=True) if t is not None)
        assert a.get_seq_length() == b.get_seq_length()
