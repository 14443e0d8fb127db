"""A prompt, natively, against transformers' own attention; and what is left to that."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.architectures import build_checkpoint
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

from trilobite.kernels.cpu import attention as engine
from trilobite.kernels.ops import attends
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime import attention as ours
from trilobite.runtime.attention import attention
from trilobite.runtime.load import load

pytestmark = pytest.mark.skipif(not attends(torch.zeros(1, 16)), reason="the native library is not installed")


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every processor, as where it is faster."""
    tier = engine._lib.trilobite_tier().decode()
    monkeypatch.setattr(engine, "PROMPTS", frozenset((tier,)))


def both(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = True, **more: object
) -> tuple[Tensor, Tensor]:
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=causal)
    arguments = module, query, key, value, mask
    return tuple(of(*arguments, **{"scaling": 0.2, **more})[0] for of in (attention, sdpa_attention_forward))


def some(batch: int = 1, heads: int = 8, kv_heads: int = 2, new: int = 9, length: int = 9) -> list[Tensor]:
    torch.manual_seed(new + length)
    return [torch.randn(batch, h, n, 32) for h, n in ((heads, new), (kv_heads, length), (kv_heads, length))]


def causal(new: int, length: int) -> Tensor:
    return torch.ones(1, 1, new, length, dtype=torch.bool).tril(length - new)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("new", "length", "masked"), [(9, 9, False), (9, 9, True), (5, 40, True), (2, 2, False)]
)
@pytest.mark.parametrize("layout", ["heads first", "rows first", "values otherwise than keys"])
def test_layouts_and_masks(
    batch: int, new: int, length: int, masked: bool, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = some(batch, new=new, length=length)
    if layout != "heads first":
        value = value.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "rows first":
        key = key.transpose(1, 2).contiguous().transpose(1, 2)
    mask = causal(new, length).expand(batch, 1, new, length) if masked else None
    made, expected = both(query, key, value, mask)
    torch.testing.assert_close(made, expected)
    assert made.shape == expected.shape
    monkeypatch.setattr(ours, "attend", None)
    with pytest.raises(TypeError):  # it was the native one
        both(query, key, value, mask)


def test_what_the_engine_does_not_know_goes_to_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "attend", None)
    hole, blind = causal(9, 9).clone(), causal(9, 9).clone()
    hole[..., 5, 2], blind[..., 3, :] = False, False
    for mask in (hole, blind, torch.zeros(1, 1, 9, 9)):
        torch.testing.assert_close(*both(*some(), mask), equal_nan=True)
    torch.testing.assert_close(*both(*some(), None, causal=False))
    torch.testing.assert_close(*both(*some(), None, is_causal=False))
    query, key, value = some()
    value.requires_grad_()
    made, _ = both(query, key, value, None)
    made.sum().backward()
    assert value.grad is not None


@pytest.mark.parametrize("heads", [2, 6])
def test_windows_long_prompts_narrow_values(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    window = causal(30, 40) & ~causal(30, 40).tril(40 - 30 - 4)
    short = causal(30, 40).clone()
    short[..., :3] = False
    calls = [
        (*some(heads=heads, new=30, length=40), window),
        (*some(3, heads=heads, new=30, length=40), torch.cat((window, short, causal(30, 40)))),
        (*some(heads=heads, new=1300, length=1300), None),
    ]
    query, key, value = some(heads=heads)
    calls.append((query, key, value[..., :16], None))
    for call in calls:
        torch.testing.assert_close(*both(*call))
    monkeypatch.setattr(ours, "attend", None)
    for call in calls:
        with pytest.raises(TypeError):  # it was the native one
            both(*call)


def test_sinks_are_those_of_the_model() -> None:
    query, key, value = some(2, new=20, length=30)
    mask = torch.zeros(1, 1, 20, 30).masked_fill(~causal(20, 30), torch.finfo(torch.float32).min)
    module = SimpleNamespace(
        num_key_value_groups=4, is_causal=True, sinks=torch.linspace(-2, 3, 8), training=False
    )
    made, _ = ours.attention_beside_own(module, query, key, value, mask, scaling=0.2, s_aux=module.sinks)
    expected, _ = gpt_oss.eager_attention_forward(module, query, key, value, mask, scaling=0.2)
    torch.testing.assert_close(made, expected)


def test_other_tiers_leave_it_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PROMPTS", frozenset())
    monkeypatch.setattr(ours, "attend", None)
    torch.testing.assert_close(*both(*some(), None))


def test_a_model_reads_a_prompt_in_pieces(tmp_path: Path) -> None:
    changes = {"num_attention_heads": 8, "num_key_value_heads": 2}
    build_checkpoint("mixtral", tmp_path / "source", changes=changes)
    compress(str(tmp_path / "source"), tmp_path / "packed", load_recipe("rtn3"))
    model = load(str(tmp_path / "packed"))
    ids = torch.arange(40)[None] % 30
    with torch.inference_mode():
        whole = model(ids).logits
        first = model(ids[:, :25], use_cache=True)
        cache = first.get("cache", first.get("past_key_values"))
        rest = model(ids[:, 25:], past_key_values=cache).logits
        model.set_attn_implementation("sdpa")
        expected = model(ids).logits
    torch.testing.assert_close(torch.cat((first.logits, rest), 1), whole)
    torch.testing.assert_close(whole, expected)
