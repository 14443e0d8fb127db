"""Switch Transformers' sparse layer with its experts stacked, as transformers stacks those of all other models.

transformers computes this one right. Its router stays: the likeliest expert alone, and what exceeds `expert_capacity`
tokens of a sequence, first come first served, goes to none, in inference too. Importing this module puts the layer below
in the place of transformers', wherever a model is built. Names on disk stay
`encoder.block.1.layer.1.mlp.experts.expert_0.wi.weight`.
"""

from torch import Tensor, nn
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


class SwitchTransformersSparseMLP(nn.Module):
    """Router and experts. forward: hidden_states [B, S, H] -> [B, S, H]"""

    def __init__(self, config: SwitchTransformersConfig) -> None:
        """Take the sizes from the config."""
        super().__init__()
        self.router = theirs.SwitchTransformersTop1Router(config)
        self.experts = SwitchTransformersExperts(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The chosen expert's output times its probability; nothing for a token that its expert had no room for."""
        mask, probability, _ = self.router(hidden_states)
        chosen = mask.argmax(-1).masked_fill(mask.sum(-1) == 0, self.experts.num_experts)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        y: Tensor = self.experts(x, chosen.view(-1, 1), probability.view(-1, 1))
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
