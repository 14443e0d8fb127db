"""The oracle: both operators in plain PyTorch and float32. Slow, short, and what every fast kernel is tested against."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear
from transformers.activations import ACT2FN

from trilobite.errors import ArchitectureError
from trilobite.formats.weight import PackedWeight, dequantize
from trilobite.kernels.expert_table import DOWN, GATE, UP, expert_weight

GPT_OSS = "gpt_oss"
"""Name of gpt-oss's clamped gate: the only gated activation that is not act(gate) * up."""


def linear(x: Tensor, w: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """y = x (dequant(W) + U V)^T + bias, in float32 (MiLo eq. 3 plus the compensator).

    x: [..., K] bf16 | fp16 | fp32    w: [N, K]    bias: [N] or None    returns: [..., N] in x.dtype
    """
    y = dense_linear(x.float(), dequantize(w), None if bias is None else bias.float())
    return y.to(x.dtype)


def gate_fn(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Gated activation by name: (gate, up) -> act(gate) * up.

    name: a key of transformers' ACT2FN, or "gpt_oss": (min(up, 7) clamped to +-7, plus 1) * g * sigmoid(1.702 g)
    Raises ArchitectureError for an unknown name.
    """
    if name == GPT_OSS:

        def gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return (up + 1) * gate * torch.sigmoid(1.702 * gate)

        return gpt_oss
    if name not in ACT2FN:
        raise ArchitectureError(
            f"activation {name!r} is unknown; known are {GPT_OSS} and those of transformers"
        )
    act = ACT2FN[name]
    return lambda gate, up: act(gate) * up


def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    slab: Tensor,
    table: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    intermediate: int,
    activation: str,
) -> Tensor:
    """Sum over a token's experts of weight * down(act(gate(x)) * up(x)), in float32.

    x: [T, H]    top_k_index: [T, A] int64, E and above = no expert    top_k_weights: [T, A]
    slab, table: see `expert_table`    gate_up_bias: [E, 2I], gate first, or None    down_bias: [E, H] or None
    returns: [T, H] in x.dtype
    """
    hidden = x.shape[1]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    xf, act = x.float(), gate_fn(activation)
    for e in range(table.shape[0]):
        token, slot = torch.where(top_k_index == e)
        if token.numel() == 0:
            continue
        up = expert_weight(slab, table[e, UP], (intermediate, hidden))
        gate = expert_weight(slab, table[e, GATE], (intermediate, hidden))
        down = expert_weight(slab, table[e, DOWN], (hidden, intermediate))
        assert up is not None
        assert down is not None
        rows = xf[token]
        gate_bias, up_bias = (None, None) if gate_up_bias is None else gate_up_bias[e].chunk(2)
        if gate is None:
            h = ACT2FN[activation](linear(rows, up))
        else:
            h = act(linear(rows, gate, gate_bias), linear(rows, up, up_bias))
        y = linear(h, down, None if down_bias is None else down_bias[e])
        out.index_add_(0, token, y * top_k_weights[token, slot, None].float())
    return out.to(x.dtype)
