"""A step that attends to latents finds what transformers finds with keys and values made of them."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from trilobite.kernels.ops import attends
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.latent import Latents
from trilobite.runtime.load import load
from trilobite.runtime.modules.linear import PackedLinear

pytestmark = pytest.mark.skipif(not attends(torch.zeros(1, 16)), reason="the native library is not installed")

KINDS = ("deepseek_v2", "deepseek_v3")
STEPS = 6


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PreTrainedModel]:
    made: dict[str, Path] = {}

    def of(kind: str) -> PreTrainedModel:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            build_checkpoint(kind, folder / "original")
            compress(str(folder / "original"), folder / "packed", load_recipe("rtn3"))
            made[kind] = folder / "packed"
        model = load(str(made[kind]))
        model.__dict__.pop("forward")  # transformers' own, not replayed
        return model

    return of


@torch.inference_mode()
def logits(model: PreTrainedModel, texts: int = 1, mask: Tensor | None = None) -> Tensor:
    """Of a prompt and of some tokens behind it, [texts, 1 + STEPS, vocabulary]."""
    ids = torch.randint(3, 250, (texts, 9 + STEPS), generator=torch.Generator().manual_seed(texts))
    cache, found, at = DynamicCache(config=model.config), [], 0
    for end in (9, *range(10, 10 + STEPS)):
        seen = None if mask is None else mask[:, :end]
        given = {"past_key_values": cache, "use_cache": True, "attention_mask": seen}
        found.append(model(input_ids=ids[:, at:end], **given).logits[:, -1:])
        at = end
    return torch.cat(found, 1)


def expanded(model: PreTrainedModel) -> PreTrainedModel:
    """The same with transformers' attention."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("sdpa")
    return other


def modules(model: PreTrainedModel) -> list[Latents]:
    return [m.expand_kv for m in model.modules() if isinstance(m.__dict__.get("expand_kv"), Latents)]


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() < 2e-5 * b.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("texts", [1, 3])
def test_against_keys_and_values(
    kind: str, texts: int, packed: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed(kind)
    calls, forward = [0], PackedLinear.forward

    def counted(self: PackedLinear, x: Tensor) -> Tensor:
        calls[0] += self in {m.module.kv_b_proj for m in modules(model)}
        return forward(self, x)

    theirs = logits(expanded(model), texts)
    monkeypatch.setattr(PackedLinear, "forward", counted)
    assert close(logits(model, texts), theirs)
    assert len(modules(model)) == model.config.num_hidden_layers
    assert calls[0] == len(modules(model))  # for the prompt
    binding = modules(model)[-1].binding
    assert binding is not None
    binding.made.out[1] = 0  # a head of the last layer
    assert not close(logits(model, texts), theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_different_lengths(kind: str, packed: Callable[[str], PreTrainedModel]) -> None:
    model = packed(kind)
    mask = torch.ones(2, 9 + STEPS, dtype=torch.int64)
    mask[0, :4] = 0
    ours, theirs = logits(model, 2, mask), logits(expanded(model), 2, mask)
    assert close(ours[:, 1:], theirs[:, 1:])
    assert not close(ours[:, 1:], logits(model, 2)[:, 1:])


def test_weights_that_change(packed: Callable[[str], PreTrainedModel]) -> None:
    model = packed("deepseek_v3")
    before = logits(model)
    kv_b = modules(model)[1].module.kv_b_proj
    kv_b.weight_packed.zero_()
    after = logits(model)
    assert not torch.equal(before, after)
    assert close(after, logits(expanded(model)))


def test_what_stands_before_its_weights(packed: Callable[[str], PreTrainedModel]) -> None:
    """A hook changes what is made of latents, and is called."""
    model = packed("deepseek_v3")
    kv_b = modules(model)[1].module.kv_b_proj
    before, seen = logits(model), []
    kv_b.register_forward_hook(lambda m, x, y: seen.append(len(seen)) or y * 2)
    after = logits(model)
    assert len(seen) == 1 + STEPS
    assert not torch.equal(before, after)
    assert close(after, logits(expanded(model)))


def test_copies(packed: Callable[[str], PreTrainedModel]) -> None:
    model = packed("deepseek_v2")
    ours = logits(model)
    other = copy.deepcopy(model)
    assert all(a.module is not b.module for a, b in zip(modules(model), modules(other), strict=True))
    assert {id(m.module) for m in modules(other)} <= {id(m) for m in other.modules()}
    assert torch.equal(logits(other), ours)
    latents = pickle.loads(pickle.dumps(modules(model)[0]))
    assert latents.module.expand_kv is latents
    assert latents.binding is None


def test_gradients_reach_the_weights(tmp_path: Path) -> None:
    """Of an original model, whose `kv_b_proj` is a parameter: then keys and values are made."""
    build_checkpoint("deepseek_v3", tmp_path / "original")
    model = load(str(tmp_path / "original"))
    model.zero_grad()
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([[5, 6, 7]]), past_key_values=cache, use_cache=True)
    model(input_ids=torch.tensor([[8]]), past_key_values=cache, use_cache=True).logits.sum().backward()
    kv_b = modules(model)[0].module.kv_b_proj
    assert kv_b.weight.grad is not None
    assert float(kv_b.weight.grad.abs().max()) > 0
