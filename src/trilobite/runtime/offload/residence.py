"""Experts that live in slots of memory, in front of the disk or on a GPU: other residences for `PackedExperts`."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from trilobite.errors import OffloadError
from trilobite.kernels import ops
from trilobite.kernels.layer import Codings, ExpertsLayer
from trilobite.runtime.modules.experts import BIASES, PackedExperts
from trilobite.runtime.modules.residence import Residence
from trilobite.runtime.offload.cache import ExpertCache
from trilobite.runtime.offload.guess import Guesser
from trilobite.runtime.offload.misses import HostShare


class Parts(Protocol):
    """A call in several, some of its experts after others."""

    def add(self, index: Tensor) -> None:
        """Compute the experts of `index` [T, A], E for all others; in ascending order."""

    def result(self, others: Tensor | None = None) -> Tensor:
        """[T, H] in x.dtype. others: [T, H] fp32, what was computed elsewhere."""


class Call(Protocol):
    """The experts of a layer, where they lie now."""

    sums_up: bool
    """Whether it runs in parts."""

    def __call__(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the operator `experts`."""

    def parts(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Parts:
        """Begin such a call."""


class ExpertsInSlots(Residence[PackedExperts]):
    """One layer's part of an `ExpertCache`. The buffers stay views of the mapped file."""

    in_buffers = True

    def __init__(self, layer: int, module: PackedExperts, cache: ExpertCache, guesser: Guesser) -> None:
        """layer: its number in the cache."""
        self.layer, self.cache, self.guesser = layer, cache, guesser
        self.host: HostShare | None = None
        """Computes a share of the misses, where that is worth it."""
        self._stored = module.settle()

    def bind(self, module: PackedExperts) -> Call:
        """The call, made again when the module has got other biases or settings. Raises OffloadError."""
        biases = [module._parameters[name] for name in BIASES]
        if self.binding is None or not self.binding.holds(*biases):
            self.binding = ops.Binding(self._make(module), *biases)
        call: Call = self.binding.made
        return call

    @abstractmethod
    def _make(self, module: PackedExperts) -> Call:
        """A call on the slots."""

    def run(self, module: PackedExperts, *inputs: Tensor) -> Tensor:
        """Bring the experts of this call into slots, begin to bring those of the next layer, and compute."""
        x, index, _ = inputs
        if type(x) is not Tensor or x.device != self.cache.slab.device or torch.compiler.is_compiling():
            return self._stored.run(module, *inputs)
        flat = index.flatten().tolist()
        needed = [e for e in sorted(set(flat)) if 0 <= e < module.num_experts]
        with self.cache.lock:
            call = self.bind(module)
            if not self.cache.holds(self.layer, len(needed)):
                return self._run_in_groups(module, call, needed, *inputs)
            if self.host is None or not (here := self._share(self.host, needed, flat)):
                return self._run_as_they_come(module, call, needed, *inputs)
            return self._run_shared(module, call, (needed, here), *inputs)

    def _groups(self, call: Call, needed: list[int]) -> list[list[int]]:
        """The experts of a call in ascending order, in parts that are worth computing before the next one is there."""
        return [needed]

    def _run_as_they_come(
        self, module: PackedExperts, call: Call, needed: list[int], *inputs: Tensor
    ) -> Tensor:
        """Compute what is there while the rest is read: experts are added up in the order of one call."""
        groups = self._groups(call, needed)
        self.cache.ensure(self.layer, needed, later=needed)
        try:
            self._look_ahead()  # guesses queue up behind what is missing: no thread idles while its last piece comes
            if len(groups) == 1:
                self.cache.wait(self.layer, needed)
                return call(*inputs)
            parts = call.parts(*inputs)
            for group in groups:
                self.cache.wait(self.layer, group)
                parts.add(only(inputs[1], group, module.num_experts))
        except BaseException:
            self.cache.abandon(self.layer, needed)
            raise
        return parts.result()

    def _share(self, host: HostShare, needed: list[int], flat: list[int]) -> list[int]:
        """Those of the needed experts that are absent and computed by the host."""
        if not self.cache.store.holds(self.layer, len(needed)):
            return []
        absent = self.cache.absent(self.layer, needed)
        return host.choose({e: flat.count(e) for e in absent}) if absent else []

    def _run_shared(
        self, module: PackedExperts, call: Call, experts: tuple[list[int], list[int]], *inputs: Tensor
    ) -> Tensor:
        """Let the host compute its share while others are copied; then its experts follow, for a later call."""
        x, index, weights = inputs
        needed, here = experts
        assert self.host is not None
        host, made = self.host, list[Tensor]()
        mine = only(index, here, module.num_experts)

        def meanwhile() -> None:
            self._look_ahead()
            made.append(host.compute(self.layer, x, mine, weights))

        self.cache.ensure(self.layer, needed, later=here, meanwhile=meanwhile)
        parts = call.parts(x, index, weights)
        if len(here) < len(needed):
            parts.add(only(index, [e for e in needed if e not in here], module.num_experts))
        return parts.result(made[0])

    def _run_in_groups(self, module: PackedExperts, call: Call, needed: list[int], *inputs: Tensor) -> Tensor:
        """More experts than slots: group by group, each brought once, all added up with the bits of one call."""
        if not call.sums_up:
            return self._stored.run(module, *inputs)
        parts = call.parts(*inputs)
        for group in self.cache.stream(self.layer, needed):
            if group[-1] == needed[-1]:
                self._look_ahead()
            parts.add(only(inputs[1], group, module.num_experts))
        return parts.result()

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
        probe = self.cache.slab[:0]
        return self if fn(probe).device == probe.device else None

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of the module settles anew, in the mapped file."""
        return None


class ExpertsOnHost(ExpertsInSlots):
    """The CPU engine runs the experts in slots of the host.

    Its call is bound to the slab of all slots, and finds the experts of this layer through a table whose rows are
    rewritten in place.
    """

    def _groups(self, call: Call, needed: list[int]) -> list[list[int]]:
        """Cut before each expert that has to be waited for, if the engine can add up in parts."""
        absent, groups = self.cache.missing(self.layer, needed), [needed[:1]]
        for e in needed[1:]:
            if e in absent and call.sums_up:
                groups.append([])
            groups[-1].append(e)
        return groups

    def _make(self, module: PackedExperts) -> Call:
        with self.cache.completed(self.layer) as table:
            call = ops.bind_experts(module.layer(self.cache.slab, table), module.settings)
        if call is None:
            raise OffloadError(
                f"the CPU engine does not run these experts ({module.extra_repr()}), which it must for a model to "
                "stream; `trilobite doctor` says what it runs: load without memory="
            )
        return call


class ExpertsOnGpu(ExpertsInSlots):
    """The GPU kernels run the experts in slots of a GPU; the buffers stay on the host."""

    buffers_stay: ClassVar[bool] = True

    def __init__(
        self, layer: int, module: PackedExperts, cache: ExpertCache, guesser: Guesser, codings: Codings
    ) -> None:
        """codings: of this layer's experts."""
        super().__init__(layer, module, cache, guesser)
        self._codings = codings

    def _make(self, module: PackedExperts) -> Call:
        with torch.inference_mode(False):  # it changes outside of it, too
            table = torch.empty_like(self.cache.tables[self.layer], device=self.cache.slab.device)
        slab = self.cache.slab.view(torch.int32)
        return _GpuCall(module.layer(slab, table, self._codings), self.cache, self.layer)

    def run(self, module: PackedExperts, *inputs: Tensor) -> Tensor:
        """As all do. Raises OffloadError for compiled graphs, which do not bring experts."""
        if torch.compiler.is_compiling():
            raise OffloadError(
                "a compiled step does not stream experts; load without gpu_memory, or do not compile"
            )
        return super().run(module, *inputs)


class _GpuCall:
    """The table on the GPU follows the cache's before every call."""

    sums_up = True

    def __init__(self, layer: ExpertsLayer, cache: ExpertCache, number: int) -> None:
        self._layer, self._cache, self._number = layer, cache, number
        self._seen = -1

    def _current(self) -> ExpertsLayer:
        changes = self._cache.changes[self._number]
        if self._seen != changes:
            self._layer.table.copy_(self._cache.tables[self._number])
            self._seen = changes
        return self._layer

    def __call__(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return ops.experts(x, top_k_index, top_k_weights, self._current())

    def parts(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Parts:
        return _GpuParts(self, ops.experts_in_parts(x, top_k_index, top_k_weights, self._current()))


class _GpuParts:
    """The table may have changed from one part to the next."""

    def __init__(self, call: _GpuCall, made: Parts) -> None:
        self._call, self._made = call, made
        self.result = made.result

    def add(self, index: Tensor) -> None:
        self._call._current()
        self._made.add(index)


def only(index: Tensor, experts: list[int], count: int) -> Tensor:
    """An index [T, A] in which all but these of `count` experts are "no expert"."""
    chosen = torch.zeros(count + 1, dtype=torch.bool, device=index.device)
    chosen[experts] = True
    return index.where(chosen[index.clamp(0, count)], count)
