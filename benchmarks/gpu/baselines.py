"""What benchmarks/gpu/measure.py holds our experts against: the same layer in bf16 by torch's grouped_mm."""

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """torch's product by group: public since 2.10, private before. rows [S, K], matrices [E, K, N], ends [E] int32."""
    run = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return run(rows, matrices, offs=ends)


def sort_slots(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Slots in the order of their experts, as grouped_mm wants them.

    index: [T, A]    returns: slots [S = T A], and where each expert's end, [E] int32
    """
    slots = index.flatten().argsort(stable=True)
    counts = (index.flatten()[:, None] == torch.arange(experts, device=index.device)).sum(0)
    return slots, counts.cumsum(0).to(torch.int32)


def bf16_experts(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The whole layer, routing included.

    x: [T, H]    index, weights: [T, A]    gate_up: [E, 2I, H]    down: [E, H, I]    returns: [T, H]
    """
    slots, ends = sort_slots(index, gate_up.shape[0])
    token = slots // index.shape[1]
    gate, up = grouped_mm(x[token], gate_up.transpose(1, 2), ends).chunk(2, -1)
    y = grouped_mm(F.silu(gate) * up, down.transpose(1, 2), ends)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return out.index_add_(0, token, (y * weights.flatten()[slots, None]).float()).to(x.dtype)


def both_products(rows: Tensor, h: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor) -> None:
    """The two products of that layer alone. rows: [S, H] sorted    h: [S, I]    ends: [E] int32."""
    grouped_mm(rows, gate_up.transpose(1, 2), ends)
    grouped_mm(h, down.transpose(1, 2), ends)
