"""How vLLM's layers load packed weights and run them: linear layers, the head, and experts.

A layer registers empty parameters under the names that vLLM's loaders look for. Their `weight_loader` keeps what
arrives, whole and as it is stored; when all is there, this rank's part is cut out and made ready to run.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.utils import set_weight_attrs

from trilobite.errors import ArchitectureError, CheckpointError
from trilobite.formats.bitpack import ROWS
from trilobite.formats.padding import whole_blocks
from trilobite.formats.weight import PackedWeight
from trilobite.integrations.vllm import layers
from trilobite.integrations.vllm.manifest import SUFFIXES

SHARDS = {"q": 0, "k": 1, "v": 2}
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
"""What vLLM calls experts' activations, and we."""


def _placeholder(layer: Any, name: str, loader: Any, attributes: dict[str, Any]) -> None:
    """An empty parameter whose `weight_loader` takes what is loaded."""
    parameter = nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
    set_weight_attrs(parameter, {**attributes, "weight_loader": loader})
    layer.register_parameter(name, parameter)


class LinearMethod(LinearMethodBase):  # type: ignore[misc]
    """A linear layer of one packed matrix, or of several that vLLM runs as one; or the head."""

    def __init__(self, rows: list[int]) -> None:
        """rows: N of each matrix as packed, the whole one."""
        self.rows = rows
        self.parts: list[dict[str, Tensor]] = [{} for _ in rows]
        self.linear: layers.Linear | None = None

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Wait for the parts of each matrix."""
        self.width, self.width_here, self.heights = (
            input_size,
            input_size_per_partition,
            output_partition_sizes,
        )
        for suffix in SUFFIXES:

            def load(
                parameter: nn.Parameter, loaded: Tensor, shard: Any = None, suffix: str = suffix
            ) -> None:
                at = 0 if shard is None else SHARDS.get(shard, shard)
                self.parts[at][suffix] = loaded

            _placeholder(layer, f"weight_{suffix}", load, {})

    def process_weights_after_loading(self, layer: Any) -> None:
        """Cut out this rank's part. Raises CheckpointError or ShapeError."""
        device = layer.weight_packed.device
        pieces = []
        for i, (parts, n, height) in enumerate(zip(self.parts, self.rows, self.heights, strict=True)):
            w = layers.whole_weight(parts, (n, whole_blocks(self.width)), layer.prefix)
            rank = _rank_of_rows(layer, i)
            first = layer.tp_rank * self.width_here if isinstance(layer, RowParallelLinear) else 0
            at = (rank * height, (rank + 1) * height), (first, first + self.width_here)
            pieces.append(layers.LinearPiece(w, *at, device))
        self.parts.clear()
        self.linear = layers.Linear(pieces)
        self.name = layers.keep(layer.prefix, self.linear)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [..., columns of this rank]    returns: [..., its rows]."""
        y: Tensor = torch.ops.trilobite.vllm_linear(x, self.name, sum(self.heights))
        return y if bias is None else y + bias


def _rank_of_rows(layer: Any, matrix: int) -> int:
    """Which of the equal parts of a matrix's rows is this rank's."""
    if isinstance(layer, RowParallelLinear | ReplicatedLinear):
        return 0
    replicas = layer.num_kv_head_replicas if isinstance(layer, QKVParallelLinear) and matrix > 0 else 1
    return int(layer.tp_rank // replicas)


class ExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """The routed experts of one layer; they may differ in format and rank."""

    def __init__(self, moe: Any) -> None:
        """moe: the layer's configuration."""
        super().__init__(moe)
        self.parts: dict[tuple[int, str], dict[str, Tensor]] = defaultdict(dict)
        self.experts: layers.RoutedExperts | None = None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Wait for the parts of each expert's matrices. Raises ArchitectureError for experts that compute otherwise."""
        _check(layer)
        for suffix in SUFFIXES:

            def load(
                param: nn.Parameter,
                loaded_weight: Tensor,
                weight_name: str,
                shard_id: str,
                expert_id: int,
                return_success: bool = False,
                suffix: str = suffix,
            ) -> bool | None:
                local = layer._map_global_expert_id_to_local_expert_id(expert_id)
                if local >= 0:
                    self.parts[local, shard_id][suffix] = loaded_weight
                return local >= 0 if return_success else None

            load.supports_moe_loading = True  # type: ignore[attr-defined]
            for name in ("w13", "w2"):
                _placeholder(layer, f"{name}_weight_{suffix}", load, {})

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: vLLM's own kernels are not used."""
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Cut out this rank's part. Raises CheckpointError or ShapeError."""
        device = layer.w2_weight_packed.device
        experts = [self._expert(layer, e) for e in range(layer.local_num_experts)]
        self.parts.clear()
        parallel = layer.moe_config.moe_parallel_config
        share = layers.Share(rank=parallel.tp_rank, ranks=parallel.tp_size, experts=layer.expert_map)
        self.experts = layers.RoutedExperts(
            experts,
            layer.moe_config.hidden_dim_unpadded,
            ACTIVATIONS[layer.activation.value],
            share,
            device,
            layer.layer_name,
        )
        self.name = layers.keep(layer.layer_name, self.experts)

    def _expert(self, layer: Any, expert: int) -> tuple[PackedWeight, PackedWeight, PackedWeight]:
        """(gate, up, down) as stored, whole: their sides as filled up."""
        made = []
        sides = [whole_blocks(layer.moe_config.hidden_dim_unpadded)]
        for shard in ("w1", "w3", "w2"):
            name = f"{layer.layer_name}.{expert}.{shard}"
            parts = self.parts[expert, shard]
            if "packed" not in parts:
                raise CheckpointError(f"{name}.weight_packed is missing from the checkpoint; copy it again")
            n = ROWS * parts["packed"].shape[0]
            sides = [sides[0], n] if shard != "w2" else sides
            made.append(layers.whole_weight(parts, (n, sides[0] if shard != "w2" else sides[1]), name))
        return made[0], made[1], made[2]

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """The routed experts' sum, of this rank's part: [T, H]. vLLM runs shared experts itself."""
        y: Tensor = torch.ops.trilobite.vllm_experts(x, topk_weights, topk_ids, self.name)
        return y


def _check(layer: Any) -> None:
    """Raise ArchitectureError for experts that do not compute down(act(gate) * up)."""
    odd = [
        what
        for what, found in (
            (f"the activation {layer.activation.value}", layer.activation.value not in ACTIVATIONS),
            ("weights of the router on their input", layer.apply_router_weight_on_input),
            ("a limit on their activations", layer.swiglu_limit is not None),
            ("biases", layer.moe_config.has_bias),
        )
        if found
    ]
    if odd:
        raise ArchitectureError(
            f"{layer.layer_name}: experts with {' and '.join(odd)} do not run packed in vLLM; run this model by "
            "`trilobite serve`, or compress it with --keep expert"
        )
