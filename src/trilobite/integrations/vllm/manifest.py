"""What of a packed checkpoint is packed, by the names that vLLM uses, and what of it vLLM's layers cannot run."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trilobite.checkpoint.fused import FUSED, partly_packed, refuse_lattice
from trilobite.checkpoint.source import Source
from trilobite.errors import CheckpointError
from trilobite.formats.bitpack import ROWS

SUFFIXES = ("packed", "scale", "lra", "lrb")
"""Parts of a matrix that vLLM loads, `formats.weight.SUFFIXES` without those of lattice formats."""
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.")
_PACKED = ".weight_packed"


@dataclass(frozen=True)
class Manifest:
    """What is packed.

    rows: N of every packed matrix that is no expert's, by module path    experts: paths of packed layers of experts
    """

    rows: Mapping[str, int]
    experts: frozenset[str]

    def renamed(self, rename: Callable[[str], str | None]) -> "Manifest":
        """The same by other names. rename: of a tensor, None where it is dropped."""
        pairs = ((rename(name + _PACKED), n) for name, n in self.rows.items())
        rows = {name.removesuffix(_PACKED): n for name, n in pairs if name is not None}
        experts = (rename(f"{path}.0.up_proj{_PACKED}") for path in self.experts)
        found = (_EXPERT.match(name) for name in experts if name is not None)
        return Manifest(rows, frozenset(m[1] for m in found if m is not None))

    def rows_of(self, prefix: str, fused: Mapping[str, Sequence[str]]) -> list[int] | None:
        """N of the matrices that a linear layer of vLLM runs, in its order; None where they are in 16 bit.

        prefix: the layer's path    fused: as FUSED, of this model    Raises CheckpointError where only some are packed.
        """
        path, _, leaf = prefix.rpartition(".")
        parts = {**FUSED, **fused}.get(leaf, (leaf,))
        names = [f"{path}.{part}".removeprefix(".") for part in parts]
        packed = [name for name in names if name in self.rows]
        if not packed:
            return None
        if len(packed) < len(names):
            raise CheckpointError(partly_packed(prefix, packed, names))
        return [self.rows[name] for name in names]


def read_manifest(source: Source) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError for formats that vLLM's layers cannot run."""
    rows: dict[str, int] = {}
    experts: set[str] = set()
    if scaled := (source.config.get("quantization_config") or {}).get("exponents"):
        raise CheckpointError(
            f"{source}: {len(scaled)} matrices are stored times powers of two, first {next(iter(scaled))}, which vLLM's "
            "layers do not apply; keep them in 16 bit by a rule of the recipe"
        )
    partial = source.rows or {}
    for name, info in source.tensors.items():
        if not name.endswith(_PACKED):
            continue
        path = name.removesuffix(_PACKED)
        if f"{path}.weight_lattice" in source.tensors:
            raise CheckpointError(f"{source}: {refuse_lattice(path, info.shape[2] // ROWS)}")
        if match := _EXPERT.match(path):
            experts.add(match[1])
        else:
            rows[path] = partial.get(f"{path}.weight", ROWS * info.shape[0])
    return Manifest(rows, frozenset(experts))
