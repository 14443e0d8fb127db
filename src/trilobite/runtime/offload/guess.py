"""Speculative loading (arXiv:2312.17238, section 3.2): which experts a later layer will probably need.

The later layer's own routing code is applied to the hidden states that this layer routes; where they are a norm's, as in
nearly all models, the later layer's own norm is applied, too (docs/offloading.md compares both).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trilobite.runtime.routing import Arguments, Hook, MoeLayer, Normed, NormListener


class Guesser:
    """Listens to the blocks of all layers, and asks a later block about the arguments of this one."""

    def __init__(self, layers: Sequence[MoeLayer], ahead: int, guesses: int) -> None:
        """ahead: layers    guesses: experts for a token; 0 = none at all."""
        self.ahead, self.guesses = ahead, guesses
        self._layers = layers
        self._seen: list[tuple[Arguments, Normed | None] | None] = [None] * len(layers)
        self._mute = [False] * len(layers)
        if guesses:
            self._norms = NormListener(layers)
            for i, layer in enumerate(layers):
                layer.block.register_forward_pre_hook(Hook(self._hook(i)), with_kwargs=True)

    def _hook(self, i: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._seen[i] = (args, kwargs), self._norms.heard((args, kwargs))

        return hook

    def guess(self, i: int, most: int) -> tuple[int, list[int]] | None:
        """A later layer and at most `most` experts of it, likeliest first; None where nothing can be guessed.

        For many tokens: the experts of most of them.
        """
        seen, self._seen[i] = self._seen[i], None
        target = i + self.ahead
        if seen is None or target >= len(self._layers) or self._mute[target]:
            return None
        layer, (arguments, normed) = self._layers[target], seen
        try:
            with torch.inference_mode():
                found = None if normed is None else layer.route_normed(normed, arguments, self.guesses)
                found = layer.route(arguments, self.guesses) if found is None else found
        except (RuntimeError, TypeError, ValueError, AttributeError):
            found = None  # another kind of block: a decoder's behind the last one of an encoder
        if found is None:
            self._mute[target] = True
            return None
        if len(found) == 1:
            return target, found[0, : min(self.guesses, most)].tolist()
        counts = found.flatten().bincount(minlength=layer.num_experts)
        order = counts.argsort(descending=True, stable=True)[:most]
        return target, [e for e in order.tolist() if counts[e]]
