"""Torch's operators, and modules, as calls that put their results where these belong."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trilobite.runtime.step.conditions import same_bits
from trilobite.runtime.step.trace import Node


class Copied:
    """A call whose results are copied to where they belong."""

    def __init__(self, call: Callable[..., Any], places: list[Tensor]) -> None:
        """places: one for each result."""
        self.call, self.places = call, places

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call, and copy."""
        made = self.call(*args, **kwargs)
        for place, t in zip(self.places, made if isinstance(made, tuple | list) else (made,), strict=True):
            place.copy_(t)


def into(node: Node) -> Callable[..., Any] | None:
    """torch's function for an operator, which takes `out=`; None where there is none with the same results.

    It is found once: what looks an operator's arguments up in its schema at every call has, between two layers, code and
    tables to fetch from memory, which takes longer than most of these operators.
    """
    name = node.what._schema.name.removeprefix("aten::")
    function = getattr(torch._C._VariableFunctions, name, None) or getattr(torch._C._nn, name, None)
    if function is None:
        return None
    places = [torch.empty_like(o) for o in node.outputs]
    try:
        function(*node.args, **node.kwargs, out=one_or_all(places))
    except (RuntimeError, TypeError, NotImplementedError):  # not for these arguments: its results are copied
        return None
    made = node.what(*node.args, **node.kwargs)
    pairs = zip(made if isinstance(made, tuple | list) else (made,), places, strict=True)
    return function if all(same_bits(a, b) for a, b in pairs) else None


def one_or_all(places: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """As `out=` takes them."""
    return places[0] if len(places) == 1 else tuple(places)
