"""Experts in the memory of a GPU, in front of the host's, in front of the disk where that is bounded too."""

from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trilobite.checkpoint.source import Source
from trilobite.kernels import ops
from trilobite.kernels.ops import BoundExperts
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.modules.residence import AsStored
from trilobite.runtime.offload import plan as planning
from trilobite.runtime.offload.cache import ExpertCache
from trilobite.runtime.offload.cuda import CudaCopies
from trilobite.runtime.offload.host_store import (
    GpuLayout,
    HostStore,
    PinnedStore,
    SlotStore,
    gpu_layout,
    mapped,
)
from trilobite.runtime.offload.misses import TOKENS, Costs, HostShare, measure
from trilobite.runtime.offload.plan import GpuMemory, MemoryPlan, Offload, divide, parse_size
from trilobite.runtime.offload.policies import POLICIES
from trilobite.runtime.offload.residence import Call, ExpertsInSlots, ExpertsOnGpu, ExpertsOnHost
from trilobite.runtime.offload.store import ExpertStore
from trilobite.runtime.offload.streaming import Streamable, Streaming, remember, settings_of, streamable


def gpu_tier(wanted: str | int | GpuMemory, device: str) -> GpuMemory:
    """What a user's word for it means, with an engine. Raises OffloadError: no size, or no such GPU."""
    settings = wanted if isinstance(wanted, GpuMemory) else GpuMemory(memory=parse_size(wanted))
    return settings if settings.engine is not None else replace(settings, engine=CudaCopies(device))


def bound_on_gpu(
    model: PreTrainedModel,
    source: Source,
    tensors: Mapping[str, Tensor],
    memory: str | int | Offload | None,
    gpu: GpuMemory,
) -> Streaming:
    """Let a model that was loaded from mapped files run on a GPU, in so much of its memory.

    tensors: by name, views of the files of `source`    memory: of the host, as `settings_of` takes it
    Raises OffloadError: too little memory of either kind, and as `streamable` does.
    """
    settings = settings_of(model, source, memory) or Offload(memory=None)
    tier = _GpuTier(streamable(model, source, tensors, settings), gpu)
    plan = tier.plan()
    if plan.fits:
        model.to(tier.engine.device)
        return remember(model, Streaming(plan=plan, cache=None))
    return remember(model, tier.stream(plan))


class _GpuTier:
    """One model on its way to a GPU."""

    def __init__(self, wanted: Streamable, settings: GpuMemory) -> None:
        assert settings.engine is not None
        engine = settings.engine
        self.wanted, self.engine, self.settings = wanted, engine, settings
        self.layout: GpuLayout | None = gpu_layout(wanted.modules) if engine.gpu_layout else None

    def plan(self) -> MemoryPlan:
        """How its memory is divided. Raises OffloadError."""
        wanted, stored = self.wanted, self.wanted.store.slot_bytes
        slot_bytes = stored if self.layout is None else self.layout.slot_bytes
        if wanted.settings.memory is not None:
            slot_bytes = max(slot_bytes, stored)  # stored bytes arrive
        return divide(
            wanted.model.name_or_path,
            self.settings.memory,
            planning.fixed_on_gpu(wanted.model, wanted.settings, wanted.active, self.engine.used()),
            wanted.experts(slot_bytes),
            slots=self.settings.slots,
            staging=wanted.settings.staging or planning.GPU_STAGING,
            place="GPU memory",
        )

    def stream(self, plan: MemoryPlan) -> Streaming:
        """Put slots and everything but the experts there. Raises OffloadError."""
        wanted = self.wanted
        below = None
        if wanted.settings.memory is not None:
            below = wanted.in_front_of_disk(planning.fixed_beside_gpu(), wanted.settings.slots)
        store = self._store(None if below is None else below.cache)
        cache = ExpertCache(
            store,
            self.engine.allocate(plan.slots + plan.staging, plan.experts.slot_bytes),
            staging=plan.staging,
            shared=wanted.shared(plan.slots),
            policy=POLICIES[wanted.settings.policy](),
        )
        calls = self._host_calls(store) if self.settings.share else []
        residences = self._settle(cache)
        wanted.model.to(self.engine.device)
        if not calls:
            return Streaming(plan=plan, cache=cache, below=below)
        costs = self._measure(cache, residences[0].bind(wanted.modules[0]), calls[0])
        for residence in residences:
            residence.host = HostShare(costs, calls)
        remark = f"a miss with so many tokens, copied or computed by the host: {costs}"
        return Streaming(plan=plan, cache=cache, below=below, remark=remark)

    def _store(self, lower: ExpertCache | None) -> ExpertStore:
        modules = self.wanted.modules
        if lower is not None:
            return SlotStore(self.engine, lower, modules, self.layout)
        if self.layout is not None:
            return PinnedStore(self.engine, modules, self.layout)
        return HostStore(self.engine, self.wanted.store, mapped(modules))

    def _settle(self, cache: ExpertCache) -> list[ExpertsInSlots]:
        modules, guesser = self.wanted.modules, self.wanted.guesser()
        residences: list[ExpertsInSlots] = []
        for i, module in enumerate(modules):
            if self.layout is None:
                residences.append(ExpertsOnHost(i, module, cache, guesser))
            else:
                residences.append(ExpertsOnGpu(i, module, cache, guesser, self.layout.codings[i]))
        for module, residence in zip(modules, residences, strict=True):
            module.residence = residence
        return residences

    def _host_calls(self, store: ExpertStore) -> list[BoundExperts]:
        """The experts of each layer where they lie on the host; none where the CPU engine cannot add them up."""
        found = [self._host_call(i, module, store) for i, module in enumerate(self.wanted.modules)]
        calls = [call for call in found if call is not None and call.sums_up]
        return calls if len(calls) == len(found) else []

    def _host_call(self, layer: int, module: PackedExperts, store: ExpertStore) -> BoundExperts | None:
        if not isinstance(store, SlotStore):
            stored = module.settle()
            assert isinstance(stored, AsStored)
            return stored.bind(module)  # type: ignore[return-value]
        with store.lower.completed(layer) as table:
            return ops.bind_experts(module.layer(store.lower.slab, table), module.settings)

    def _measure(self, cache: ExpertCache, call: Call, host: BoundExperts) -> Costs:
        """On the experts of the first layer."""
        module, store = self.wanted.modules[0], cache.store
        x = torch.randn(TOKENS[-1], module.hidden_size, device=self.engine.device).to(self.wanted.model.dtype)

        def copy(expert: int, *inputs: Tensor) -> float:
            store.load((0, expert))
            self.engine.wait()
            started = perf_counter()
            cache.ensure(0, [expert])
            call(*inputs)
            self.engine.wait()
            ended = perf_counter()
            cache.drop((0, expert))
            return ended - started

        with torch.inference_mode():
            costs = measure(module.num_experts, x, copy, host)
        cache.slots.reset()
        if isinstance(store, SlotStore):
            store.lower.slots.reset()
        return costs
