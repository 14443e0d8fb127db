"""A loaded model whose experts stream: made once, asked for figures afterwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from trilobite.checkpoint.source import Source
from trilobite.errors import OffloadError
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.offload.cache import ExpertCache
from trilobite.runtime.offload.guess import Guesser
from trilobite.runtime.offload.plan import AUTO, MemoryPlan, Offload, automatic, divide, parse_size
from trilobite.runtime.offload.policies import POLICIES
from trilobite.runtime.offload.residence import ExpertsInSlots
from trilobite.runtime.offload.slots import Counters
from trilobite.runtime.offload.store import ExpertStore, Places
from trilobite.runtime.routing import MoeLayer, moe_layers

_ATTRIBUTE = "_trilobite_streaming"


@dataclass(frozen=True, kw_only=True, eq=False)
class Streaming:
    """plan: how the memory is divided    cache: None where all experts fit and nothing streams."""

    plan: MemoryPlan
    cache: ExpertCache | None

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of the model streams nothing."""
        return None

    @property
    def counters(self) -> Counters:
        """Of all layers since loading."""
        return Counters() if self.cache is None else self.cache.counters

    @property
    def notes(self) -> list[str]:
        """What a user should know of the disk."""
        return [] if self.cache is None else self.cache.reader.notes


def streaming(model: PreTrainedModel) -> Streaming | None:
    """How a model streams; None for one that was loaded without a bound on memory."""
    return getattr(model, _ATTRIBUTE, None)


def bound(
    model: PreTrainedModel, source: Source, tensors: Mapping[str, Tensor], memory: str | int | Offload
) -> Streaming | None:
    """Let a model that was loaded from mapped files run in so much memory.

    tensors: by name, views of the files of `source`    memory: bytes, a size such as "8GiB", or "auto": a bound only
    where the free memory does not hold the model. Raises OffloadError as `stream` does.
    """
    places = {t.data_ptr(): (source.tensors[n].file, source.tensors[n].offset) for n, t in tensors.items()}
    sizes = {path: file.size for path, file in source.files.items()}
    settings = memory if isinstance(memory, Offload) else None
    if settings is None and str(memory).lower() == AUTO:
        size = automatic(model, sum(f.size for f in source.files.values()), Offload.context)
        try:
            return None if size is None else stream(model, places, sizes, Offload(memory=size))
        except OffloadError:
            return None  # nobody asked for a bound: the system's page cache does what it can
    if settings is None:
        settings = Offload(memory=parse_size(memory))  # type: ignore[arg-type]
    return stream(model, places, sizes, settings)


def stream(model: PreTrainedModel, places: Places, sizes: Mapping[Path, int], settings: Offload) -> Streaming:
    """Let the experts of a model stream from the files that its buffers are views of.

    places: where its buffers come from    sizes: of the files, in bytes
    Raises OffloadError: no packed experts, a policy that nobody knows, too little memory, files that changed.
    """
    if settings.policy not in POLICIES:
        raise OffloadError(f"policy {settings.policy!r}: expected one of {', '.join(POLICIES)}")
    layers = [layer for layer in moe_layers(model) if isinstance(layer.experts, PackedExperts)]
    if not layers:
        raise OffloadError(
            f"{model.name_or_path}: has no packed experts that could stream; compress it first (`trilobite compress`)"
        )
    store = ExpertStore([experts_of(layer) for layer in layers], places)
    active = max(layer.active or 2 for layer in layers)
    plan = divide(
        model,
        settings,
        places,
        experts=store.nbytes,
        slot_bytes=store.slot_bytes,
        count=store.count,
        active=active,
    )
    cache = None
    if not plan.fits:
        cache = ExpertCache(
            store,
            {path: sizes[path] for path in store.files()},
            slots=plan.slots,
            staging=plan.staging,
            shared=settings.pool or plan.slots < active * len(layers),
            policy=POLICIES[settings.policy](),
        )
        attach(layers, cache, Guesser(layers, settings.ahead, settings.guesses))
    found = Streaming(plan=plan, cache=cache)
    model.__dict__[_ATTRIBUTE] = found
    return found


def experts_of(layer: MoeLayer) -> PackedExperts:
    """The packed experts of a layer."""
    assert isinstance(layer.experts, PackedExperts)
    return layer.experts


def attach(layers: Sequence[MoeLayer], cache: ExpertCache, guesser: Guesser) -> None:
    """Let these layers live in a cache. Raises OffloadError where the CPU engine does not run one of them."""
    residences = [ExpertsInSlots(i, experts_of(layer), cache, guesser) for i, layer in enumerate(layers)]
    for layer, residence in zip(layers, residences, strict=True):
        experts_of(layer).residence = residence
