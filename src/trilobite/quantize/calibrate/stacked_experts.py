"""The experts of a layer as transformers stacks them: one expert's matrix, the stack of all, what one computes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trilobite.errors import ArchitectureError


def expert_matrix(experts: nn.Module, expert: int, projection: str | None) -> Tensor:
    """One expert's matrix [N, K], a view of a stacked parameter. projection: gate, up or down."""
    name = "down_proj" if projection == "down" else _first(experts)
    stacked = getattr(experts, name)[expert]
    w: Tensor = stacked.mT if getattr(experts, "is_transposed", False) else stacked
    if name != "gate_up_proj":
        return w
    half = int(projection == "up")
    return w.chunk(2)[half] if getattr(experts, "is_concatenated", True) else w[half::2]


def stacked_experts(experts: Any, matrices: Mapping[tuple[int, str], Tensor]) -> dict[str, Tensor]:
    """The stacked parameters of an experts module, made of its matrices: the inverse of `expert_matrix`.

    matrices: by expert and projection (gate, up, down), [N, K]
    """
    count = len(experts.down_proj)

    def stack(*projections: str) -> Tensor:
        rows = [[matrices[e, p] for p in projections] for e in range(count)]
        if len(projections) == 1:
            stacked = torch.stack([row[0] for row in rows])
        elif getattr(experts, "is_concatenated", True):
            stacked = torch.stack([torch.cat(row) for row in rows])
        else:
            stacked = torch.stack([torch.stack(row, 1).flatten(0, 1) for row in rows])
        return stacked.mT if getattr(experts, "is_transposed", False) else stacked

    first = _first(experts)
    return {
        first: stack("gate", "up") if first == "gate_up_proj" else stack("up"),
        "down_proj": stack("down"),
    }


def _first(experts: nn.Module) -> str:
    """Name of the parameter that the inputs meet first: gate and up, or up alone."""
    return "gate_up_proj" if isinstance(getattr(experts, "gate_up_proj", None), Tensor) else "up_proj"


def check_experts(experts: nn.Module, path: str) -> None:
    """Raise ArchitectureError for stacked experts that transformers does not describe to us."""
    asked = ["has_gate", "is_transposed"]
    if getattr(experts, "has_gate", True):
        asked += ["_apply_gate", "is_concatenated"]
    own = any(getattr(experts, a, False) for a in ("has_post_expert_norm", "scales_inputs"))
    if own or not all(hasattr(experts, a) for a in asked):
        raise ArchitectureError(
            f"{path}: {type(experts).__name__} computes in a way of its own that calibration does not know; use a "
            "method without calibration for the experts (search)"
        )


def intermediate(experts: Any, expert: int, x: Tensor) -> Tensor:
    """What enters an expert's down projection: act(gate x) * (up x), with the module's own activation and biases.

    x: [T, H]    returns: [T, I]
    """
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    w = getattr(experts, name)[expert]
    out = x @ (w if experts.is_transposed else w.mT)
    if experts.has_bias:
        out = out + getattr(experts, f"{name}_bias")[expert]
    result: Tensor = experts._apply_gate(out) if experts.has_gate else experts.act_fn(out)
    return result
