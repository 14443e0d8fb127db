"""Biases of experts without gates, which transformers calls `up_proj_bias`, in the module that replaces them."""

from types import SimpleNamespace

import torch
from support.packing import packed_weight, relative_error
from torch import Tensor, nn
from transformers.activations import ACT2FN

from trilobite.formats.weight import dequantize
from trilobite.runtime.modules.experts import PackedExperts

E, H, I = 3, 64, 96  # noqa: E741


class UngatedExperts(nn.Module):
    """What PackedExperts asks of an experts module without gates."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Parameter(torch.empty(E, I, H)), nn.Parameter(torch.empty(E, H, I))
        self.up_proj_bias = nn.Parameter(torch.randn(E, I), requires_grad=False)
        self.act_fn, self.config = ACT2FN["relu"], SimpleNamespace(hidden_act="relu")

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise AssertionError("the packed experts run in its place")


def test_the_bias_reaches_the_operator_and_keeps_its_name() -> None:
    original = UngatedExperts()
    ups = [packed_weight(I, H, "int3-g32", seed=e) for e in range(E)]
    downs = [packed_weight(H, I, "int3-g32", seed=9 + e) for e in range(E)]
    pairs = zip(ups, downs, strict=True)
    parts = {e: {"up_proj": u.tensors(), "down_proj": d.tensors()} for e, (u, d) in enumerate(pairs)}
    module = PackedExperts(original, parts)
    x, index = torch.randn(2, H), torch.tensor([[0], [2]])

    def expected(bias: Tensor) -> Tensor:
        rows = [(t, e, dequantize(ups[e]) @ x[t] + bias[e]) for t, e in enumerate((0, 2))]
        return torch.stack([dequantize(downs[e]) @ torch.relu(up) for _, e, up in rows])

    def run() -> Tensor:
        return module(x, index, torch.ones(2, 1))

    assert relative_error(run(), expected(original.up_proj_bias)) < 1e-5
    module.up_proj_bias.zero_()  # type: ignore[union-attr]
    assert relative_error(run(), expected(torch.zeros(E, I))) < 1e-5
    assert "up_proj_bias" in module.state_dict()
