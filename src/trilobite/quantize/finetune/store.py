"""What fine-tuning found, in the unfinished checkpoint's hidden folder, until all of it moves to its places.

    DST/.partial/tuned-00003.safetensors    values of one block, as they will be stored, and in its metadata how it went
    DST/.partial/tuned-all.safetensors      values of the whole model, which replace those of the blocks

A file is there whole or not at all. The packed files hold the values from before until `PackedWriter.rewrite` puts all
of these in their places, which a run that was killed meanwhile does again.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

WHOLE = "all"
"""The part that is the whole model."""


class TunedStore(Mapping[str, Tensor]):
    """Tuned values by stored tensor name, those of the whole model before those of a block.

    records: how each part went: loss before and after, on the windows set aside, and epochs
    """

    def __init__(self, folder: Path, keep: Callable[[str, bytes], None]) -> None:
        """Read what earlier runs found. keep: writes a file of that folder, whole or not at all."""
        self._keep = keep
        self._values: dict[str, dict[str, Tensor]] = {}
        self.records: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("tuned-*.safetensors")):
            part = path.stem.removeprefix("tuned-")
            try:
                with safe_open(path, "pt") as file:
                    record = json.loads((file.metadata() or {})["record"])
                    self._values[part] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (OSError, SafetensorError, ValueError, KeyError):
                continue  # a power failure; it is made again
            self.records[part] = record

    def has(self, part: str) -> bool:
        """Whether a part is done: WHOLE, or a block's name."""
        return part in self.records

    def put(self, part: str, values: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """A part is done. values: as stored."""
        whole = {name: t.detach().cpu().contiguous() for name, t in values.items()}
        self._keep(f"tuned-{part}.safetensors", save(whole, {"record": json.dumps(record)}))
        self._values[part], self.records[part] = whole, dict(record)

    def __getitem__(self, name: str) -> Tensor:
        """The latest value of a tensor."""
        for part in (WHOLE, *self._values):
            if name in self._values.get(part, {}):
                return self._values[part][name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Names of all tuned tensors."""
        return iter(dict.fromkeys(name for values in self._values.values() for name in values))

    def __len__(self) -> int:
        """How many tensors are tuned."""
        return len(list(iter(self)))


def part_name(block: int) -> str:
    """Name of the part that a block is."""
    return f"{block:05d}"
