"""A step of decoding, natively, against transformers' own attention."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trilobite.kernels.ops import attends
from trilobite.runtime import attention as ours
from trilobite.runtime.attention import ATTENTION, attend_natively, attention

pytestmark = pytest.mark.skipif(not attends(torch.zeros(1, 16)), reason="the native library is not installed")


def both(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
    arguments = module, query, key, value, mask
    return attention(*arguments, scaling=0.2)[0], sdpa_attention_forward(*arguments, scaling=0.2)[0]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", ["heads first", "rows first", "a part of a longer cache"])
def test_layouts_and_masks(batch: int, masked: bool, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(batch, heads, 9, 32) for heads in (6, 2, 2))
    if layout == "rows first":
        key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (key, value))
    elif layout == "a part of a longer cache":
        key, value = (torch.randn(batch, 2, 20, 32)[:, :, 4:13] for _ in range(2))
    mask = None
    if masked:
        mask = torch.rand(batch, 1, 1, 9) < 0.6
        mask[..., 5] = True
    made, expected = both(query[:, :, :1], key, value, mask)
    torch.testing.assert_close(made, expected)
    monkeypatch.setattr(ours, "attend", None)
    with pytest.raises(TypeError):  # it was the native one
        both(query[:, :, :1], key, value, mask)


def test_values_that_are_narrower_than_keys() -> None:
    torch.manual_seed(2)
    query, key, value = torch.randn(2, 4, 1, 48), torch.randn(2, 4, 7, 48), torch.randn(2, 4, 7, 24)
    made, expected = both(query, key, value, None)
    torch.testing.assert_close(made, expected)


def test_what_the_engine_does_not_know_goes_to_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "attend", None)
    query, key, value = (torch.randn(2, 4, 9, 32) for _ in range(3))
    nothing = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    nothing[1] = False
    bias = torch.randn(2, 1, 1, 9)
    one = query[:, :, :1]
    cases = [
        (one, key, value, nothing),
        (one, key, value, bias),
        (one[..., :24], key[..., :24], value[..., :24], None),
    ]
    for case in cases:
        made, expected = both(*case)
        torch.testing.assert_close(made, expected, equal_nan=True)


def test_a_model_generates_the_same_with_padding() -> None:
    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, sliding_window=6, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    ids = torch.randint(1, 64, (2, 8))
    mask = torch.ones_like(ids)
    ids[0, :3] = mask[0, :3] = 0
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    attend_natively(model)
    assert model.config._attn_implementation == ATTENTION
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False), expected)
