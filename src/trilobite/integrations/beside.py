"""Packed matrices that transformers' loader does not see: its work for each of many thousand tensors takes seconds."""

from transformers import PreTrainedModel

from trilobite.formats.weight import PackedWeight
from trilobite.runtime.mapped import EXPERT_PART
from trilobite.runtime.modules.matrix import PackedMatrix


class BesideLoader:
    """Those whose tensors are there already, taken out of a model for as long as others are loaded into it."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take them out. What files hold of experts is passed by, too, where transformers reads these itself."""
        self._ignored = model._keys_to_ignore_on_load_unexpected
        model._keys_to_ignore_on_load_unexpected = {*(self._ignored or ()), EXPERT_PART.pattern}
        self._weights: dict[PackedMatrix, PackedWeight] = {}
        for module in model.modules():
            if isinstance(module, PackedMatrix) and module.weight_packed.device.type != "meta":
                self._weights[module] = module.packed()
                module.clear()

    def put_back(self, model: PreTrainedModel) -> None:
        """The same tensors in their places."""
        model._keys_to_ignore_on_load_unexpected = self._ignored
        for matrix, weight in self._weights.items():
            matrix.replace(weight)
