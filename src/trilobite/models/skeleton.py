"""A transformers model without data: what a checkpoint's tensors have to be, before anything is read or written."""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightTransform, convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from trilobite.checkpoint.source import Source
from trilobite.errors import ArchitectureError, one_line, refuse_exhausted
from trilobite.models.quiet import quiet

MAPPINGS = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
"""Models that generate text; those of the last also look at images, and need not."""
BLOCKS = "ForBlockDiffusion"
"""How names of classes end that do not tell one token from those before it."""
_LAYER = re.compile(r"^(.*?\blayers)\.(\d+)\.")


@dataclass(frozen=True)
class Difference:
    """What a checkpoint and its model do not have in common, by names in memory.

    wrong: name -> (shape on disk, shape in memory)    unclear: names of experts that do not stack or merge
    """

    missing: list[str]
    unexpected: list[str]
    wrong: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    unclear: list[str]


def text_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that generates text with the whole of a configuration; None when transformers has none.

    A causal class that takes only the text part of an image-text configuration is not that, nor is one that leaves out
    an encoder.
    """
    first = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,) if getattr(config, "is_encoder_decoder", False) else ()
    for mapping in (*first, *MAPPINGS):
        if type(config) in mapping and isinstance(config, mapping[type(config)].config_class):
            return mapping[type(config)]  # type: ignore[no-any-return]
    return None


def model_class(config: PreTrainedConfig, source: Source) -> type[PreTrainedModel]:
    """The same, or ArchitectureError."""
    found = text_class(config)
    if found is None:
        raise ArchitectureError(
            f"{source}: {type(config).__name__} has no text generation model in transformers; upgrade "
            "transformers, or take a checkpoint of the language model alone"
        )
    if found.__name__.endswith(BLOCKS):
        raise ArchitectureError(
            f"{source}: a {found.__name__} writes whole blocks of text with layers that its two stacks share, "
            "which cannot run packed; take a model that writes token by token"
        )
    return found


def skeleton(config: PreTrainedConfig, source: Source) -> PreTrainedModel:
    """The model on the meta device. Raises ArchitectureError for a configuration that makes none."""
    kind = model_class(config, source)
    try:
        with quiet(), torch.device("meta"):
            # Another dtype would for a while be torch's default, in all threads.
            model: PreTrainedModel = kind._from_config(config, dtype=torch.get_default_dtype())
    except Exception as e:  # what transformers' code makes of odd values has no common class
        refuse_exhausted(source.path / "config.json", e)
        raise impossible(kind, source, e) from e
    return model


def impossible(kind: type[PreTrainedModel], source: Source, e: Exception) -> ArchitectureError:
    """What to say when no model can be made of a configuration."""
    return ArchitectureError(
        f"{source.path / 'config.json'}: no {kind.__name__} can be made of it ({type(e).__name__}: {one_line(e)}); "
        "correct it, or copy it again"
    )


def compare(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> Difference:
    """How a checkpoint differs from a model, after all renaming, stacking and merging that loading does.

    tensors: by name on disk, on meta    Extra prediction layers, tied heads and what a model's class is known to ignore
    are no difference. The model's parameters are replaced by those of the checkpoint.
    """
    settings = LoadStateDictConfig(
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),
        weight_mapping=[_on_meta(conversion) for conversion in get_model_conversion_mapping(model)],
        device_map={"": torch.device("meta")},
    )
    with quiet():
        found, _ = convert_and_load_state_dict_in_model(model, dict(tensors), settings)
    model._adjust_missing_and_unexpected_keys(found)
    tied = model.all_tied_weights_keys
    groups = [{name, source} for name, source in tied.items()]
    missing = {
        n for n in found.missing_keys if not any(n in g and not g <= found.missing_keys for g in groups)
    }
    return Difference(
        missing=sorted(missing - {m[0] for m in found.mismatched_keys}),
        unexpected=sorted(n for n in found.unexpected_keys if not _predicts_ahead(model, n)),
        wrong={name: (tuple(have), tuple(want)) for name, have, want in sorted(found.mismatched_keys)},
        unclear=sorted(found.conversion_errors),
    )


def _on_meta(conversion: WeightTransform) -> WeightTransform:
    """The same conversion, without a device of its own: Qwen 4's largest embedding is put together on the CPU."""
    if getattr(conversion, "force_cpu", False):
        conversion = copy.copy(conversion)
        conversion.force_cpu = False
    return conversion


def _predicts_ahead(model: PreTrainedModel, name: str) -> bool:
    """Whether a tensor belongs to the layers after the last one that guess further tokens (DeepSeek-V3's)."""
    if re.search(r"(^|\.)mtp(_\w+)?\.", name):
        return True
    config = model.config.get_text_config()
    ahead = max(getattr(config, key, 0) or 0 for key in ("num_nextn_predict_layers", "num_mtp_modules"))
    layer = _LAYER.match(name)
    last = getattr(config, "num_hidden_layers", 0) or 0
    return layer is not None and last <= int(layer[2]) < last + ahead
