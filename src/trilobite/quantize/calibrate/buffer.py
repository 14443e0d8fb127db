"""Room for the activations of all windows."""

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from trilobite.errors import DestinationError


def make_buffer(shape: tuple[int, ...], dtype: torch.dtype, *, within: int, folder: Path) -> Tensor:
    """A tensor in memory, or beyond `within` bytes in a mapped file of the folder that has no name any more.

    Raises DestinationError when the disk cannot hold it.
    """
    size = torch.Size(shape).numel()
    if size * dtype.itemsize <= within:
        return torch.empty(shape, dtype=dtype)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="activations-") as file:
        try:
            if hasattr(os, "posix_fallocate"):  # a full disk under a mapping would kill the process later
                os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
        except (OSError, RuntimeError) as e:
            raise DestinationError(
                f"{folder}: activations of {size * dtype.itemsize / 1e9:.2f} GB do not fit on this disk; "
                "free some space, or give more --memory, and run the same command again: it continues"
            ) from e
