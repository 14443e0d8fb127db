"""The original DeepSeek-MoE-16B (`model_type: deepseek`): transformers has only V2 and its successors.

Llama attention and norms; after the first dense layers every MLP is a mixture of fine-grained experts
plus shared ones (arXiv 2401.06066). The model's own code lives in its repository and runs only with
trust_remote_code; importing this module makes the Auto classes take this one instead, and no downloaded code is
executed. Experts, loading and saving are those of DeepSeek-V2, so every experts implementation of
transformers works, and the names on disk stay `model.layers.1.mlp.experts.0.gate_proj.weight`.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers import initialization as init
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts, DeepseekV2MLP
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils.output_capturing import OutputRecorder

from trilobite.errors import ArchitectureError

MODEL_TYPE = "deepseek"


class DeepseekConfig(LlamaConfig):  # type: ignore[misc]
    """The keys of DeepSeek-MoE-16B's config.json, with its values as defaults of the mixture.

    first_k_dense_replace: layers before this one are dense
    moe_layer_freq: and so are those that this does not divide
    norm_topk_prob: whether the weights of the chosen experts are scaled to sum to one
    """

    model_type = MODEL_TYPE
    attribute_map: ClassVar[dict[str, str]] = {
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
    }
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        **LlamaConfig.base_model_tp_plan,
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.shared_experts.gate_proj": "colwise",
        "layers.*.mlp.shared_experts.up_proj": "colwise",
        "layers.*.mlp.shared_experts.down_proj": "rowwise",
    }

    vocab_size: int = 102400
    hidden_size: int = 2048
    intermediate_size: int = 10944
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    moe_intermediate_size: int = 1408
    n_shared_experts: int | None = 2
    n_routed_experts: int | None = 64
    num_experts_per_tok: int | None = 6
    moe_layer_freq: int = 1
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    aux_loss_alpha: float = 0.001
    seq_aux: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuse what this architecture cannot be; raises ArchitectureError."""
        super().__post_init__(**kwargs)
        if self.scoring_func != "softmax":
            raise ArchitectureError(
                f"deepseek: scoring_func {self.scoring_func!r}; the original DeepSeek-MoE has 'softmax': "
                "correct config.json (a sigmoid router belongs to model_type deepseek_v3)"
            )
        if self.moe_layer_freq < 1:
            raise ArchitectureError(f"deepseek: moe_layer_freq {self.moe_layer_freq}; expected at least 1")
        if self.n_routed_experts and not 1 <= (self.num_experts_per_tok or 0) <= self.n_routed_experts:
            raise ArchitectureError(
                f"deepseek: num_experts_per_tok {self.num_experts_per_tok}; expected 1 to n_routed_experts "
                f"({self.n_routed_experts})"
            )

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer has routed experts."""
        late_enough = layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
        return bool(self.n_routed_experts) and late_enough


class DeepseekRouter(nn.Module):
    """Softmax over all experts in float32, then the top k.

    hidden_states: [T, H]    logits [T, E], weights [T, A], index [T, A]
    """

    def __init__(self, config: DeepseekConfig) -> None:
        """Take the sizes from the config."""
        super().__init__()
        assert config.n_routed_experts
        assert config.num_experts_per_tok
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose A experts for every token."""
        logits = nn.functional.linear(hidden_states.float(), self.weight.float())
        weights, index = logits.softmax(-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob and self.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights, index


class DeepseekMoE(nn.Module):
    """Routed experts plus the shared ones, which see every token. hidden_states: [..., H]"""

    def __init__(self, config: DeepseekConfig) -> None:
        """Build router, experts and shared experts."""
        super().__init__()
        self.gate = DeepseekRouter(config)
        self.experts = DeepseekV2Experts(config)
        self.shared_experts = (
            DeepseekV2MLP(config, intermediate_size=config.moe_intermediate_size * config.n_shared_experts)
            if config.n_shared_experts
            else None
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The weighted sum of the chosen experts, plus the shared ones."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, index = self.gate(x)
        y: Tensor = self.experts(x, index, weights).to(x.dtype)
        if self.shared_experts is not None:
            y = y + self.shared_experts(x)
        return y.view_as(hidden_states)


class DeepseekDecoderLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """A Llama layer whose MLP may be a mixture."""

    def __init__(self, config: DeepseekConfig, layer_idx: int) -> None:
        """Build the layer with the MLP that the config gives it."""
        # Not LlamaDecoderLayer's __init__: it would allocate a dense MLP only to throw it away.
        super(LlamaDecoderLayer, self).__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = LlamaAttention(config=config, layer_idx=layer_idx)
        self.mlp = DeepseekMoE(config) if config.is_sparse(layer_idx) else LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DeepseekPreTrainedModel(LlamaPreTrainedModel):  # type: ignore[misc]
    """What both models share: how weights start, and what transformers may do with them."""

    config: DeepseekConfig
    config_class = DeepseekConfig
    _no_split_modules: ClassVar[list[str]] = ["DeepseekDecoderLayer"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": DeepseekDecoderLayer,
        "attentions": LlamaAttention,
        "router_logits": OutputRecorder(DeepseekRouter, index=0),
    }

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers looks for a decorator in this file; DeepseekV2Experts has it, in its own.
        return True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, DeepseekV2Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, DeepseekRouter):
            init.normal_(module.weight, mean=0.0, std=std)


class DeepseekModel(DeepseekPreTrainedModel, LlamaModel):  # type: ignore[misc]
    """The decoder without its head."""

    def __init__(self, config: DeepseekConfig) -> None:
        """Build the decoder."""
        super(LlamaModel, self).__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        layers = [DeepseekDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class DeepseekForCausalLM(DeepseekPreTrainedModel, LlamaForCausalLM):  # type: ignore[misc]
    """The decoder with its head."""

    def __init__(self, config: DeepseekConfig) -> None:
        """Build decoder and head."""
        super(LlamaForCausalLM, self).__init__(config)
        self.model = DeepseekModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def register() -> None:
    """Make AutoConfig and AutoModelForCausalLM know `deepseek`; does nothing where they already do."""
    if MODEL_TYPE in CONFIG_MAPPING:
        return
    AutoConfig.register(MODEL_TYPE, DeepseekConfig)
    AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM)
    # Per-expert tensors on disk, stacked and merged in memory: the same mapping as DeepSeek-V2.
    register_checkpoint_conversion_mapping(MODEL_TYPE, get_checkpoint_conversion_mapping("qwen2_moe"))


register()
