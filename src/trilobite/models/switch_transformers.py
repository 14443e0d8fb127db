"""Switch Transformers' sparse layer with its experts stacked, as transformers stacks those of all other models.

transformers computes this one right, and its rules stay: the likeliest expert alone, and what exceeds `expert_capacity`
tokens of a sequence, first come first served, goes to none, in inference too. Importing this module puts the layer below
in the place of transformers', wherever a model is built. Names on disk stay
`encoder.block.1.layer.1.mlp.experts.expert_0.wi.weight`.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import SwitchTransformersConfig
from transformers.activations import ACT2FN
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter
from transformers.models.switch_transformers import modeling_switch_transformers as theirs

from trilobite.models.stacked_experts import PlainExperts


class SwitchTransformersExperts(PlainExperts):
    """wi and wo of every expert."""

    def __init__(self, config: SwitchTransformersConfig) -> None:
        """Take the sizes from the config."""
        shape = config.num_experts, config.d_model, config.d_ff
        std = config.initializer_factor * config.d_model**-0.5
        super().__init__(shape, ACT2FN[config.dense_act_fn], bias=False, std=std)
        self.config = config
        self.dropout = nn.Dropout(config.dropout_rate)


class SwitchTransformersTop1Router(theirs.SwitchTransformersTop1Router):  # type: ignore[misc]
    """The likeliest expert of every token.

    forward: hidden_states [B, S, H] -> index [B, S] int64 (E = none), probability [B, S, 1], logits [B, S, E]
    """

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose in the router's dtype; a queue is looked at only where there are more tokens than an expert takes."""
        x, most = hidden_states.to(self.dtype), self.expert_capacity
        if self.training and self.jitter_noise > 0:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter_noise, 1 + self.jitter_noise)
        bias = self.classifier.bias
        logits = linear(
            x, self.classifier.weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
        )
        probabilities = logits.softmax(-1).to(hidden_states.dtype)
        index = probabilities.argmax(-1)
        probability = probabilities.gather(-1, index.unsqueeze(-1))
        if index.shape[1] > most:
            queue = nn.functional.one_hot(index, self.num_experts).cumsum(1)
            place = queue.gather(-1, index.unsqueeze(-1)).squeeze(-1)
            index = index.masked_fill(place > most, self.num_experts)
        return index, probability, logits


class SwitchTransformersSparseMLP(nn.Module):
    """Router and experts. forward: hidden_states [B, S, H] -> [B, S, H]"""

    def __init__(self, config: SwitchTransformersConfig) -> None:
        """Take the sizes from the config."""
        super().__init__()
        self.router = SwitchTransformersTop1Router(config)
        self.experts = SwitchTransformersExperts(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The chosen expert's output times its probability; nothing for a token that its expert had no room for."""
        index, probability, _ = self.router(hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        y: Tensor = self.experts(x, index.view(-1, 1), probability.view(-1, 1))
        return y.view_as(hidden_states)


class SwitchTransformersLayerFF(theirs.SwitchTransformersLayerFF):  # type: ignore[misc]
    """In the place of transformers' class of this name: a sparse one has the MLP above."""

    def __init__(self, config: SwitchTransformersConfig, is_sparse: bool = False) -> None:
        """As transformers builds it."""
        super().__init__(config)
        self.is_sparse = is_sparse
        if is_sparse:
            self.mlp = SwitchTransformersSparseMLP(config)


def register() -> None:
    """Let transformers build its models of these layers, and stack on loading what it unstacks on saving."""
    theirs.SwitchTransformersLayerFF = SwitchTransformersLayerFF
    converters = [
        WeightConverter(f"experts.expert_*.{single}.weight", f"experts.{stacked}", [MergeModulelist(dim=0)])
        for single, stacked in (("wi", "up_proj"), ("wo", "down_proj"))
    ]
    register_checkpoint_conversion_mapping("switch_transformers", converters, overwrite=True)


register()
