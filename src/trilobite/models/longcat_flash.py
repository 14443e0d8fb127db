"""LongCat-Flash's experts, of which the last compute nothing: they give what they are given, and have no weights.

transformers has weights for them too, which it never uses and the checkpoints on the hub do not have. Importing this
module puts the class below in the place of transformers', wherever a model is built.
"""

from transformers import LongcatFlashConfig
from transformers.activations import ACT2FN
from transformers.models.longcat_flash import modeling_longcat_flash as theirs

from trilobite.models.stacked_experts import GatedExperts


class LongcatFlashExperts(GatedExperts):
    """Gate, up and down of every expert that has some; a higher index is an expert that passes on."""

    passes_on = True

    def __init__(self, config: LongcatFlashConfig) -> None:
        """Take the sizes from the config."""
        shape = config.n_routed_experts, config.hidden_size, config.expert_ffn_hidden_size
        super().__init__(shape, ACT2FN[config.hidden_act], std=config.initializer_range)
        self.config = config


theirs.LongcatFlashExperts = LongcatFlashExperts
