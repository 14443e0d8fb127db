"""A loaded model whose experts stream: made once, asked for figures afterwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from trilobite.checkpoint.source import Source
from trilobite.errors import OffloadError
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.offload import plan as planning
from trilobite.runtime.offload.cache import ExpertCache
from trilobite.runtime.offload.guess import Guesser
from trilobite.runtime.offload.memory import Arena
from trilobite.runtime.offload.plan import AUTO, Experts, MemoryPlan, Offload, divide, parse_size
from trilobite.runtime.offload.policies import POLICIES
from trilobite.runtime.offload.residence import ExpertsOnHost
from trilobite.runtime.offload.slots import Counters
from trilobite.runtime.offload.store import FileStore, Places
from trilobite.runtime.routing import MoeLayer, moe_layers

_ATTRIBUTE = "_trilobite_streaming"


@dataclass(frozen=True, kw_only=True, eq=False)
class Streaming:
    """plan: how the memory is divided    cache: None where all experts fit and nothing streams.

    below: the tier that the cache's experts come from, where that is another cache
    remark: what else a user should know
    """

    plan: MemoryPlan
    cache: ExpertCache | None
    below: "Streaming | None" = None
    remark: str = ""

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of the model streams nothing."""
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Nor does one that was pickled."""
        return type(None), ()

    @property
    def counters(self) -> Counters:
        """Of all layers since loading."""
        return Counters() if self.cache is None else self.cache.counters

    @property
    def notes(self) -> list[str]:
        """What a user should know."""
        own = [str(self.plan), *([self.remark] if self.remark else [])]
        if self.below is not None:
            return [*own, *self.below.notes]
        return own if self.cache is None else [*own, *self.cache.store.notes]


def streaming(model: PreTrainedModel) -> Streaming | None:
    """How a model streams; None for one that was loaded without a bound on memory."""
    return getattr(model, _ATTRIBUTE, None)


def remember(model: PreTrainedModel, found: Streaming) -> Streaming:
    """What `streaming` answers from now on."""
    model.__dict__[_ATTRIBUTE] = found
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Streamable:
    """A model whose buffers are views of mapped files, from which its experts can stream.

    places: where its buffers come from
    """

    model: PreTrainedModel
    layers: Sequence[MoeLayer]
    store: FileStore
    places: Places
    settings: Offload

    @property
    def modules(self) -> list[PackedExperts]:
        """The experts of each layer."""
        return [experts_of(layer) for layer in self.layers]

    @property
    def active(self) -> int:
        """A."""
        return max(layer.active or 2 for layer in self.layers)

    def experts(self, slot_bytes: int) -> Experts:
        """For a plan."""
        store = self.store
        return Experts(nbytes=store.nbytes, count=store.count, active=self.active, slot_bytes=slot_bytes)

    def shared(self, slots: int) -> bool:
        """Whether all layers share their slots."""
        return self.settings.pool or slots < self.active * len(self.layers)

    def guesser(self) -> Guesser:
        """Listens to the blocks of all layers."""
        return Guesser(self.layers, self.settings.ahead, self.settings.guesses)

    def in_front_of_disk(self, fixed: planning.Fixed, slots: int | None) -> Streaming:
        """A cache in the memory of the host, where not all experts fit there. Raises OffloadError."""
        chosen = self.settings
        assert chosen.memory is not None
        plan = divide(
            self.model.name_or_path,
            chosen.memory,
            fixed,
            self.experts(self.store.slot_bytes),
            slots=slots,
            staging=planning.staging_of(chosen, self.store.slot_bytes),
            place="memory",
        )
        if plan.fits:
            return Streaming(plan=plan, cache=None)
        self.store.open()
        cache = ExpertCache(
            self.store,
            Arena(plan.slots + plan.staging, self.store.slot_bytes),
            staging=plan.staging,
            shared=self.shared(plan.slots),
            policy=POLICIES[chosen.policy](),
        )
        return Streaming(plan=plan, cache=cache)


def streamable(
    model: PreTrainedModel, source: Source, tensors: Mapping[str, Tensor], settings: Offload
) -> Streamable:
    """Find out how the experts of a model can stream.

    tensors: by name, views of the files of `source`
    Raises OffloadError: no packed experts, a policy that nobody knows, files that changed.
    """
    if settings.policy not in POLICIES:
        raise OffloadError(f"policy {settings.policy!r}: expected one of {', '.join(POLICIES)}")
    layers = [layer for layer in moe_layers(model) if isinstance(layer.experts, PackedExperts)]
    if not layers:
        raise OffloadError(
            f"{model.name_or_path}: has no packed experts that could stream; compress it first (`trilobite compress`)"
        )
    places = {t.data_ptr(): (source.tensors[n].file, source.tensors[n].offset) for n, t in tensors.items()}
    sizes: Mapping[Path, int] = {path: file.size for path, file in source.files.items()}
    store = FileStore([experts_of(layer) for layer in layers], places, sizes)
    return Streamable(model=model, layers=layers, store=store, places=places, settings=settings)


def settings_of(model: PreTrainedModel, source: Source, memory: str | int | Offload | None) -> Offload | None:
    """What a user's word for it means: bytes, a size such as "8GiB", or "auto": a bound where one is needed, else None.

    Raises OffloadError for what is no size.
    """
    if isinstance(memory, Offload):
        return memory
    if memory is None or str(memory).lower() != AUTO:
        return None if memory is None else Offload(memory=parse_size(memory))
    nbytes = sum(f.size for f in source.files.values())
    size = planning.automatic(model, nbytes, Offload.context)
    return None if size is None else Offload(memory=size)


def bound(
    model: PreTrainedModel,
    source: Source,
    tensors: Mapping[str, Tensor],
    memory: str | int | Offload | None,
) -> Streaming | None:
    """Let a model that was loaded from mapped files run in so much memory of the host.

    tensors: by name, views of the files of `source`    memory: as `settings_of` takes it
    Raises OffloadError: too little memory, and as `streamable` does.
    """
    settings = settings_of(model, source, memory)
    if settings is None or settings.memory is None:
        return None
    try:
        return _stream(streamable(model, source, tensors, settings))
    except OffloadError:
        if str(memory).lower() == AUTO:
            return None  # nobody asked for a bound: the system's page cache does what it can
        raise


def _stream(wanted: Streamable) -> Streaming:
    settings = wanted.settings
    fixed = planning.fixed_on_host(wanted.model, settings, wanted.places)
    found = wanted.in_front_of_disk(fixed, settings.slots)
    if found.cache is not None:
        cache, guesser = found.cache, wanted.guesser()
        residences = [ExpertsOnHost(i, module, cache, guesser) for i, module in enumerate(wanted.modules)]
        for module, residence in zip(wanted.modules, residences, strict=True):
            residence.bind(module)
        for module, residence in zip(wanted.modules, residences, strict=True):
            module.residence = residence
    return remember(wanted.model, found)


def experts_of(layer: MoeLayer) -> PackedExperts:
    """The packed experts of a layer."""
    assert isinstance(layer.experts, PackedExperts)
    return layer.experts
