"""Memory of keys and values: pages for so many texts at once, of so many tokens each."""

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from trilobite.errors import ArchitectureError, ResourceError, SettingError
from trilobite.runtime.generate.text import context_length
from trilobite.runtime.offload.plan import available_bytes

PAGE = 64
"""Tokens of a page. Prompts share whole pages with earlier texts that begin alike."""
CONTEXT = 4096
"""Tokens of a text, unless somebody says otherwise or the model was made for fewer."""
KINDS = {"full_attention", "sliding_attention"}
"""Layers whose states lie in pages; the states of others have no place there."""


@dataclass(frozen=True, kw_only=True)
class Pages:
    """slots: texts at a time    context: tokens of a text    bytes: of all keys and values."""

    slots: int
    context: int
    bytes: int

    @property
    def count(self) -> int:
        """Of pages."""
        return self.slots * -(-self.context // PAGE)


def page_width(config: PreTrainedConfig) -> tuple[int, int]:
    """Heads, and values of a head, as attention has them: those of MLA are decompressed."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        return heads, max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, dim


def make_pages(model: PreTrainedModel, slots: int, context: int | None) -> Pages:
    """Divide memory. Raises ArchitectureError, SettingError, and ResourceError where memory does not suffice."""
    config = model.config.get_text_config(decoder=True)
    limit = context_length(model)
    kinds = set(getattr(config, "layer_types", None) or ())
    if model.config.is_encoder_decoder or model._is_stateful or not kinds <= KINDS:
        raise ArchitectureError(
            f"{model.name_or_path}: layers of {type(model).__name__} keep states that have no pages, so texts cannot "
            "be batched as they come; use `trilobite chat` or `generate`"
        )
    if context is not None and limit is not None and context > limit:
        raise SettingError(f"--context {context}: the model was made for {limit} tokens; ask for fewer")
    context = context or min(CONTEXT, limit or CONTEXT)
    heads, dim = page_width(config)
    pages = Pages(slots=slots, context=context, bytes=0)
    bytes_per_token = 2 * config.num_hidden_layers * heads * dim * model.dtype.itemsize
    pages = Pages(slots=slots, context=context, bytes=(pages.count + 2) * PAGE * bytes_per_token)
    free = available_bytes() if model.device.type == "cpu" else None
    if free is not None and pages.bytes > free:
        raise ResourceError(
            f"keys and values of {slots} texts of {context} tokens take {pages.bytes / 1e9:.2f} GB, {free / 1e9:.2f} GB "
            "are free; ask for fewer --slots or a shorter --context"
        )
    return pages
