"""`from_pretrained` of a packed checkpoint whose experts stay in its files, from which they stream."""

from typing import Any

from transformers import PreTrainedModel

from trilobite.checkpoint.source import Source
from trilobite.errors import OffloadError
from trilobite.runtime.mapped import map_files
from trilobite.runtime.offload.device import bound_on_gpu, gpu_tier
from trilobite.runtime.offload.plan import AUTO
from trilobite.runtime.offload.streaming import bound


class Streamed:
    """A mapped checkpoint, and the memory that a model of it shall run in."""

    def __init__(self, source: Source, memory: Any, gpu_memory: Any) -> None:
        """memory, gpu_memory: as of `trilobite.load`    Raises OffloadError: no size, or no such GPU."""
        self._memory = memory
        self._gpu = None if gpu_memory is None else gpu_tier(gpu_memory, "cuda")
        self.mapped = map_files(source)

    def bind(self, model: PreTrainedModel) -> None:
        """Let the loaded model run in so much memory. Raises OffloadError."""
        source, tensors = self.mapped.source, self.mapped.tensors
        if self._gpu is not None:
            bound_on_gpu(model, source, tensors, self._memory, self._gpu)
        else:
            bound(model, source, tensors, self._memory)


def check_placement(device_map: Any, memory: Any, gpu_memory: Any) -> None:
    """Raise OffloadError for a device_map beside a bound that says where the model lies."""
    if gpu_memory is None and memory in (None, AUTO):
        return
    places = set(map(str, device_map.values() if isinstance(device_map, dict) else [device_map]))
    if not places <= {"None", "cpu"}:
        raise OffloadError(
            f"device_map={device_map!r}: memory and gpu_memory say themselves where a model lies; leave device_map out"
        )
