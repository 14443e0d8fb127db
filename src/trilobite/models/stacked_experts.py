"""Routed experts of a layer stacked in parameters, for architectures that transformers keeps otherwise.

Both kinds are called by index, as transformers calls its own: hidden_states [T, H], top_k_index [T, A] int64 (E and
above: no expert), top_k_weights [T, A] -> [T, H] in hidden_states.dtype.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Act = Callable[[Tensor], Tensor]


class PlainExperts(nn.Module):
    """down(act(up(x))) for every expert of a layer: what NLLB-MoE and Switch have.

    up_proj [E, I, H], down_proj [E, H, I]; up_proj_bias [E, I] and down_proj_bias [E, H], or None
    """

    has_gate = is_transposed = False
    up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(self, shape: tuple[int, int, int], act_fn: Act, *, bias: bool, std: float) -> None:
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
        self.dropout: Act = nn.Identity()
        self.output_dropout: Act = nn.Identity()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum over each token's experts."""

        def compute(expert: int, x: Tensor, weights: Tensor) -> Tensor:
            h = self.act_fn(linear(x, self.up_proj[expert], _row(self.up_proj_bias, expert)))
            out = linear(self.dropout(h), self.down_proj[expert], _row(self.down_proj_bias, expert))
            return self.output_dropout(out * weights)

        return _sum(compute, self.num_experts, hidden_states, top_k_index, top_k_weights)


class GatedExperts(nn.Module):
    """down(act(gate(x)) * up(x)) for every expert of a layer.

    gate_up_proj [E, 2I, H], gate rows first, down_proj [E, H, I]; transposed: [E, H, 2I], [E, I, H]
    """

    has_gate = is_concatenated = True
    has_bias = is_transposed = False
    scales_inputs = False
    """Whether routing weights multiply what enters the experts, not what they give."""
    passes_on = False
    """Whether an index of E and above gives what it is given."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        act_fn: Act,
        *,
        std: float,
    ) -> None:
        """shape: (E, H, I)    std: of the random weights that a model begins with."""
        super().__init__()
        self.num_experts, hidden, intermediate = shape
        self.act_fn = act_fn
        for name, n, k in (("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)):
            size = (k, n) if self.is_transposed else (n, k)
            self.register_parameter(name, nn.Parameter(torch.randn(self.num_experts, *size) * std))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up

    def _matrix(self, name: str, expert: int) -> Tensor:
        w = self.get_parameter(name)[expert]
        return w.mT if self.is_transposed else w

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum over each token's experts."""

        def compute(expert: int, x: Tensor, weights: Tensor) -> Tensor:
            x = x * weights if self.scales_inputs else x
            out = linear(
                self._apply_gate(linear(x, self._matrix("gate_up_proj", expert))),
                self._matrix("down_proj", expert),
            )
            return out if self.scales_inputs else out * weights

        y = _sum(compute, self.num_experts, hidden_states, top_k_index, top_k_weights)
        if self.passes_on:
            y = y + unchanged(hidden_states, top_k_index, top_k_weights, self.num_experts)
        return y


def unchanged(x: Tensor, index: Tensor, weights: Tensor, experts: int) -> Tensor:
    """The part of experts that give what they are given: those of an index beyond the last expert. returns: [T, H]."""
    share = (weights * (index >= experts)).sum(-1, keepdim=True)
    return (x * share).to(x.dtype)


def _sum(
    compute: Callable[[int, Tensor, Tensor], Tensor], experts: int, x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """The sum over each token's experts of compute(expert, rows of x [M, H], their weights [M, 1])."""
    slots, flat = index.shape[-1], index.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=experts)[:experts].tolist()
    by_slot = weights.flatten().unsqueeze(-1)
    y = torch.zeros_like(x)
    for e, places in enumerate(torch.split(order[: sum(counts)], counts)):
        if len(places):
            tokens = places // slots
            y.index_add_(0, tokens, compute(e, x[tokens], by_slot[places]).to(y.dtype))
    return y


def _row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
