"""Experts that live in slots of memory, in front of the disk or on a GPU: other residences for `PackedExperts`."""

from abc import abstractmethod
from collections import Counter
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


class Routed:
    """One call: x [T, H], index [T, A] and weights [T, A], as the operator `experts` takes them.

    tokens: of each expert that it needs, in ascending order
    """

    def __init__(self, x: Tensor, index: Tensor, weights: Tensor, experts: int) -> None:
        """experts: of the layer, E; any other number in `index` is no expert."""
        self.inputs = x, index, weights
        self._index, self._experts = index.cpu(), experts
        counts = Counter(self._index.flatten().tolist())
        self.tokens = {e: counts[e] for e in sorted(counts) if 0 <= e < experts}

    def on_host(self, experts: list[int]) -> Tensor:
        """The index [T, A] in which all but these experts are E: no expert."""
        chosen = torch.zeros(self._experts + 1, dtype=torch.bool)
        chosen[experts] = True
        return self._index.where(chosen[self._index.clamp(0, self._experts)], self._experts)

    def only(self, experts: list[int]) -> Tensor:
        """The same on the device of x."""
        return self.on_host(experts).to(self.inputs[0].device)


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
        x, index, weights = inputs
        if type(x) is not Tensor or x.device != self.cache.slab.device or torch.compiler.is_compiling():
            return self._stored.run(module, *inputs)
        routed = Routed(x, index, weights, module.num_experts)
        with self.cache.lock:
            call = self.bind(module)
            if not self.cache.holds(self.layer, len(routed.tokens)):
                return self._run_in_groups(module, call, routed)
            if self.host is not None and (here := self._share(self.host, routed)):
                return self._run_shared(call, self.host, routed, here)
            return self._run_as_they_come(call, routed)

    def _groups(self, call: Call, needed: list[int]) -> list[list[int]]:
        """The experts of a call in ascending order, in parts that are worth computing before the next one is there."""
        return [needed]

    def _run_as_they_come(self, call: Call, routed: Routed) -> Tensor:
        """Compute what is there while the rest is read: experts are added up in the order of one call."""
        needed = list(routed.tokens)
        groups = self._groups(call, needed)
        self.cache.ensure(self.layer, needed, later=needed)
        try:
            self._look_ahead()  # guesses queue up behind what is missing: no thread idles while its last piece comes
            if len(groups) == 1:
                self.cache.wait(self.layer, needed)
                return call(*routed.inputs)
            parts = call.parts(*routed.inputs)
            for group in groups:
                self.cache.wait(self.layer, group)
                parts.add(routed.only(group))
        except BaseException:
            self.cache.abandon(self.layer, needed)
            raise
        return parts.result()

    def _share(self, host: HostShare, routed: Routed) -> list[int]:
        """Those of the needed experts that are absent and computed by the host."""
        if not self.cache.store.holds(self.layer, len(routed.tokens)):
            return []
        absent = self.cache.absent(self.layer, list(routed.tokens))
        return host.choose({e: routed.tokens[e] for e in absent}) if absent else []

    def _run_shared(self, call: Call, host: HostShare, routed: Routed, here: list[int]) -> Tensor:
        """Let the host compute its share while what is there is computed and the rest is copied.

        What the host computed follows, for a later call.
        """
        needed = list(routed.tokens)
        absent = self.cache.missing(self.layer, needed)
        groups = [[e for e in needed if e not in absent], [e for e in absent if e not in here]]
        there, coming = (routed.only(group) if group else None for group in groups)
        x, index, weights = routed.inputs
        inputs = x.cpu(), routed.on_host(here), weights.cpu()
        made = list[tuple[Parts, Tensor]]()

        def meanwhile() -> None:
            self._look_ahead()
            parts = call.parts(x, index, weights)
            if there is not None:
                parts.add(there)
            sums = host.compute(self.layer, [routed.tokens[e] for e in here], *inputs)
            made.append((parts, sums.to(x.device)))

        self.cache.ensure(self.layer, needed, later=here, meanwhile=meanwhile)
        ((parts, sums),) = made
        if coming is not None:
            parts.add(coming)
        return parts.result(sums)

    def _run_in_groups(self, module: PackedExperts, call: Call, routed: Routed) -> Tensor:
        """More experts than slots: group by group, each brought once, all added up with the bits of one call."""
        if not call.sums_up:
            return self._stored.run(module, *routed.inputs)
        parts = call.parts(*routed.inputs)
        needed = list(routed.tokens)
        for group in self.cache.stream(self.layer, needed):
            if group[-1] == needed[-1]:
                self._look_ahead()
            parts.add(routed.only(group))
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
