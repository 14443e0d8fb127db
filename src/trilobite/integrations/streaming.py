"""`from_pretrained` of a packed checkpoint whose experts stay in its files, from which they stream."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from trilobite.checkpoint.source import Source
from trilobite.errors import OffloadError
from trilobite.runtime.load import map_tensors
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.modules.matrix import PackedMatrix
from trilobite.runtime.modules.swap import group_parts
from trilobite.runtime.offload.device import bound_on_gpu, gpu_tier
from trilobite.runtime.offload.plan import AUTO
from trilobite.runtime.offload.streaming import bound

_EXPERTS = r"\.experts\."


class StreamedExperts:
    """Hides the experts from transformers, which would read them all, and puts them in their place afterwards."""

    def __init__(self, source: Source, translate: Callable[[str], str], memory: Any, gpu_memory: Any) -> None:
        """translate: names in files -> names in memory    memory, gpu_memory: as of `trilobite.load`.

        Raises OffloadError: no size, or no such GPU.
        """
        self._source, self._translate, self._memory = source, translate, memory
        self._gpu = None if gpu_memory is None else gpu_tier(gpu_memory, "cuda")
        self._tensors: dict[str, Tensor] = {}

    def hide(self, model: PreTrainedModel) -> None:
        """Let transformers pass by what the checkpoint holds of the experts."""
        self._ignored = model._keys_to_ignore_on_load_unexpected
        model._keys_to_ignore_on_load_unexpected = {*(self._ignored or ()), _EXPERTS}
        for module in model.modules():
            if isinstance(module, PackedExperts):
                for matrix in module.modules():
                    if isinstance(matrix, PackedMatrix):
                        matrix.clear()

    def show(self, model: PreTrainedModel) -> None:
        """Put views of the mapped files in their place."""
        model._keys_to_ignore_on_load_unexpected = self._ignored
        self._tensors = map_tensors(self._source)
        modules = dict(model.named_modules())
        inside = {
            m for experts in modules.values() if isinstance(experts, PackedExperts) for m in experts.modules()
        }
        for path, parts in group_parts(
            {self._translate(name): t for name, t in self._tensors.items()}
        ).items():
            matrix = modules.get(path)
            if isinstance(matrix, PackedMatrix) and matrix in inside:
                for suffix, part in parts.items():
                    setattr(matrix, f"weight_{suffix}", part)

    def bind(self, model: PreTrainedModel) -> None:
        """Let the loaded model run in so much memory. Raises OffloadError."""
        if self._gpu is not None:
            bound_on_gpu(model, self._source, self._tensors, self._memory, self._gpu)
        else:
            bound(model, self._source, self._tensors, self._memory)


def check_placement(device_map: Any, memory: Any, gpu_memory: Any) -> None:
    """Raise OffloadError for a device_map beside a bound that says where the model lies."""
    if gpu_memory is None and memory in (None, AUTO):
        return
    places = set(map(str, device_map.values() if isinstance(device_map, dict) else [device_map]))
    if not places <= {"None", "cpu"}:
        raise OffloadError(
            f"device_map={device_map!r}: memory and gpu_memory say themselves where a model lies; leave device_map out"
        )
