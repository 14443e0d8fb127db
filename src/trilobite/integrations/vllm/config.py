"""What vLLM asks a quantization: from a checkpoint's config.json to the method of each layer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from trilobite.checkpoint.packed import check_version
from trilobite.checkpoint.source import open_source
from trilobite.integrations.vllm.manifest import Manifest, read_manifest
from trilobite.integrations.vllm.threads import share_cores


@register_quantization_config("trilobite")
class TrilobiteVllmConfig(QuantizationConfig):  # type: ignore[misc]
    """`quantization_config` of a packed checkpoint, and which of its layers are packed."""

    def __init__(self) -> None:
        """Nothing is known before `maybe_update_config` has seen the checkpoint."""
        super().__init__()
        self.manifest = Manifest({}, frozenset())

    def get_name(self) -> str:
        """As in config.json."""
        return "trilobite"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Those of the operators."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Of GPUs: what Triton's kernels need, Ampere."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None beside config.json."""
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "TrilobiteVllmConfig":
        """Raises FormatVersionError for a version that this release does not read."""
        check_version(config.get("format_version"), "quantization_config in config.json")
        return cls()

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read the headers of the checkpoint. Raises CheckpointError for what vLLM cannot run."""
        self.manifest = read_manifest(open_source(model_name, revision=revision))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Take over the names of vLLM's model."""
        self.manifest = self.manifest.renamed(hf_to_vllm_mapper.map_name)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How a layer loads and runs; None: as it would without quantization."""
        share_cores()  # before the CPU engine is imported
        from trilobite.integrations.vllm import methods

        if isinstance(layer, RoutedExperts):
            return methods.ExpertsMethod(layer.moe_config) if prefix in self.manifest.experts else None
        if isinstance(layer, LinearBase | ParallelLMHead):
            rows = self.manifest.rows_of(prefix, self.packed_modules_mapping)
            if rows is not None:
                return methods.LinearMethod(rows)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
