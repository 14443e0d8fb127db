"""Llama 4's sparse layer with experts that are called by index, as those of transformers' other models.

transformers multiplies all experts by all tokens, most of which it has set to zero. Importing this module puts the
layer below in the place of transformers', wherever a model is built: of a token, the chosen experts alone see it, times
its score. Names on disk stay `feed_forward.experts.gate_up_proj`.
"""

from torch import Tensor, nn
from transformers import Llama4TextConfig
from transformers.activations import ACT2FN
from transformers.models.llama4 import modeling_llama4 as theirs

from trilobite.models.stacked_experts import GatedExperts


class Llama4TextExperts(GatedExperts):
    """Gate, up and down of every expert."""

    is_transposed = scales_inputs = True

    def __init__(self, config: Llama4TextConfig) -> None:
        """Take the sizes from the config."""
        shape = config.num_local_experts, config.hidden_size, config.intermediate_size
        super().__init__(shape, ACT2FN[config.hidden_act], std=config.initializer_range)
        self.config = config


class Llama4TextMoe(nn.Module):
    """Router, experts and shared expert. forward: [B, S, H] -> ([B S, H], the router's logits [B S, E])."""

    def __init__(self, config: Llama4TextConfig) -> None:
        """As transformers builds it."""
        super().__init__()
        self.top_k: int = config.num_experts_per_tok
        self.experts = Llama4TextExperts(config)
        self.router = theirs.Llama4Router(config)
        self.shared_expert = theirs.Llama4TextMLP(config)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """What the shared expert gives, and the chosen ones of what they see of the token."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(x)
        weights, index = scores.topk(self.top_k, -1)
        y: Tensor = self.shared_expert(x) + self.experts(x, index, weights)
        return y, logits


theirs.Llama4TextExperts, theirs.Llama4TextMoe = Llama4TextExperts, Llama4TextMoe
