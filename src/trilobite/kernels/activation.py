"""What experts compute between their projections: a closed set of forms, of which operators are told by one string.

    silu, gelu, ...       act(gate) * up: a name of transformers' ACT2FN, without gates act(up)
    gpt_oss[:alpha:limit] (up' + 1) * gate' * sigmoid(alpha * gate')     gpt-oss, 1.702 and 7 unless said; MiniMax-M3
    clamped_silu:limit    silu(gate') * up'                              DeepSeek-V4, Hunyuan 4
    silu_clamped:limit    min(silu(gate), limit) * up'                   Step 3.7
    softcapped:c:d        cap(gate, c) * sigmoid(gate) * cap(up, d)      Inkling 2; cap(x, c) = c * tanh(x / c)

with gate' = min(gate, limit) and up' = up clamped to +-limit.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers.activations import ACT2FN

from trilobite.errors import ArchitectureError

GPT_OSS, CLAMPED_SILU, SILU_CLAMPED, SOFTCAPPED = "gpt_oss", "clamped_silu", "silu_clamped", "softcapped"
NUMBERS = {GPT_OSS: 2, CLAMPED_SILU: 1, SILU_CLAMPED: 1, SOFTCAPPED: 2}
"""Of the forms that have numbers, how many."""
GPT_OSS_NUMBERS = (1.702, 7.0)
Gate = Callable[[Tensor, Tensor], Tensor]


def spell(form: str, *numbers: float) -> str:
    """The string of a form; gpt-oss with its own numbers has none in it."""
    return form if form == GPT_OSS and numbers == GPT_OSS_NUMBERS else ":".join((form, *map(repr, numbers)))


@cache
def split(activation: str) -> tuple[str, tuple[float, ...]]:
    """(form, its numbers) of such a string. Raises ArchitectureError for one that is none."""
    form, *rest = activation.split(":")
    try:
        numbers = tuple(float(number) for number in rest)
    except ValueError:
        numbers = ()
    if form == GPT_OSS and not rest:
        numbers = GPT_OSS_NUMBERS
    if len(numbers) != NUMBERS.get(form, 0) or not (form in NUMBERS or (form in ACT2FN and not rest)):
        known = ", ".join(f"{form}{count * ':number'}" for form, count in NUMBERS.items())
        raise ArchitectureError(
            f"activation {activation!r} is unknown; known are {known} and those of transformers"
        )
    return form, numbers


def gate_fn(activation: str) -> Gate:
    """(gate, up) -> what enters the down projection. Raises ArchitectureError for an unknown activation."""
    form, numbers = split(activation)
    if form in NUMBERS:
        return lambda gate, up: _FORMS[form](gate, up, *numbers)
    act = ACT2FN[form]
    return lambda gate, up: act(gate) * up


def plain_fn(activation: str) -> Callable[[Tensor], Tensor]:
    """The same of experts without gates. Raises ArchitectureError for an activation that needs gates."""
    form, _ = split(activation)
    if form in NUMBERS:
        raise ArchitectureError(f"activation {activation!r} needs gates, which these experts do not have")
    act: Callable[[Tensor], Tensor] = ACT2FN[form]
    return act


def _gpt_oss(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def _clamped_silu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _silu_clamped(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _softcapped(gate: Tensor, up: Tensor, gate_cap: float, up_cap: float) -> Tensor:
    return gate_cap * torch.tanh(gate / gate_cap) * torch.sigmoid(gate) * up_cap * torch.tanh(up / up_cap)


_FORMS: dict[str, Callable[..., Tensor]] = {
    GPT_OSS: _gpt_oss,
    CLAMPED_SILU: _clamped_silu,
    SILU_CLAMPED: _silu_clamped,
    SOFTCAPPED: _softcapped,
}
