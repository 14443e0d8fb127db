"""The checkpoint as it would be had its training moved column scales into norms and matrices: what is read is rescaled.

Everything that reads original weights (plan, methods, calibration, fine-tuning) sees one and the same rescaled model,
which computes what the original does.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trilobite.checkpoint.roles import Matrix, cut, read_matrix
from trilobite.checkpoint.source import Source
from trilobite.quantize.columns.streams import Port, Stream

Finder = Callable[[Stream], Tensor]
"""The scales [size] fp32 > 0 of a stream: its readers' columns are divided by them."""


class RescaledWeights:
    """What `Source.rescaling` takes: each tensor with its streams' scales in it, which are found when first asked for.

    Thread safe.
    """

    def __init__(
        self,
        source: Source,
        matrices: Sequence[Matrix],
        streams: Sequence[Stream],
        find: Finder,
        identity: str,
    ) -> None:
        """source: the original    identity: of all that decides about the scales."""
        self.identity = identity
        self._source, self._find = source, find
        self._reads: dict[str, tuple[Stream, Port]] = {
            p.matrix.name: (s, p) for s in streams for p in s.readers
        }
        self.columns = frozenset(self._reads)
        self._writes = {p.matrix.name: (s, p) for s in streams for p in s.writers}
        self._cuts: dict[str, list[Matrix]] = {}
        for m in matrices:
            if m.name != m.source and (m.name in self._reads or m.name in self._writes):
                self._cuts.setdefault(m.source, []).append(m)
        self._found: dict[str, Tensor] = {}
        self._locks = _locks(streams)

    def __getstate__(self) -> dict[str, Any]:
        """All but the locks, for another process."""
        return {name: value for name, value in self.__dict__.items() if name != "_locks"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Arrived in another process."""
        self.__dict__.update(state)
        self._locks = _locks(stream for stream, _ in self._reads.values())

    def apply(self, name: str, w: Tensor) -> Tensor:
        """A matrix by its name, or a whole tensor by its name on disk, rescaled; itself where nothing scales it.

        w: as read, [N, K], [N] or a stack of experts    returns: of the same shape, fp32 where it is rescaled
        """
        if name in self._cuts:
            whole = w.float().clone()
            for m in self._cuts[name]:
                part = cut(whole, m.view)
                part.copy_(self.apply(m.name, part))
            return whole
        if name not in self._writes and name not in self._reads:
            return w
        w = w.to(torch.float32, copy=True)  # first: operators on two dtypes take twice as long
        if name in self._writes:
            stream, port = self._writes[name]
            factor = _spread(self.scales(stream), port)
            w.mul_(factor if w.dim() == 1 else factor[:, None])
        if name in self._reads:
            stream, port = self._reads[name]
            w.div_(_spread(self.scales(stream), port))
        return w

    def scales(self, stream: Stream) -> Tensor:
        """[size] fp32. What a norm's gain in its dtype cannot express is rounded away, so that both sides agree."""
        with self._locks[stream.name]:
            if stream.name not in self._found:
                scales = self._find(stream)
                writer = stream.writers[0].matrix
                if len(writer.shape) == 1:
                    gain = read_matrix(self._source, writer)
                    wide = gain.float()
                    rounded = (wide * scales).to(gain.dtype).float()
                    scales = torch.where(rounded != 0, rounded / wide, 1.0)
                self._found[stream.name] = scales
            return self._found[stream.name]


def _locks(streams: Iterable[Stream]) -> dict[str, threading.Lock]:
    return {s.name: threading.Lock() for s in streams}


def _spread(scales: Tensor, port: Port) -> Tensor:
    """Of the rows or columns of a port, 1 for those that are no channels."""
    if port.channels is None:
        return scales
    return torch.where(port.channels >= 0, scales[port.channels], 1.0)
