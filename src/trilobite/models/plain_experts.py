"""Routed experts without gates, stacked: what NLLB-MoE and Switch have, and transformers keeps module by module."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class PlainExperts(nn.Module):
    """down(act(up(x))) for every expert of a layer, by index, as transformers' other experts are asked.

    up_proj [E, I, H], down_proj [E, H, I]; up_proj_bias [E, I] and down_proj_bias [E, H], or None
    forward: hidden_states [T, H], top_k_index [T, A] int64, top_k_weights [T, A] -> [T, H] in hidden_states.dtype
    """

    has_gate = is_transposed = False
    up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self, shape: tuple[int, int, int], act_fn: Callable[[Tensor], Tensor], *, bias: bool, std: float
    ) -> None:
        """shape: (E, H, I)    std: of the random weights that a model begins with."""
        super().__init__()
        self.num_experts, hidden, intermediate = shape
        self.act_fn, self.has_bias = act_fn, bias
        self.up_proj = nn.Parameter(torch.randn(self.num_experts, intermediate, hidden) * std)
        self.down_proj = nn.Parameter(torch.randn(self.num_experts, hidden, intermediate) * std)
        for name, width in (("up_proj_bias", intermediate), ("down_proj_bias", hidden)):
            self.register_parameter(
                name, nn.Parameter(torch.zeros(self.num_experts, width)) if bias else None
            )
        self.dropout: Callable[[Tensor], Tensor] = nn.Identity()
        self.output_dropout: Callable[[Tensor], Tensor] = nn.Identity()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum over each token's experts; index E and above means no expert."""
        slots, experts = top_k_index.shape[-1], top_k_index.flatten()
        order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=self.num_experts)[: self.num_experts].tolist()
        weights = top_k_weights.flatten().unsqueeze(-1)
        y = torch.zeros_like(hidden_states)
        for e, places in enumerate(torch.split(order[: sum(counts)], counts)):
            if len(places):
                tokens = places // slots
                h = self.act_fn(linear(hidden_states[tokens], self.up_proj[e], _row(self.up_proj_bias, e)))
                out = linear(self.dropout(h), self.down_proj[e], _row(self.down_proj_bias, e))
                y.index_add_(0, tokens, self.output_dropout(out * weights[places]).to(y.dtype))
        return y


def _row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
