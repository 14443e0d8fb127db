"""The plugin by which `from_pretrained` loads, saves and makes packed models.

`integrations/register.py` makes it known: `quant_method: trilobite` in a config.json finds `TrilobiteQuantizer`. A
packed checkpoint loads tensor by tensor; an original one with `quantization_config=TrilobiteConfig("milo-s1")` is
quantized while it loads.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, PrefixChange, WeightConverter
from transformers.quantizers import HfQuantizer

from trilobite.checkpoint.guard import lift
from trilobite.checkpoint.packed import FORMAT_VERSION, REPORT, SCALED_VERSION, check_version
from trilobite.checkpoint.source import Source, open_source
from trilobite.checkpoint.verify import check_names
from trilobite.errors import CheckpointError, OffloadError, RecipeError
from trilobite.integrations.beside import BesideLoader
from trilobite.integrations.config import TrilobiteConfig
from trilobite.integrations.resizing import resize_packed
from trilobite.integrations.saving import notes_of, save_packed
from trilobite.integrations.streaming import Streamed, check_placement
from trilobite.kernels.layer import CpuSettings
from trilobite.models.experts import EXPERT_NAME
from trilobite.models.names import memory_names
from trilobite.quantize.plan.plan import Plan, PlanLine
from trilobite.quantize.run.card import CARD, model_card
from trilobite.quantize.run.compress import prepare
from trilobite.quantize.run.identity import run_identity
from trilobite.quantize.run.lines import quantize_line
from trilobite.quantize.run.metadata import packed_report
from trilobite.quantize.threads import single_threaded_torch
from trilobite.recipe import load_recipe, needs_calibration, recipe_from_dict
from trilobite.runtime.mapped import EXPERT_PART
from trilobite.runtime.modules.dequantize import dequantize_modules
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.modules.linear import PackedLinear
from trilobite.runtime.modules.matrix import PackedMatrix
from trilobite.runtime.modules.swap import (
    check_rows,
    configure,
    finish,
    group_parts,
    on_meta,
    set_exponents,
    swap_modules,
)


class TrilobiteQuantizer(HfQuantizer):  # type: ignore[misc]
    """Swaps modules before loading and gathers experts after it; quantizes in between when asked to."""

    requires_calibration = False

    def __init__(self, quantization_config: TrilobiteConfig, **kwargs: Any) -> None:
        """kwargs: pre_quantized, as transformers passes it."""
        super().__init__(quantization_config, **kwargs)
        self.lines: dict[str, list[tuple[str, PlanLine]]] = {}
        self.plan: Plan | None = None
        self.records: dict[str, dict[str, Any]] = {}
        self.source: Source | None = None
        self.notes: dict[str, str] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.streamed: Streamed | None = None
        self.beside: BesideLoader | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a format version that this release does not read."""
        check_version(self.quantization_config.format_version, "quantization_config in config.json")

    def update_device_map(self, device_map: Any) -> Any:
        """As it is. Raises OffloadError where bounds on memory say where the model lies."""
        check_placement(device_map, self.quantization_config.memory, self.quantization_config.gpu_memory)
        return device_map

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The first hook that sees the configuration: the weights have found who reads them."""
        lift(config)
        return config

    @property
    def is_trainable(self) -> bool:
        """Adapters train on top of packed weights, which are constants; so do norms, routers and embeddings."""
        return True

    @property
    def is_compileable(self) -> bool:
        """`generate` may compile the step with a static cache: the operators take part in torch.compile's graphs."""
        return True

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """save_pretrained writes the packed tensors under the names they were loaded from."""
        return True

    def remove_quantization_config(self, model: PreTrainedModel) -> None:
        """The model is an ordinary one from now on, and is saved as one."""
        super().remove_quantization_config(model)
        del model.save_pretrained, model.resize_token_embeddings
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                vars(module.config).pop("_is_quantized", None)

    def dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """`model.dequantize()`: an ordinary model, in place. dtype: of its weights; default: what it computes in."""
        return super().dequantize(model, dtype=dtype or model.dtype)  # type: ignore[no-any-return]

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
        dequantize_modules(model, dtype)
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], *model: PreTrainedModel) -> list[Any]:
        """Converters stack 16-bit weights alone: up to transformers 5.20 `weight` is found in `weight_packed`, too."""
        found = super().update_weight_conversions(weight_conversions, *model)
        return [_of_whole_names(c) if isinstance(c, WeightConverter) else c for c in found]

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        translate, exponents = memory_names(model), self._exponents()
        mapped, self.quantization_config.mapped = self.quantization_config.mapped, None
        if mapped is None:
            if not checkpoint_files:
                raise CheckpointError("no checkpoint files to load; expected a folder with safetensors files")
            self.source = open_source(str(Path(checkpoint_files[0]).parent))
            self._let_stream(self.source)
            mapped = self.streamed.mapped if self.streamed else None
            source = self.source
        else:
            source = mapped.source
        if self.pre_quantized:
            self.notes = notes_of(source.path)
        parts = self._stored(source)
        if mapped is not None:
            parts |= {name: t for name, t in mapped.tensors.items() if EXPERT_PART.match(name)}
        swap_modules(model, group_parts({translate(name): t for name, t in parts.items()}))

        def paths(by_name: dict[str, int]) -> dict[str, int]:
            return {
                translate(f"{name}_packed").removesuffix(".weight_packed"): n for name, n in by_name.items()
            }

        set_exponents(model, paths(exponents))
        if not self.pre_quantized:
            self._expect_originals(model, translate)
        elif source.rows is not None:
            check_rows(model, paths(source.rows))
        if mapped is not None:
            self.beside = BesideLoader(model)
        self.dtypes = {name: p.dtype for name, p in model.named_parameters()}

    def _exponents(self) -> dict[str, int]:
        """Those of the checkpoint, which the loaded model has no need of: what is saved of it has format version 1."""
        chosen = self.quantization_config
        found, chosen.exponents = chosen.exponents, {}
        version, chosen.format_version = chosen.format_version, FORMAT_VERSION
        if not isinstance(found, dict) or not all(type(n) is int and abs(n) <= 127 for n in found.values()):
            raise CheckpointError(
                "config.json: exponents of quantization_config are no small integers; copy it again"
            )
        if version == SCALED_VERSION and not found:
            raise CheckpointError(
                "config.json: quantization_config lacks the exponents of format version 2; copy it again"
            )
        return found

    def _let_stream(self, source: Source) -> None:
        """Map a checkpoint whose experts shall stream."""
        chosen = self.quantization_config
        memory, gpu_memory = chosen.memory, chosen.gpu_memory
        chosen.memory = chosen.gpu_memory = None
        if memory is None and gpu_memory is None:
            return
        if not self.pre_quantized:
            raise OffloadError(
                "memory and gpu_memory are for packed checkpoints, from whose files experts stream: run `trilobite "
                "compress` first and load what it makes"
            )
        self.streamed = Streamed(source, memory, gpu_memory)

    def _stored(self, source: Source) -> dict[str, Tensor]:
        """Every packed tensor, on meta: on disk, or planned when quantizing on load."""
        if self.pre_quantized:
            return on_meta(source.tensors)
        recipe = self.quantization_config.recipe
        chosen = recipe_from_dict(recipe, "recipe") if isinstance(recipe, dict) else load_recipe(recipe)
        if needs_calibration(chosen) or chosen.importance != "none":
            raise RecipeError(
                f"recipe {chosen.name}: needs the model to run on a text, which from_pretrained cannot do; run "
                "`trilobite compress` and load what it makes"
            )
        if chosen.columns != "none":
            raise RecipeError(
                f"recipe {chosen.name}: column scales change norms too, which from_pretrained loads as they are; run "
                "`trilobite compress` and load what it makes, or choose `columns: none`"
            )
        self.plan = prepare(source, chosen, keep_unmatched=self.quantization_config.keep_unmatched)
        packed = [line for line in self.plan.lines if line.format is not None]
        return on_meta({t.name: t for line in packed for t in line.stored})

    def _expect_originals(self, model: PreTrainedModel, translate: Callable[[str], str]) -> None:
        """Give each swapped module the parameters that its original had, for the loader to aim at."""
        assert self.plan is not None
        modules = dict(model.named_modules())
        for line in self.plan.lines:
            if line.format is None:
                continue
            path = translate(line.stored[0].name).removesuffix(".weight_packed")
            match = EXPERT_NAME.match(path)
            experts = modules.get(match[1]) if match else None
            if match and isinstance(experts, PackedExperts):
                stacked = experts.stacked_name(match[4])
                setattr(experts, stacked, experts.original._parameters[stacked])
                self.lines.setdefault(f"{match[1]}.{stacked}", []).append(
                    (path.removeprefix(f"{match[1]}."), line)
                )
            elif isinstance(modules.get(path), PackedLinear):
                weight = torch.empty(line.matrix.shape, device="meta")
                modules[path].weight = nn.Parameter(weight, requires_grad=False)
                self.lines[f"{path}.weight"] = [("", line)]

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether a loaded parameter is to be packed."""
        return param_name in self.lines

    def get_quantize_ops(self) -> "QuantizeOnLoad":
        """The operation that packs one loaded parameter."""
        return QuantizeOnLoad(self)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if self.beside is not None:
            self.beside.put_back(model)
            self.beside = None
        self._cast_renamed(model)
        finish(model)
        if self.pre_quantized and self.source is not None and REPORT in self.notes:
            check_names(self.source)
        chosen = self.quantization_config
        configure(model, CpuSettings(chosen.activations, chosen.threads))
        if self.plan is not None:
            self.notes = self._describe(self.plan)
        model.save_pretrained = partial(save_packed, model, self.notes)
        model.resize_token_embeddings = partial(resize_packed, model, self.notes)
        # What save_pretrained reverses: the renamings, not the converters that stacked 16-bit experts, nor a change of
        # prefixes that these files had no need of.
        used = {c.source_patterns[0] for c in model._weight_conversions or () if isinstance(c, PrefixChange)}
        model._weight_conversions = [
            c
            for c in get_model_conversion_mapping(model, None, self, add_legacy=False)
            if not isinstance(c, PrefixChange) or c.source_patterns[0] in used
        ]
        if self.streamed is not None:
            self.streamed.bind(model)
            self.streamed = None

    def _cast_renamed(self, model: PreTrainedModel) -> None:
        """Give parameters their dtype: transformers up to 5.20 leaves those that it renames in that of the file."""
        in_fp32 = "|".join(model._get_dtype_plan(model.dtype))
        for name, parameter in model.named_parameters():
            wanted = self.dtypes.get(name, parameter.dtype)
            if parameter.dtype != wanted and not (in_fp32 and re.search(in_fp32, name)):
                parameter.data = parameter.to(wanted)

    def _describe(self, plan: Plan) -> dict[str, str]:
        """The report and the card of what was quantized while it loaded."""
        assert self.source is not None
        identity = run_identity(
            self.source, plan.recipe, torch.device("cpu"), frequency=None, calibration=None
        )
        done = {line.matrix.name: self.records.get(line.matrix.name, {}) for line in plan.lines}
        made = packed_report(self.source, str(self.source.path), plan, identity, done, {}, {})
        return {REPORT: made, CARD: model_card(json.loads(made), self.source.config)}


def _of_whole_names(converter: WeightConverter) -> WeightConverter:
    """The same converter, for names that end where its patterns end, or go on with `weight` behind a dot there."""
    sources = [
        pattern + (r"(?!weight_)" if pattern.endswith(".") else r"(?!\w)")
        for pattern in converter._original_source_patterns
    ]
    made = WeightConverter(sources, list(converter._original_target_patterns), converter.operations)
    made.scope_prefix, made.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
    return made


class QuantizeOnLoad(ConversionOps):  # type: ignore[misc]
    """Pack one parameter as it arrives: a linear weight [N, K], or the stacked experts of a layer."""

    def __init__(self, quantizer: TrilobiteQuantizer) -> None:
        """quantizer: knows the plan."""
        self.quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        model: PreTrainedModel | None = None,
        full_layer_name: str | None = None,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """Store the packed tensors in the module and delete the parameter that was loaded."""
        assert model is not None
        assert full_layer_name is not None
        assert self.quantizer.plan is not None
        (value,) = input_dict.values()
        w = value[0] if isinstance(value, list) else value
        path, _, name = full_layer_name.rpartition(".")
        module = model.get_submodule(path)
        loaded = {full_layer_name}
        for child, line in self.quantizer.lines[full_layer_name]:
            target = module.get_submodule(child) if child else module
            assert isinstance(target, PackedMatrix)
            if isinstance(module, PackedExperts):
                assert line.matrix.expert is not None
                part = module.cut(w, line.matrix.expert, child.rpartition(".")[2]).contiguous()
            else:
                part = w
            with single_threaded_torch():
                packed, record = quantize_line(part, line, self.quantizer.plan.recipe)
            self.quantizer.records[line.matrix.name] = record
            target.replace(packed)
            loaded |= {".".join(filter(None, (path, child, f"weight_{s}"))) for s in packed.tensors()}
        module.register_parameter(name, None)
        if missing_keys is not None:
            missing_keys -= loaded
        return {}
