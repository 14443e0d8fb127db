"""A recorded step as it runs: calls on places that all tensors keep, and what its cache holds."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int64
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trilobite.runtime.step.index import Index
from trilobite.runtime.step.rows import Rows, Source
from trilobite.runtime.step.states import States

Run = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass(kw_only=True, eq=False)
class Lowered:
    """A step that runs: `steps` one after the other, on the places of `inputs`, then `logits` is there.

    last: the node that writes all of the logits in the end, where it is the engine's
    inputs: as of the trace    words: where each of them begins    rows, states, indices, sources: of the cache's layers
    fixed: tensors of the model that places or results depend on    nbytes: of all places
    counts: whether it reads how many tokens the cache has
    """

    steps: list[Run]
    inputs: tuple[Tensor, ...]
    words: tuple[c_int64, ...]
    logits: Tensor
    last: Any
    rows: dict[int, Rows]
    states: dict[int, States]
    indices: dict[int, Index]
    sources: dict[int, Source]
    fixed: list[Tensor]
    natives: int
    nbytes: int
    counts: bool
    keep: list[Any] = field(default_factory=list)

    def follow(
        self,
        layers: Sequence[Any],
        sources: Sequence[Any],
        lengths: list[int] | None,
        padding: list[int] | None,
    ) -> None:
        """Hold what a cache's layers hold, and have room for one more row. Raises NotNow for caches of other models.

        sources: layers that hold keys and values of sources    lengths: of these, where some are shorter than others
        padding: tokens that only fill texts up, in front of each
        """
        for i, source in self.sources.items():
            source.follow(sources[i], lengths)
        for i, rows in self.rows.items():
            rows.follow(layers[i], padding)
        groups: tuple[Mapping[int, States | Index], ...] = (self.states, self.indices)
        for held in groups:
            for i, each in held.items():
                each.follow(layers[i])

    def advance(self, layers: Sequence[Any]) -> None:
        """Show a cache's layers the row that was written."""
        groups: tuple[Mapping[int, Rows | Index], ...] = (self.rows, self.indices)
        for held in groups:
            for i, each in held.items():
                each.advance(layers[i])

    def run(self) -> Tensor:
        """The logits, in memory of their own. Afterwards `logits` is not there, where `last` is."""
        made = torch.empty_like(self.logits)
        if self.last is not None:
            self.last.out.data = made.data_ptr()
        for call, args, kwargs in self.steps:
            call(*args, **kwargs)
        return made if self.last is not None else made.copy_(self.logits)

    def forget(self) -> None:
        """Hold nothing: what was written is not known, or steps of other texts come."""
        for rows in (*self.rows.values(), *(index.rows for index in self.indices.values())):
            rows.forget()
        for source in self.sources.values():
            source.forget()
