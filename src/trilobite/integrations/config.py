"""The configuration of packed models, which transformers knows from its first moment on (`integrations/register.py`)."""

from typing import Any

from transformers.quantizers import auto, register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from trilobite.checkpoint.packed import FORMAT_VERSION
from trilobite.runtime.mapped import Mapped

METHOD = "trilobite"


@register_quantization_config(METHOD)
class TrilobiteConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """quantization_config of a packed checkpoint, or the wish to quantize on load.

    recipe: a preset's name, a YAML file, or a recipe as a mapping    format_version: of the packed checkpoint
    keep_unmatched: when quantizing on load, keep what no role and no part of the model claims (`--keep-unmatched`)
    mapped: the checkpoint, set by `trilobite.load`, from whose files experts are taken
    exponents: by matrix, of the powers of two that format version 2 has; applied while loading
    activations, threads, memory, gpu_memory: as in `trilobite.load`, of the model that loads; not stored. The last two
    are for packed checkpoints, whose experts stay in their files then
    """

    def __init__(
        self,
        recipe: str | dict[str, Any] = "milo-s1",
        format_version: int = FORMAT_VERSION,
        keep_unmatched: bool = False,
        mapped: Mapped | None = None,
        exponents: dict[str, int] | None = None,
        activations: str = "exact",
        threads: int | None = None,
        memory: Any = None,
        gpu_memory: Any = None,
        **ignored: Any,
    ) -> None:
        """ignored: keys that a later release of the same format version may add."""
        self.quant_method = METHOD
        self.recipe = recipe
        self.format_version = format_version
        self.keep_unmatched = keep_unmatched
        self.mapped = mapped if isinstance(mapped, Mapped) else None
        self.exponents = exponents or {}
        self.activations, self.threads = activations, threads
        self.memory, self.gpu_memory = memory, gpu_memory

    def get_loading_attributes(self) -> dict[str, Any]:
        """What a packed checkpoint's own configuration takes over from the one that `from_pretrained` was given."""
        return {name: getattr(self, name) for name in ("activations", "threads", "memory", "gpu_memory")}

    def to_dict(self) -> dict[str, Any]:
        """What config.json stores."""
        return {"quant_method": METHOD, "format_version": self.format_version, "recipe": self.recipe}


# So that `get_loading_attributes` is asked for.
auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*auto.LOADING_ATTRIBUTES_CONFIG_TYPES, TrilobiteConfig)
