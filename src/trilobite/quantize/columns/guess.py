"""The importance of columns as weights alone tell it: no text, and no pass through the model.

What a norm gives has a mean square of 1 before its gain; what a matrix makes of independent channels has that of its
rows. So E[x_j^2] of all that is known to be read (streams.py) follows from gains and rows, but for what activations do
beyond that: outliers that no weight shows are not seen.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trilobite.checkpoint.roles import Matrix, read_matrix
from trilobite.checkpoint.source import Source
from trilobite.quantize.columns.streams import Stream, find_streams

GATES = {"up_proj": "gate_proj", "w3": "w1"}
"""Whose outputs are multiplied before `down` reads them."""


class Guess:
    """E[x^2] of what enters each matrix, found when it is first asked for. Thread safe."""

    def __init__(self, source: Source, matrices: Sequence[Matrix]) -> None:
        """source: rescaled where the recipe says so."""
        self._source = source
        self._matrices = {m.name: m for m in matrices}
        self._read = {p.matrix.name: (s, p) for s in find_streams(source, matrices) for p in s.readers}
        self._found: dict[str, Tensor] = {}
        self._locks = {s.name: threading.Lock() for s, _ in self._read.values()}

    def __bool__(self) -> bool:
        """Whether it knows of any matrix."""
        return bool(self._read)

    def get(self, name: str, k: int) -> tuple[Tensor, dict[str, Any]]:
        """Of a matrix of k columns, [k] fp32; all alike where nothing is known. Nothing is to be noted of it."""
        if name not in self._read:
            return torch.ones(k), {}
        stream, port = self._read[name]
        with self._locks[stream.name]:
            if stream.name not in self._found:
                self._found[stream.name] = self._of_stream(stream)
            channels = self._found[stream.name]
        return channels if port.channels is None else channels[port.channels], {}

    def _of_stream(self, stream: Stream) -> Tensor:
        """[size] fp32."""
        writer = stream.writers[0]
        if len(writer.matrix.shape) == 1:
            return read_matrix(self._source, writer.matrix).float().square()
        rows = self._of_rows(writer.matrix)
        if gate := self._gate(writer.matrix):
            rows = rows * self._of_rows(gate)
        if writer.channels is None:
            return rows
        kept = writer.channels >= 0
        return torch.zeros(stream.size).index_put_((writer.channels[kept],), rows[kept])

    def _of_rows(self, m: Matrix) -> Tensor:
        """What a matrix writes: [N] fp32."""
        squares: Tensor = read_matrix(self._source, m).float().square_() @ self.get(m.name, m.shape[1])[0]
        return squares

    def _gate(self, m: Matrix) -> Matrix | None:
        path, _, name = m.name.removesuffix(".weight").rpartition(".")
        return self._matrices.get(f"{path}.{GATES.get(name)}.weight")
