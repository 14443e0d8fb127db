"""The original model without its data: built on the meta device, its blocks loaded one by one.

A block's weights come from the checkpoint through transformers' own conversion (which renames and stacks experts) and
go back to nothing when the block is done.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from trilobite.checkpoint.roles import Matrix
from trilobite.checkpoint.source import DTYPES, Source
from trilobite.checkpoint.unpack import dequantize_blocks, dequantize_mxfp4
from trilobite.errors import ArchitectureError, CheckpointError
from trilobite.models.auto import read_config
from trilobite.models.names import memory_names
from trilobite.models.quiet import quiet
from trilobite.quantize.calibrate.stacked_experts import expert_matrix


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a matrix of the plan is in memory. expert: index in a module of stacked experts, or None."""

    module: str
    expert: int | None = None
    projection: str | None = None


class BlockWeights:
    """A language model whose blocks are loaded one by one.

    blocks: names of the blocks in memory    stacks: the same, those of an encoder and of a decoder apart
    dtype: of weights and activations
    """

    def __init__(self, source: Source, matrices: Sequence[Matrix], device: torch.device) -> None:
        """Build the model on meta. Raises ArchitectureError when it is not made of stacks of blocks."""
        self.source, self.device = source, device
        self.model = _skeleton(source, device)
        self.dtype: torch.dtype = self.model.dtype
        self.stacks = tuple(
            tuple(f"{stack}.{i}" for i in range(len(self.model.get_submodule(stack))))
            for stack in _stacks(self.model, str(source.path))
        )
        self.blocks = tuple(block for stack in self.stacks for block in stack)
        self._index = {block: i for i, block in enumerate(self.blocks)}
        self._places: dict[str, Place | None] = {}
        self._translate = memory_names(self.model)
        self._files: dict[str, list[Matrix]] = {}
        for matrix in {m.source: m for m in matrices}.values():
            self._files.setdefault(self._block_of(matrix.source), []).append(matrix)
        self._modules = dict(self.model.named_modules())
        self._loaded: set[str] = set()

    def _block_of(self, name: str) -> str:
        """The block that a tensor on disk belongs to, or ""."""
        index = self._block_index(self._translate(name))
        return "" if index is None else self.blocks[index]

    def _block_index(self, name: str) -> int | None:
        """Of the block that a name in memory belongs to."""
        depth = self.blocks[0].count(".") + 1
        return self._index.get(".".join(name.split(".")[:depth]))

    def place(self, matrix: Matrix) -> Place | None:
        """The module that works with a matrix; None where the model has none, as for extra prediction layers."""
        if matrix.name not in self._places:
            self._places[matrix.name] = self._place(matrix)
        return self._places[matrix.name]

    def _place(self, matrix: Matrix) -> Place | None:
        path = self._translate(matrix.name).removesuffix(".weight")
        if isinstance(self._modules.get(path), nn.Linear):
            return Place(module=path)
        if matrix.expert is None or matrix.projection is None:
            return None
        path = re.sub(r"\.(?:expert_)?\d+\.\w+$", "", path)
        if not isinstance(getattr(self._modules.get(path), "down_proj", None), nn.Parameter):
            return None
        return Place(module=path, expert=matrix.expert, projection=matrix.projection)

    def block_of(self, place: Place) -> int | None:
        """Index of the block that a module is in; None for what is outside of all blocks."""
        return self._block_index(place.module)

    def module(self, path: str) -> nn.Module:
        """A module by its name in memory."""
        module: nn.Module = self._modules[path]
        return module

    def load(self, block: str) -> None:
        """Bring a block's weights in, once; "" is everything outside of the blocks. Raises CheckpointError."""
        if block in self._loaded:
            return
        tensors = {}
        for matrix in self._files.get(block, []):
            name, tensor = _original(self.source, matrix)
            tensors[name] = tensor
        config = LoadStateDictConfig(
            dtype=self.dtype,
            dtype_plan=self.model._get_dtype_plan(self.dtype),
            weight_mapping=get_model_conversion_mapping(self.model),
            device_map={"": self.device},
        )
        with quiet():
            report, _ = convert_and_load_state_dict_in_model(self.model, tensors, config)
        prefix = f"{block}." if block else ""
        wanted = {
            n for n in report.missing_keys if n.startswith(prefix) and (block or self._block_index(n) is None)
        }
        wanted -= set(self.model.all_tied_weights_keys)  # they are on disk under the name of the other
        bad = sorted(wanted | {m[0] for m in report.mismatched_keys})
        if bad or report.conversion_errors:
            raise CheckpointError(
                f"{self.source.path}: {bad[0] if bad else next(iter(report.conversion_errors))} is missing or has "
                "another shape than its model; copy the checkpoint again"
            )
        self._loaded.add(block)

    def drop(self, block: str) -> None:
        """Give a block's memory back."""
        self._loaded.discard(block)
        for path, module in self._modules.items():
            index = self._block_index(path)
            if index == self._index.get(block):
                for name, parameter in list(module._parameters.items()):
                    if parameter is not None:
                        empty = torch.empty_like(parameter, device="meta")
                        module._parameters[name] = nn.Parameter(empty, requires_grad=False)

    @torch.no_grad()
    def put(self, place: Place, w: Tensor) -> None:
        """Replace a loaded matrix. w: [N, K] fp32."""
        self.matrix(place).copy_(w)

    def matrix(self, place: Place) -> Tensor:
        """A loaded matrix [N, K], a view of the parameter that holds it."""
        module = self.module(place.module)
        if place.expert is None:
            return module.get_parameter("weight")
        return expert_matrix(module, place.expert, place.projection)

    def parameter(self, matrix: Matrix) -> str | None:
        """Name in memory of the parameter that a kept tensor is; None where it is none of its own."""
        name = self._translate(matrix.name)
        owner = self._modules.get(name.rpartition(".")[0])
        own = None if owner is None else owner._parameters.get(name.rpartition(".")[2])
        return name if own is not None and tuple(own.shape) == matrix.shape else None

    def parameters(self, block: str) -> dict[str, Tensor]:
        """The parameters of a loaded block by name, "" is everything outside of the blocks but the embedding."""
        index = self._index.get(block)
        parameters = {
            f"{path}.{name}".lstrip("."): parameter.detach()
            for path, module in self._modules.items()
            if self._block_index(path) == index
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        for name, source in self.model.all_tied_weights_keys.items():
            if name in parameters and source in parameters:
                parameters[name] = parameters[source]
        embedding = self.model.get_input_embeddings()
        return {n: p for n, p in parameters.items() if self._modules[n.rpartition(".")[0]] is not embedding}


def _skeleton(source: Source, device: torch.device) -> PreTrainedModel:
    """The model on meta, with real values in the buffers that no checkpoint holds (rotary frequencies)."""
    config = read_config(source)
    mapping = (
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if config.is_encoder_decoder else MODEL_FOR_CAUSAL_LM_MAPPING
    )
    if type(config) not in mapping:
        raise ArchitectureError(
            f"{source}: {type(config).__name__} has no model of text alone in transformers, which calibration "
            "runs; choose a recipe without calibration"
        )
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    kind = mapping[type(config)]
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else _body_dtype(source)
    with quiet(), torch.device("meta"):
        model: PreTrainedModel = kind._from_config(config, dtype=dtype)
    owners = [(m, name) for m in model.modules() for name in m._non_persistent_buffers_set]
    for module, name in owners:
        if (buffer := module._buffers[name]) is not None:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    # transformers fills the buffers where it initialises parameters, and skips modules that it has marked as done.
    for module in model.modules():
        if hasattr(module, "_is_hf_initialized"):
            del module._is_hf_initialized
    model.initialize_weights()
    for module, name in owners:
        if (buffer := module._buffers[name]) is not None:
            module._buffers[name] = buffer.to(device)
    return model.eval()


def _body_dtype(source: Source) -> torch.dtype:
    wide = (i for i in source.tensors.values() if len(i.shape) > 1 and i.dtype in ("F32", "F16", "BF16"))
    info = next(wide, None)
    return torch.bfloat16 if info is None else DTYPES[info.dtype]


def _stacks(model: PreTrainedModel, where: str) -> tuple[str, ...]:
    """Names of the lists of blocks: the decoder's, behind the encoder's where there is one."""
    config = model.config.get_text_config()
    if config.is_encoder_decoder:
        names = {module: name for name, module in model.named_modules()}
        halves = (model.get_encoder(), model.get_decoder())
        found = [[names[m] for m in half.modules() if isinstance(m, nn.ModuleList)] for half in halves]
        return tuple(min(inside, key=lambda name: name.count(".")) for inside in found)
    count = getattr(config, "num_hidden_layers", None)
    lists = [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and len(m) == count and count
    ]
    stack: str | None = min(lists, key=lambda name: name.count("."), default=None)
    if stack is None:
        raise ArchitectureError(
            f"{where}: {type(model).__name__} has no list of {count} decoder blocks to run one by one; choose a "
            "recipe without calibration"
        )
    return (stack,)


def _original(source: Source, matrix: Matrix) -> tuple[str, Tensor]:
    """One tensor of the checkpoint in 16 bit, rescaled, under the name that it has in 16-bit checkpoints."""
    view = matrix.view
    w = source.read(matrix.source)
    if view.scale:
        scale = source.read(view.scale)
        if not view.block:
            return _from_mxfp4(matrix.source, w, scale)
        w = dequantize_blocks(w, scale, view.block, matrix.source)
    if source.rescaling is not None:
        w = source.rescaling.apply(matrix.source, w).to(w.dtype)
    return matrix.source, w


def _from_mxfp4(name: str, blocks: Tensor, scales: Tensor) -> tuple[str, Tensor]:
    # gpt-oss keeps its experts as [E, K, N] in 16 bit, and as blocks of rows in MXFP4.
    return name.removesuffix("_blocks"), dequantize_mxfp4(blocks, scales).mT.contiguous()
