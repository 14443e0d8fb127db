"""PackedMatrix: one packed weight as the buffers of a module."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trilobite.errors import CheckpointError
from trilobite.formats.weight import SUFFIXES, PackedWeight, check

BUFFERS = {suffix: f"weight_{suffix}" for suffix in SUFFIXES}


class PackedMatrix(nn.Module):
    """One packed weight [N, K]: buffers `weight_packed`, `weight_scale`, … (formats.weight.SUFFIXES) as stored.

    Buffers, not parameters: transformers takes a model's dtype from its first parameter, and ours are bytes.
    """

    def __init__(self, shape: tuple[int, int], parts: dict[str, Tensor]) -> None:
        """parts: the tensors by suffix (`packed`, ...), on the meta device where they are yet to be loaded."""
        nn.Module.__init__(self)  # not that of nn.Linear, which would make a weight
        self.shape, self.exponent = shape, 0
        self._fill(parts)

    def _fill(self, parts: Mapping[str, Tensor | None]) -> None:
        # What `register_buffer` and `__setattr__` come to, of which there would be a hundred thousand.
        self._buffers.update({name: parts.get(suffix) for suffix, name in BUFFERS.items()})

    def packed(self) -> PackedWeight:
        """The packed weight, as views of the buffers."""
        parts: dict[str, Any] = {suffix: self._buffers[name] for suffix, name in BUFFERS.items()}
        return PackedWeight(shape=self.shape, exponent=self.exponent, **parts)

    def replace(self, w: PackedWeight) -> None:
        """Put other tensors in the place of the buffers."""
        self.exponent = w.exponent
        self._fill(w.tensors())

    def clear(self) -> None:
        """Let the buffers go: the weight lives elsewhere."""
        self._fill({})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Buffers move and keep their types: `model.to(bfloat16)` does not change how a compensator is stored."""
        before = {n: b for n, b in self._buffers.items() if b is not None and b.is_floating_point()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for buffer in BUFFERS.values():
            if (part := destination.get(name := prefix + buffer)) is not None:
                destination[name] = alone(part)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: with the bytes of the buffers, not of all that their memory is part of."""
        buffers = {name: None if part is None else alone(part) for name, part in self._buffers.items()}
        return {**self.__dict__, "_buffers": buffers}


def alone(part: Tensor) -> Tensor:
    """The same memory in a storage of its own, which is what torch copies and pickles of a tensor."""
    if not part.is_cpu or part.untyped_storage().nbytes() == part.nbytes or not part.is_contiguous():
        return part
    return (
        torch.from_numpy(part.detach().flatten().view(torch.uint8).numpy()).view(part.dtype).view(part.shape)
    )


def check_loaded(matrix: PackedMatrix, name: str) -> None:
    """Raise CheckpointError when a buffer was not loaded, ShapeError when the parts do not fit together."""
    for buffer, part in matrix._buffers.items():
        if part is not None and part.is_meta:
            raise CheckpointError(f"{name}.{buffer} is missing from the checkpoint; copy it again")
    check(matrix.packed(), name)
