"""How fast a model will be whose experts come from the disk."""

from dataclasses import dataclass

from trilobite.runtime.offload.store import FileStore
from trilobite.runtime.offload.streaming import Streaming


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """bandwidth: bytes per second of the disk    tokens: per second that it allows at batch 1."""

    bandwidth: float
    tokens: float


def expectation(found: Streaming) -> Expectation | None:
    """A short look at the disk, and what it allows; None where nothing comes from it.

    As if at every token every expert were as likely as any other, so that as many are hits as have slots: a text that
    keeps to some of them runs faster. Raises OffloadError when the disk fails.
    """
    if found.cache is None or not isinstance(found.cache.store, FileStore):
        return None
    plan, store = found.plan, found.cache.store
    experts = plan.experts
    needed = experts.active * len(store.rows) * experts.nbytes / experts.count
    bandwidth = store.speed()
    return Expectation(bandwidth=bandwidth, tokens=bandwidth / (needed * (1 - plan.slots / experts.count)))
