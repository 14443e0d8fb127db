"""What a model takes in memory beside its weights, before it is made."""

import torch

from trilobite.checkpoint.source import Source
from trilobite.models.auto import read_config
from trilobite.models.skeleton import skeleton
from trilobite.runtime.offload.plan import activation_bytes, key_value_bytes, within

PROGRAM = 512 * 2**20
"""Python, torch and transformers once a model runs; without the workspaces that activations count."""


def room_beside_weights(source: Source, context: int) -> int:
    """Bytes of the program, of keys and values of one text of `context` tokens, and of activations."""
    config = read_config(source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    model = skeleton(config, source).to(dtype)
    context = within(model, context)
    return PROGRAM + key_value_bytes(model, context) + activation_bytes(model, context)
