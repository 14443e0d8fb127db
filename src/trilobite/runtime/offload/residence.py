"""Experts that live in slots of memory in front of the disk: another residence for `PackedExperts`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trilobite.errors import OffloadError
from trilobite.kernels import ops
from trilobite.runtime.modules.experts import BIASES, PackedExperts
from trilobite.runtime.modules.residence import Residence
from trilobite.runtime.offload.cache import ExpertCache
from trilobite.runtime.offload.guess import Guesser


class ExpertsInSlots(Residence[PackedExperts]):
    """One layer's part of an `ExpertCache`. The buffers stay views of the mapped file, which nothing here reads.

    The CPU engine runs the experts where they lie: its call is bound to the slab of all slots, and finds the experts of
    this layer through a table whose rows are rewritten in place.
    """

    in_buffers = True

    def __init__(self, layer: int, module: PackedExperts, cache: ExpertCache, guesser: Guesser) -> None:
        """layer: its number in the cache. Raises OffloadError where the CPU engine does not run the layer."""
        self.layer, self.cache, self.guesser = layer, cache, guesser
        self._stored = module.settle()
        self._bind(module)

    def _bind(self, module: PackedExperts) -> ops.BoundExperts:
        """The call, made again when the module has got other biases or settings."""
        biases = [module._parameters[name] for name in BIASES]
        if self.binding is not None and self.binding.holds(*biases):
            return self.binding.made  # type: ignore[no-any-return]
        with self.cache.completed(self.layer) as table:
            call = ops.bind_experts(module.layer(self.cache.slab, table), module.settings)
        if call is None:
            raise OffloadError(
                f"the CPU engine does not run these experts ({module.extra_repr()}), which it must for a model to "
                "stream; `trilobite doctor` says what it runs: load without memory="
            )
        self.binding = ops.Binding(call, *biases)
        return call

    def run(self, module: PackedExperts, *inputs: Tensor) -> Tensor:
        """Bring the experts of this call into memory, begin to read those of the next layer, and compute."""
        x, index, weights = inputs
        if type(x) is not Tensor or not x.is_cpu or torch.compiler.is_compiling():
            return self._stored.run(module, *inputs)
        needed = [e for e in sorted(set(index.flatten().tolist())) if 0 <= e < module.num_experts]
        with self.cache.lock:
            call = self._bind(module)
            if not self.cache.holds(self.layer, len(needed)):
                return self._run_in_groups(module, call, needed, *inputs)
            self.cache.ensure(self.layer, needed)
            self._look_ahead()
            return call(x, index, weights)

    def _run_in_groups(
        self, module: PackedExperts, call: ops.BoundExperts, needed: list[int], *inputs: Tensor
    ) -> Tensor:
        """More experts than slots: group by group, each read once, all added up in the order of one call."""
        if not call.sums_up:
            return self._stored.run(module, *inputs)
        x, index, weights = inputs
        sums = torch.zeros(x.shape, dtype=torch.float32)
        y = torch.zeros_like(x)
        for group in self.cache.stream(self.layer, needed):
            chosen = torch.zeros(module.num_experts + 1, dtype=torch.bool)
            chosen[group] = True
            mine = index.where(chosen[index.clamp(0, module.num_experts)], module.num_experts)
            if group[-1] == needed[-1]:
                self._look_ahead()
            y = call(x, mine, weights, sums)
        return y

    def _look_ahead(self) -> None:
        guess = self.guesser.guess(self.layer, self.cache.spare)
        if guess is not None:
            self.cache.guess(*guess)

    def stored(self, module: PackedExperts) -> Any:
        """The buffers."""
        return self._stored.stored(module)

    def moved(
        self, module: PackedExperts, fn: Callable[[Tensor], Tensor]
    ) -> "Residence[PackedExperts] | None":
        """Stays for anything but a move to another device, which ends the streaming."""
        probe = torch.empty(0, dtype=torch.uint8)
        return self if fn(probe).device == probe.device else None

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of the module settles anew, in the mapped file."""
        return None
