"""DBRX's experts stacked in three dimensions, as transformers stacks those of its other models.

On disk, and in transformers' own layer, the rows of all experts follow each other in two: w1 (gate), v1 (up) and w2
(down, transposed), [E I, H] each. Importing this module puts the class below in the place of transformers', wherever a
model is built. Names on disk stay `ffn.experts.mlp.w1`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.models.dbrx import modeling_dbrx as theirs

from trilobite.models.stacked_experts import GatedExperts


class DbrxExperts(GatedExperts):
    """Gate, up and down of every expert."""

    def __init__(self, config: Any) -> None:
        """config: the part of a DbrxConfig that describes its feed-forward layers."""
        shape = config.moe_num_experts, config.hidden_size, config.ffn_hidden_size
        super().__init__(shape, ACT2FN[config.ffn_act_fn.get("name", "silu")], std=0.02)
        self.config = config


class DbrxFFN(theirs.DbrxFFN):  # type: ignore[misc]
    """In the place of transformers' class of this name: its experts take tokens in two dimensions."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, index = self.route_tokens_to_experts(self.router(x))
        y: Tensor = self.experts(x, index, weights)
        return y.view_as(hidden_states)


class _BothWays(ConversionOps):  # type: ignore[misc]
    """One class for loading and for saving."""

    def __init__(self, back: bool = False) -> None:
        """back: the way of saving."""
        self.back = back

    @property
    def reverse_op(self) -> ConversionOps:
        """For saving, and back."""
        return type(self)(not self.back)


class StackGateUp(_BothWays):
    """w1, v1 [E I, H] -> gate_up_proj [E, 2I, H], and back."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """As transformers asks."""
        parts = [_one(input_dict[name]) for name in source_patterns]
        if self.back:
            halves = parts[0].chunk(2, 1)
            return {name: half.flatten(0, 1) for name, half in zip(target_patterns, halves, strict=True)}
        experts = kwargs["config"].ffn_config.moe_num_experts
        stacked = [part.reshape(experts, -1, part.shape[-1]) for part in parts]
        return {target_patterns[0]: torch.cat(stacked, 1)}


class StackDown(_BothWays):
    """w2 [E I, H] -> down_proj [E, H, I], and back."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """As transformers asks."""
        (value,) = input_dict.values()
        w = _one(value)
        if self.back:
            return {target_patterns[0]: w.mT.flatten(0, 1)}
        experts = kwargs["config"].ffn_config.moe_num_experts
        return {target_patterns[0]: w.reshape(experts, -1, w.shape[-1]).mT.contiguous()}


def _one(value: Any) -> Tensor:
    """A tensor, or the one in a list."""
    one: Tensor = value[0] if isinstance(value, list) else value
    return one


theirs.DbrxExperts, theirs.DbrxFFN = DbrxExperts, DbrxFFN
register_checkpoint_conversion_mapping(
    "dbrx",
    [
        WeightConverter(["experts.mlp.w1", "experts.mlp.v1"], "experts.gate_up_proj", [StackGateUp()]),
        WeightConverter("experts.mlp.w2", "experts.down_proj", [StackDown()]),
    ],
    overwrite=True,
)
