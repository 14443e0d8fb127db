"""What enters the modules of a block while it runs."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trilobite.quantize.calibrate.weights import BlockWeights


class Watch:
    """Hooks on the modules of a block that note what enters them. Threads have their own notes.

    inputs: names of linears by tensor (so that q, k and v are one)    routed: (states, index) by experts module
    """

    def __init__(self, model: BlockWeights, linears: Sequence[str], experts: Sequence[str]) -> None:
        """Begin to watch."""
        self._notes = threading.local()
        self._handles = [
            model.module(path).register_forward_pre_hook(self._linear(path)) for path in linears
        ] + [
            model.module(path).register_forward_pre_hook(self._experts(path), with_kwargs=True)
            for path in experts
        ]

    def __enter__(self) -> "Watch":
        """Nothing to acquire."""
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """Forget this thread's notes; tensors are kept alive from here on, so that their addresses tell them apart."""
        self._notes.inputs, self._notes.routed = {}, {}

    def inputs(self) -> dict[str, Tensor]:
        """By linear: what entered it, [T, K]."""
        noted: dict[str, list[Tensor]] = self._notes.inputs
        return {name: x[0] if len(x) == 1 else torch.cat(x) for name, x in noted.items()}

    def routed(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By experts module: hidden states [T, H] and the indices of their experts [T, A]."""
        noted: dict[str, tuple[Tensor, Tensor]] = self._notes.routed
        return noted

    def _linear(self, path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._notes.inputs.setdefault(path, []).append(args[0].flatten(0, -2))

        return note

    def _experts(self, path: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values = [*args, *kwargs.values()]
            states = values[0].flatten(0, -2)
            index = next(v for v in values[1:] if isinstance(v, Tensor) and not v.is_floating_point())
            self._notes.routed[path] = states, index.reshape(len(states), -1)

        return note


def same_inputs(inputs: Mapping[str, Tensor]) -> dict[str, str]:
    """By linear: the first linear that the same tensor enters. inputs: of one forward pass, still alive."""
    leaders: dict[tuple[Any, ...], str] = {}
    return {
        name: leaders.setdefault((x.data_ptr(), tuple(x.shape), x.stride(), x._version), name)
        for name, x in inputs.items()
    }
