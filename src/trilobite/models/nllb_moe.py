"""NLLB-MoE's sparse layer: transformers (5.18 to 5.23 at least) runs experts 0 and 1 only.

Its `NllbMoeExperts` takes the router's mask, which is one-hot already, for indices, and one-hots it once more. Importing
this module puts the layer below in its place, wherever a model is built: the top-2 mixture of the paper
(arXiv 2207.04672, section 6.1) with its experts stacked, as transformers stacks those of all other models. Names on disk
stay `model.encoder.layers.3.ffn.experts.expert_0.fc1.weight`.

Where transformers is not wrong its rules hold: padding goes to no expert (`router_ignore_padding_tokens`, whose name
says the opposite), an expert's capacity is a share of all tokens of the batch, of which the first come first unless the
likeliest do, and of a token's second expert all of its probability counts. A second expert that is drawn at random
(`second_expert_policy`) is for training.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import NllbMoeConfig
from transformers.activations import ACT2FN
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter
from transformers.models.nllb_moe import modeling_nllb_moe as theirs

from trilobite.models.stacked_experts import PlainExperts


class NllbMoeExperts(PlainExperts):
    """fc1 and fc2 of every expert, with biases."""

    def __init__(self, config: NllbMoeConfig, ffn_dim: int) -> None:
        """ffn_dim: I, which encoder and decoder have of their own."""
        shape = config.num_experts, config.d_model, ffn_dim
        super().__init__(shape, ACT2FN[config.activation_function], bias=True, std=config.init_std)
        self.config = config
        self.dropout = nn.Dropout(config.activation_dropout)
        self.output_dropout = nn.Dropout(config.moe_token_dropout)


class NllbMoeTop2Router(theirs.NllbMoeTop2Router):  # type: ignore[misc]
    """The two likeliest experts of every token, in the router's dtype.

    forward: hidden_states [T, H], padding [T] bool -> index [T, 2] int64 (E = none), weights [T, 2], logits [T, E]
    """

    def forward(self, hidden_states: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Choose, normalise, and drop what is padding or beyond an expert's capacity."""
        bias = self.classifier.bias
        logits = linear(
            hidden_states.to(self.dtype),
            self.classifier.weight.to(self.dtype),
            None if bias is None else bias.to(self.dtype),
        )
        probabilities = logits.softmax(-1)
        first = logits.argmax(-1, keepdim=True)
        others = logits.scatter(-1, first, -torch.inf)
        if self.training and self.second_expert_policy == "sampling":
            others = others - torch.empty_like(others).exponential_().log()  # plus Gumbel noise
        index = torch.cat((first, others.argmax(-1, keepdim=True)), -1)
        weights = probabilities.gather(-1, index)
        if self.normalize_router_prob_before_dropping:
            weights = _normalised(weights)
        kept = torch.ones_like(index, dtype=torch.bool)
        if self.training and self.second_expert_policy == "random":
            kept[:, 1] = 2 * weights[:, 1] > torch.rand_like(weights[:, 1])
        if padding is not None and not self.router_ignore_padding_tokens:
            kept &= ~padding.unsqueeze(-1)
        if (capacity := self._capacity(len(index))) < len(index):
            kept &= self._places(index, kept, probabilities) < capacity
        weights = weights * kept
        if not self.normalize_router_prob_before_dropping:
            weights = _normalised(weights)
        return index.masked_fill(~kept, self.num_experts), weights, logits

    def _capacity(self, tokens: int) -> int:
        """How many tokens an expert takes."""
        share: float = self.moe_eval_capacity_token_fraction
        if not self.training and share > 0:
            return math.ceil(share * tokens)
        given: int | None = self.expert_capacity
        return given or 2 * math.ceil(tokens / self.num_experts)

    def _places(self, index: Tensor, kept: Tensor, probabilities: Tensor) -> Tensor:
        """Which place a token has in the queue of each of its experts: first choices stand before all second ones.

        index, kept: [T, 2]    probabilities: [T, E]    returns: [T, 2] int64
        """
        order = torch.arange(len(index), device=index.device)
        if self.batch_prioritized_routing:
            order = probabilities.amax(-1).argsort(descending=True, stable=True)
        queue = torch.cat((index[order, 0], index[order, 1]))
        standing = torch.cat((kept[order, 0], kept[order, 1]))
        mask = nn.functional.one_hot(queue, self.num_experts) * standing.unsqueeze(-1)
        places = (mask.cumsum(0) - 1).gather(-1, queue.unsqueeze(-1)).view(2, -1)
        return torch.empty_like(index).index_copy_(0, order, places.T)


class NllbMoeSparseMLP(nn.Module):
    """Router and experts in the place of transformers' class of this name.

    forward: hidden_states [B, S, H], padding_mask: what attention adds to its scores, [B, 1, Q, keys], or None
    """

    def __init__(self, config: NllbMoeConfig, ffn_dim: int) -> None:
        """As transformers builds it."""
        super().__init__()
        self.router = NllbMoeTop2Router(config)
        self.experts = NllbMoeExperts(config, ffn_dim)
        self.output_share = 1 - config.moe_token_dropout

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The mixture; outputs of experts, which training masks in part, are scaled down by as much."""
        batch, length, width = hidden_states.shape
        padding = None
        if padding_mask is not None:
            # The last query sees all that is no padding; behind a cache, only the last keys are of these tokens.
            padding = padding_mask[:, 0, -1, -length:].expand(batch, length).reshape(-1) < 0
        x = hidden_states.reshape(-1, width)
        index, weights, _ = self.router(x, padding)
        if not self.training:
            weights = weights * self.output_share
        y: Tensor = self.experts(x, index, weights)
        return y.view(batch, length, width)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)


def register() -> None:
    """Let transformers build its models of this layer, and stack on loading what it unstacks on saving."""
    theirs.NllbMoeSparseMLP = NllbMoeSparseMLP
    stacks = {"fc1.weight": "up_proj", "fc1.bias": "up_proj_bias"}
    stacks |= {"fc2.weight": "down_proj", "fc2.bias": "down_proj_bias"}
    converters = [
        WeightConverter(f"experts.expert_*.{single}", f"experts.{stacked}", [MergeModulelist(dim=0)])
        for single, stacked in stacks.items()
    ]
    register_checkpoint_conversion_mapping("nllb-moe", converters, overwrite=True)


register()
