"""States of one layer that are as large for a long text as for a short one: what convolutions and linear attention keep.

A model changes them in place, so a recorded step has memory of its own for them, which the layer that it runs for has as
its own for the while; the layer that had it before gets a copy.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trilobite.runtime.step.unsuited import NotNow

KINDS = ("conv_states", "recurrent_states")
"""Of transformers' layers: tables from a number to a tensor, or None."""


def states_of(layer: Any) -> dict[tuple[str, int], Tensor]:
    """What a layer holds, by its kind and number; nothing where it keeps rows alone."""
    found = ((kind, i, t) for kind in KINDS for i, t in getattr(layer, kind, {}).items())
    return {(kind, i): t for kind, i, t in found if t is not None}


def states_by_layer(layers: Sequence[Any]) -> dict[tuple[int, str, int], Tensor]:
    """Of all layers of a cache, by layer, kind and number."""
    return {(at, *key): t for at, layer in enumerate(layers) for key, t in states_of(layer).items()}


def plain_states(layers: Sequence[Any]) -> dict[tuple[int, str, int], Tensor]:
    """Those of all layers of a cache, after such as only inference mode may change got copies in their places."""
    for (at, kind, i), t in states_by_layer(layers).items():
        if t.is_inference():
            getattr(layers[at], kind)[i] = t.clone()
    return states_by_layer(layers)


class States:
    """What a layer of transformers' cache holds beside rows; the layer's own tensors are these."""

    def __init__(self, places: dict[tuple[str, int], Tensor]) -> None:
        """places: where a step reads and writes each of the states."""
        self.places = places
        self._owner: weakref.ref[Any] | None = None

    def follow(self, layer: Any) -> None:
        """Hold what the layer holds, and be what it holds."""
        held = states_of(layer)
        if held.keys() != self.places.keys():
            raise NotNow("its cache holds other states")
        if all(held[key] is place for key, place in self.places.items()):
            return
        for key, place in self.places.items():
            if held[key].shape != place.shape or held[key].dtype != place.dtype:
                raise NotNow(f"its cache holds a state of shape {list(held[key].shape)}")
        self._give_back()
        for (kind, i), place in self.places.items():
            place.copy_(held[kind, i])
            getattr(layer, kind)[i] = place
        self._owner = weakref.ref(layer)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _give_back(self) -> None:
        """Who had these places before keeps what is in them."""
        before = self._owner and self._owner()
        if before is None:
            return
        for (kind, i), t in states_of(before).items():
            if t is self.places.get((kind, i)):
                getattr(before, kind)[i] = t.clone()
