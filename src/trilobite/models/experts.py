"""Which modules of stacked experts can run packed, what they compute, and what their matrices are called on disk.

Architectures are not told apart by their names: a module's gate is tried on some numbers, and the form of
`kernels/activation.py` that gives the same is taken. A module whose gate is none of them cannot run packed.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from trilobite.errors import ArchitectureError, one_line
from trilobite.kernels import activation
from trilobite.kernels.activation import gate_fn, plain_fn
from trilobite.kernels.expert_table import DOWN, GATE, UP

PROJECTIONS = {"gate_proj": GATE, "w1": GATE, "up_proj": UP, "w3": UP, "down_proj": DOWN, "w2": DOWN}
PROJECTIONS |= {"fc1": UP, "fc2": DOWN, "wi": UP, "wo": DOWN}
"""Names of an expert's matrices in checkpoints."""
EXPERT_NAME = re.compile(rf"^(.*\.experts)\.((?:expert_)?)(\d+)\.({'|'.join(PROJECTIONS)})$")
"""A matrix of an expert: path of the layer's experts, what stands before the expert's number, number, name."""
KEEP = "compress this model with --keep expert"
PLAIN = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "sigmoid", "tanh", "linear")
"""Activations that are tried first, on modules that do not name theirs; none computes what another does."""
NAMES = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function", "dense_act_fn")
"""What configurations call their activation."""
ALPHAS, LIMITS = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")
"""What modules call the numbers of their gates."""


def expert_activation(original: nn.Module) -> str:
    """What an experts module computes between its projections, as operators are told.

    original: on meta, with `down_proj`, and `gate_up_proj` or `up_proj`    Raises ArchitectureError for a module that
    cannot run packed.
    """
    kind = type(original).__name__
    if not _takes_routes(original):
        raise ArchitectureError(f"{kind} is not an experts module that can run packed; {KEEP}")
    with torch.device("cpu"):  # models are built on meta
        return _form(original)


def _form(original: nn.Module) -> str:
    kind = type(original).__name__
    gate, up = _numbers(original)
    gated = isinstance(getattr(original, "gate_up_proj", None), nn.Parameter)
    try:
        expected = _gate(original)(gate, up) if gated else original.act_fn(gate)  # type: ignore[operator]
    except Exception as e:  # of the model's own code, which wants more than it is given
        raise ArchitectureError(
            f"{kind}: its activation cannot be tried ({type(e).__name__}: {one_line(e)}); {KEEP}"
        ) from e
    for name in _candidates(original, gated=gated):
        found = gate_fn(name)(gate, up) if gated else plain_fn(name)(gate)
        if torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
            return name
    raise ArchitectureError(
        f"{kind}: computes its activation in a way of its own that the packed experts do not know; {KEEP}"
    )


def _takes_routes(original: nn.Module) -> bool:
    """Whether this is stacked experts, called with hidden states, indices and weights."""
    stacked = isinstance(getattr(original, "down_proj", None), nn.Parameter)
    return stacked and len(inspect.signature(original.forward).parameters) > 2


def _numbers(original: nn.Module) -> tuple[Tensor, Tensor]:
    """Pairs of gate and up, [1, pairs]: small, on both sides of every limit that the module has, and beyond."""
    line = [0.01, 0.1, 0.5, 1, 1.5, 2, 3, 5, 8, 13, 30]
    line += [part * abs(limit) for limit in _attributes(original, LIMITS) for part in (0.5, 0.99, 1.01, 4)]
    # Models are built with their own dtype as the default, in which two forms of one gate round differently.
    finite = torch.tensor([x for x in line if x < 1e4], dtype=torch.float32)
    both = torch.cat((-finite, finite.new_zeros(1), finite))
    gate, up = torch.meshgrid(both, both, indexing="ij")
    return gate.reshape(1, -1), up.reshape(1, -1)


def _gate(original: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """What the module makes of gate and up, [.., I] each; by its own code, which takes them as one tensor."""

    def run(gate: Tensor, up: Tensor) -> Tensor:
        if getattr(original, "_apply_gate", None) is None:
            plain: Tensor = original.act_fn(gate) * up
            return plain
        both = torch.cat((gate, up), -1)
        if not getattr(original, "is_concatenated", True):
            both = torch.stack((gate, up), -1).flatten(-2)
        made: Tensor = original._apply_gate(both)
        return made

    return run


def _candidates(original: nn.Module, *, gated: bool) -> Iterator[str]:
    """Strings of forms that a module might compute, with the numbers that it has."""
    config = getattr(original, "config", None)
    named = (getattr(config, key, None) for key in NAMES)
    yield from (name for name in named if isinstance(name, str) and name in ACT2FN)
    yield from PLAIN
    if not gated:
        return
    for limit in _attributes(original, LIMITS):
        yield from (activation.spell(activation.GPT_OSS, a, limit) for a in _attributes(original, ALPHAS))
        yield activation.spell(activation.CLAMPED_SILU, limit)
        yield activation.spell(activation.SILU_CLAMPED, limit)
    caps = [
        cap
        for name in ("gate_softcap", "up_softcap")
        for cap in _attributes(_inside(original, name), ("softcap",))
    ]
    if len(caps) == 2:
        yield activation.spell(activation.SOFTCAPPED, *caps)


def _inside(original: nn.Module, name: str) -> object:
    return getattr(getattr(original, "act_fn", None), name, None)


def _attributes(module: object, names: tuple[str, ...]) -> list[float]:
    """The numbers that are called so."""
    values = (getattr(module, name, None) for name in names)
    return [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
