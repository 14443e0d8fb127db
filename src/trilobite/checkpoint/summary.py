"""What a checkpoint on disk holds, without reading its weights: tensors by role, bytes of every file."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trilobite.checkpoint.journal import PARTIAL
from trilobite.checkpoint.packed import REPORT
from trilobite.checkpoint.roles import Matrix
from trilobite.checkpoint.source import Source
from trilobite.recipe import Role


@dataclass(kw_only=True)
class RoleSummary:
    """The tensors of one role in an original checkpoint. dtypes: tensors by dtype on disk."""

    role: Role
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)


def summarize(source: Source, matrices: Sequence[Matrix]) -> list[RoleSummary]:
    """Tensors, parameters and bytes by role; the scales of fp8 and MXFP4 count as bytes."""
    summaries: dict[Role, RoleSummary] = {}
    stored: set[str] = set()
    for m in matrices:
        row = summaries.setdefault(m.role, RoleSummary(role=m.role))
        row.tensors += 1
        row.parameters += torch.Size(m.shape).numel()
        row.dtypes[source.tensors[m.source].dtype] += 1
        for name in {m.source, m.view.scale} - {None} - stored:
            assert name is not None
            row.bytes += source.tensors[name].nbytes
            stored.add(name)
    return [summaries[role] for role in Role if role in summaries]


def is_packed(path: Path) -> bool:
    """Whether a folder holds a packed checkpoint, finished or not."""
    return (path / REPORT).exists() or (path / PARTIAL).exists()


def bytes_on_disk(path: Path) -> int:
    """Every byte of a checkpoint's folder: weights, headers, index, configuration, tokenizer."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
