"""Names of tensors on disk -> names in a transformers model: transformers renames some architectures' modules."""

from collections.abc import Callable

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key


def memory_names(model: PreTrainedModel) -> Callable[[str], str]:
    """Translate names of tensors on disk to names in memory.

    Only renamings apply: names of packed tensors and of single experts are no parameter names, so the converters that
    stack experts pass them by.
    """
    renamings = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
    state = dict.fromkeys(name for name, _ in model.named_modules())

    def translate(name: str) -> str:
        renamed = str(rename_source_key(name, renamings, [])[0])
        prefix = model.base_model_prefix
        top = renamed.split(".", 1)[0]
        if top not in state and f"{prefix}.{top}" in state:
            return f"{prefix}.{renamed}"
        return renamed

    return translate
