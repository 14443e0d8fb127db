"""A checkpoint whose files are mapped: every tensor is a view of one."""

import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilobite.checkpoint.layout import ALIGN
from trilobite.checkpoint.source import DTYPES, Source
from trilobite.huge_pages import prefer_huge_pages

EXPERT_PART = re.compile(r"(.*\.experts)\.(?:expert_)?\d+\..*\.weight_")
"""Name of a part of a packed expert, after that of its layer's experts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Mapped:
    """A checkpoint whose files (arrays of uint8) are mapped, and all of its tensors by name, views of these.

    Copies of what holds it share it.
    """

    source: Source
    files: list[Any]
    tensors: dict[str, Tensor]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mapped":
        """Configurations are copied as models are made."""
        return self


def map_files(source: Source) -> Mapped:
    """Map all files of a checkpoint, and read nothing.

    Each tensor is a storage of its own, which is what torch copies and pickles of it; the experts of a layer share one,
    the stretch of the file that holds them all.
    """
    mapped = {}
    for file, entry in source.files.items():
        with file.open("rb") as opened:
            # Private: torch insists on memory that may be written to, and the file never changes by it.
            pages = mmap.mmap(opened.fileno(), entry.size, access=mmap.ACCESS_COPY)
        prefer_huge_pages(pages)
        mapped[file] = np.frombuffer(pages, dtype=np.uint8)
    tensors = {}
    for names in _stretches(source):
        file = source.tensors[names[0]].file
        first = min(source.tensors[name].offset for name in names) // ALIGN * ALIGN
        last = max(source.tensors[name].offset + source.tensors[name].nbytes for name in names)
        stretch = torch.from_numpy(mapped[file][first:last])
        for name in names:
            info = source.tensors[name]
            data = stretch[info.offset - first : info.offset - first + info.nbytes]
            if (
                not info.nbytes or data.data_ptr() % DTYPES[info.dtype].itemsize
            ):  # torch wants aligned views, even of nothing
                data = data.clone()
            tensors[name] = data.view(DTYPES[info.dtype]).view(info.shape)
    in_order = {name: tensors[name] for name in source.tensors}
    return Mapped(source=source, files=list(mapped.values()), tensors=in_order)


def _stretches(source: Source) -> Iterator[list[str]]:
    """Names of tensors that become views of one storage."""
    layers: dict[tuple[Path, str], list[str]] = {}
    for name, info in source.tensors.items():
        if match := EXPERT_PART.match(name):
            layers.setdefault((info.file, match[1]), []).append(name)
        else:
            yield [name]
    yield from layers.values()
