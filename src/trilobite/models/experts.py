"""Which of transformers' modules of stacked experts can run packed, and what their matrices are called on disk."""

import re

from torch import nn
from transformers.activations import ACT2FN

from trilobite.errors import ArchitectureError
from trilobite.kernels.expert_table import DOWN, GATE, UP
from trilobite.kernels.reference import GPT_OSS, GPT_OSS_ALPHA, GPT_OSS_LIMIT

PROJECTIONS = {"gate_proj": GATE, "w1": GATE, "up_proj": UP, "w3": UP, "down_proj": DOWN, "w2": DOWN}
PROJECTIONS |= {"fc1": UP, "fc2": DOWN, "wi": UP, "wo": DOWN}
"""Names of an expert's matrices in checkpoints."""
EXPERT_NAME = re.compile(rf"^(.*\.experts)\.((?:expert_)?)(\d+)\.({'|'.join(PROJECTIONS)})$")
"""A matrix of an expert: path of the layer's experts, what stands before the expert's number, number, name."""
KEEP = "compress this model with --keep expert"


def expert_activation(original: nn.Module) -> str:
    """Name of an experts module's gated activation. Raises ArchitectureError for a module that cannot run packed."""
    kind = type(original).__name__
    if not isinstance(getattr(original, "down_proj", None), nn.Parameter) or not hasattr(original, "config"):
        raise ArchitectureError(f"{kind} is not an experts module that can run packed; {KEEP}")
    if kind == "GptOssExperts":
        alpha, limit = (getattr(original, name) for name in ("alpha", "limit"))
        if (alpha, limit) != (GPT_OSS_ALPHA, GPT_OSS_LIMIT):
            raise ArchitectureError(
                f"{kind}: its gate has alpha {alpha} and limit {limit}, the packed experts know {GPT_OSS_ALPHA} and "
                f"{GPT_OSS_LIMIT}; {KEEP}"
            )
        return GPT_OSS
    gate = getattr(type(original), "_apply_gate", None)
    default = gate is None or gate.__name__ == "_default_apply_gate"
    config = original.config
    for key in ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function", "dense_act_fn"):
        name = getattr(config, key, None)
        if name in ACT2FN and isinstance(getattr(original, "act_fn", None), type(ACT2FN[name])):
            break
    else:
        default = False
    if not default or getattr(original, "has_post_expert_norm", False):
        raise ArchitectureError(
            f"{kind}: computes its activation in a way of its own that the packed experts do not know; {KEEP}"
        )
    return str(name)
