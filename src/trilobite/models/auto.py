"""The one door to transformers' Auto classes: Python code that lies beside a checkpoint never runs, and nobody is asked.

Left alone, transformers asks on the terminal whether to run such code, and takes the next line of a pipe for the answer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trilobite.checkpoint.source import Source
from trilobite.errors import ArchitectureError, CheckpointError, one_line, refuse_exhausted

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "n_layers",
    "depth",
)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What configurations call the number of experts of a layer."""


def read_config(source: Source) -> PreTrainedConfig:
    """The configuration of a checkpoint as transformers' own class for its model_type.

    Raises ArchitectureError for a model_type that nobody here knows, CheckpointError for code from elsewhere.
    """
    path, raw = source.path, source.config
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
    _refuse_endless(source, raw)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as e:  # what transformers' code makes of odd values has no common class
        refuse_exhausted(path / "config.json", e)
        raise CheckpointError(
            f"{path / 'config.json'}: no configuration of a {kind} ({one_line(e)}); correct it, or copy it again"
        ) from e
    if config.dtype not in (None, *FLOATS):
        raise CheckpointError(
            f"{path / 'config.json'}: dtype {raw.get('dtype', raw.get('torch_dtype'))!r}; expected bfloat16, float16 or "
            "float32: correct it, or copy it again"
        )
    _refuse_absent_experts(path, config.get_text_config())
    _refuse_closed_windows(path, config.get_text_config())
    return config


def _refuse_closed_windows(path: Path, config: PreTrainedConfig) -> None:
    """A token that sees no token, not even itself, fails when it is run; a window that no layer uses may be anything."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    used = getattr(config, "use_sliding_window", True) and "sliding_attention" in layers
    if used and type(window) is int and window < 1:
        raise CheckpointError(
            f"{path / 'config.json'}: sliding_window {window}; expected null or at least 1: correct it, or copy it again"
        )


def _refuse_absent_experts(path: Path, config: PreTrainedConfig) -> None:
    """A token that uses more experts than there are fails when it is run."""
    experts = next((n for key in EXPERTS if (n := getattr(config, key, None))), None)
    active = getattr(config, "num_experts_per_tok", None)
    if type(experts) is int and type(active) is int and not 0 < active <= experts:
        raise CheckpointError(
            f"{path / 'config.json'}: num_experts_per_tok {active} of {experts} experts; correct it, or copy it again"
        )


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


def _refuse_endless(source: Source, raw: Mapping[str, Any]) -> None:
    """Every layer has a tensor, at the least; a model of 10^9 layers would only take for ever to build."""
    for key, value in raw.items():
        if isinstance(value, Mapping):
            _refuse_endless(source, value)
        elif key in LAYERS and type(value) is int and value > len(source.tensors):
            raise CheckpointError(
                f"{source.path / 'config.json'}: {key} {value}, and the checkpoint has {len(source.tensors)} tensors; "
                "correct it, or copy the checkpoint again"
            )


def _names(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else [value]


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a checkpoint's folder. Raises CheckpointError when there is none, or only as Python code."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        tokenizer("a", verbose=False)  # odd values in its configuration come out here only
        return tokenizer
    except Exception as e:  # tokenizers, written in Rust, raises plain Exceptions
        refuse_exhausted(path, e)
        if "custom code" in str(e):
            raise CheckpointError(
                f"{path}: its tokenizer is Python code in the checkpoint (auto_map in tokenizer_config.json), which "
                "trilobite never runs, and no option makes it; put a tokenizer.json beside the weights"
            ) from e
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0].partition(" from one of:")[0]
        raise CheckpointError(f"{path}: no usable tokenizer: {reason}; copy the tokenizer files") from e
