"""JetMoE's sparse MLP with its experts stacked, as transformers stacks those of its other models.

Importing this module puts the layer below in the place of transformers', wherever a model is built. Names on disk stay
`mlp.input_linear.weight` and `mlp.output_linear.weight`. Its attention, which routes between pairs of query and output
projections, stays as it is.
"""

import torch
from torch import Tensor, nn
from transformers import JetMoeConfig
from transformers.activations import ACT2FN
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.jetmoe import modeling_jetmoe as theirs

from trilobite.models.stacked_experts import GatedExperts


class JetMoeExperts(GatedExperts):
    """Gate, up and down of every expert."""

    def __init__(self, config: JetMoeConfig) -> None:
        """Take the sizes from the config."""
        shape = config.num_local_experts, config.hidden_size, config.intermediate_size
        super().__init__(shape, ACT2FN[config.activation_function], std=config.initializer_range)
        self.config = config


class JetMoeMoE(nn.Module):
    """Router and experts. forward: [B, S, H] -> [B, S, H]."""

    def __init__(self, config: JetMoeConfig) -> None:
        """As transformers builds it."""
        super().__init__()
        self.top_k: int = config.num_experts_per_tok
        self.bias = nn.Parameter(torch.zeros(config.hidden_size))
        self.experts = JetMoeExperts(config)
        self.router = theirs.JetMoeTopKGating(config.hidden_size, config.num_local_experts, self.top_k)

    def forward(self, layer_input: Tensor) -> Tensor:
        """The likeliest experts, weighted by the softmax of their logits."""
        x = layer_input.reshape(-1, layer_input.shape[-1])
        *_, logits = self.router(x)
        best, index = logits.topk(self.top_k, -1)
        y: Tensor = self.experts(x, index, best.softmax(-1).type_as(x)) + self.bias
        return y.view_as(layer_input)


theirs.JetMoeMoE = JetMoeMoE
register_checkpoint_conversion_mapping(
    "jetmoe",
    [
        WeightRenaming(r"\.mlp\.input_linear\.weight", r".mlp.experts.gate_up_proj"),
        WeightRenaming(r"\.mlp\.output_linear\.weight", r".mlp.experts.down_proj"),
    ],
    overwrite=True,
)
