"""Attention text by text against transformers' own, through continuous batching and in pieces."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trilobite.serve import attention as pages
from trilobite.serve.attention import _product, _softmax, attention_by_text


class Kept:
    """A cache that holds the keys and values that came before."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value
        windows = SimpleNamespace(index=0, supports_block_table=False, layer_type="sliding_attention")
        self.layer_to_allocator = [windows]

    def update(
        self, key: Tensor, value: Tensor, layer: int, kwargs: dict[str, object]
    ) -> tuple[Tensor, Tensor]:
        starts = kwargs["cu_seq_lens_k"]
        assert isinstance(starts, dict)
        kwargs["cu_seq_lens_k"] = starts[self.layer_to_allocator[layer].layer_type]
        return self.key, self.value


def naive(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    """Row by row, head by head."""
    heads, tokens, length = q.shape[1], q.shape[2], k.shape[2]
    out = torch.zeros_like(q)
    for h in range(heads):
        for t in range(tokens):
            last = length - tokens + t
            first = 0 if window is None else max(0, last - window + 1)
            kept = h * k.shape[1] // heads
            scores = k[0, kept, first : last + 1] @ q[0, h, t] * q.shape[-1] ** -0.5
            nothing = scores.new_tensor([]) if sinks is None else sinks[h : h + 1]
            weights = torch.cat((scores, nothing)).softmax(0)[: len(scores)]
            out[0, h, t] = weights @ v[0, kept, first : last + 1]
    return out


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("tokens", "length"), [(1, 1), (1, 9), (5, 5), (4, 9)])
def test_one_text(tokens: int, length: int, window: int | None, sinks: bool) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 4, tokens, 8), torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8)
    if tokens == 1 and window is not None:
        k, v = k[:, :, -window:], v[:, :, -window:]  # the cache gives no more
    sink = torch.randn(4) if sinks else None
    expected = naive(q, k, v, window, sink)
    made = _product(q, k, v, None, window) if sink is None else _softmax(q, k, v, None, window, sink, None)
    torch.testing.assert_close(made, expected)
    if sink is None:
        torch.testing.assert_close(_softmax(q, k, v, None, window, None, None), expected)


@pytest.mark.parametrize("width", [8, 32])  # the second one runs natively
def test_texts_do_not_see_each_other(width: int) -> None:
    torch.manual_seed(2)
    q, k, v = torch.randn(1, 4, 4, width), torch.randn(1, 2, 9, width), torch.randn(1, 2, 9, width)
    made, _ = attention_by_text(
        SimpleNamespace(layer_idx=0),
        q,
        k[:, :, :4],
        v[:, :, :4],
        None,
        cache=Kept(k, v),
        read_index=[torch.arange(9)],
        write_index=[torch.arange(4)],
        cu_seq_lens_q=torch.tensor([0, 1, 4]),
        cu_seq_lens_k={"sliding_attention": torch.tensor([0, 6, 9])},
    )
    first = scaled_dot_product_attention(q[:, :, :1], k[:, :, :6], v[:, :, :6], enable_gqa=True)
    second = scaled_dot_product_attention(
        q[:, :, 1:], k[:, :, 6:], v[:, :, 6:], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(made, torch.cat((first, second), 2).transpose(1, 2))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("prompts", [False, True])  # whether the engine reads them where torch could
def test_prompts_and_steps(
    sinks: bool, window: int | None, prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "reads_prompts", lambda: prompts)
    torch.manual_seed(3)
    q, k, v = torch.randn(1, 4, 24, 32), torch.randn(1, 2, 46, 32), torch.randn(1, 2, 46, 32)
    texts = ((0, 12), (0, 20)), ((12, 13), (20, 24)), ((13, 24), (24, 35))
    sink = torch.randn(4) if sinks else None
    made, _ = attention_by_text(
        SimpleNamespace(layer_idx=0),
        q,
        k[:, :, :24],
        v[:, :, :24],
        None,
        cache=Kept(k, v),
        read_index=[torch.arange(46)],
        write_index=[torch.arange(24)],
        cu_seq_lens_q=torch.tensor([0, 12, 13, 24]),
        cu_seq_lens_k={"sliding_attention": torch.tensor([0, 20, 24, 35])},
        sliding_window=window,
        s_aux=sink,
    )
    for (q0, q1), (k0, k1) in texts:
        expected = naive(q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1], window, sink)
        torch.testing.assert_close(made[:, q0:q1], expected.transpose(1, 2))
