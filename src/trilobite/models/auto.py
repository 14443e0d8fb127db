"""The one door to transformers' Auto classes: Python code that lies beside a checkpoint never runs, and nobody is asked.

Left alone, transformers asks on the terminal whether to run such code, and takes the next line of a pipe for the answer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trilobite.errors import ArchitectureError, CheckpointError


def read_config(path: Path, raw: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a checkpoint's folder as transformers' own class for its model_type.

    raw: its config.json
    Raises ArchitectureError for a model_type that nobody here knows, CheckpointError for code from elsewhere.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if raw.get("auto_map"):
            raise ArchitectureError(
                f"{path}: model_type {kind!r} is Python code in the checkpoint (auto_map in config.json), which "
                "trilobite never runs, and no option makes it; upgrade to a transformers release that has this model"
            )
        raise ArchitectureError(
            f"{path}: model_type {kind!r} is unknown to transformers and to trilobite; upgrade transformers"
        )
    _refuse_hub_kernels(path, raw)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, KeyError) as e:
        reason = " ".join(str(e).split())
        raise CheckpointError(
            f"{path / 'config.json'}: {reason}; copy the file of this {kind} checkpoint again"
        ) from e


def _refuse_hub_kernels(path: Path, raw: Mapping[str, Any]) -> None:
    """`attn_implementation: user/repository` would have transformers fetch that repository's code, and run it."""
    for key, value in raw.items():
        if isinstance(value, Mapping) and "attn_implementation" not in key:
            _refuse_hub_kernels(path, value)
        elif "_implementation" in key and any("/" in str(name) for name in _names(value)):
            raise CheckpointError(
                f"{path / 'config.json'}: {key} {value!r} is code from a hub repository, which trilobite never runs; "
                "delete the key"
            )


def _names(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else [value]


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a checkpoint's folder. Raises CheckpointError when there is none, or only as Python code."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError, TypeError) as e:
        if "custom code" in str(e):
            raise CheckpointError(
                f"{path}: its tokenizer is Python code in the checkpoint (auto_map in tokenizer_config.json), which "
                "trilobite never runs, and no option makes it; put a tokenizer.json beside the weights"
            ) from e
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0].partition(" from one of:")[0]
        raise CheckpointError(f"{path}: no usable tokenizer: {reason}; copy the tokenizer files") from e
