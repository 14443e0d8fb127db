"""Swap the modules of a transformers model on the meta device for packed ones, as the tensors at hand demand."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trilobite.checkpoint.layout import StoredTensor
from trilobite.checkpoint.source import DTYPES, TensorInfo
from trilobite.errors import ArchitectureError, CheckpointError
from trilobite.formats.bitpack import ROWS
from trilobite.formats.weight import SUFFIXES
from trilobite.kernels.layer import CpuSettings
from trilobite.models.experts import EXPERT_NAME
from trilobite.runtime.modules.dequantize import decode_scaled
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.modules.linear import PackedLinear
from trilobite.runtime.modules.matrix import PackedMatrix, check_loaded
from trilobite.runtime.modules.residence import PackedModule, modules_that_run

Parts = dict[str, Tensor]


def group_parts(tensors: Mapping[str, Tensor]) -> dict[str, Parts]:
    """Tensors by name -> parts by module path: `a.q_proj.weight_packed` -> {"a.q_proj": {"packed": ...}}.

    Raises CheckpointError for scales or compensators without codes.
    """
    groups: dict[str, Parts] = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        suffix = leaf.removeprefix("weight_")
        if leaf.startswith("weight_") and suffix in SUFFIXES:
            groups.setdefault(path, {})[suffix] = tensor
    for path, parts in groups.items():
        if "packed" not in parts:
            raise CheckpointError(f"{path}.weight_packed is missing from the checkpoint; copy it again")
    return groups


def swap_modules(model: PreTrainedModel, packed: Mapping[str, Parts]) -> None:
    """Replace the modules whose weights are packed.

    packed: module path in memory -> parts, on meta or as they are. Paths of modules that the model does not have,
    such as DeepSeek's extra prediction layers, are passed by, as transformers passes by their 16-bit tensors.
    Raises ArchitectureError when a module is of a kind that cannot be replaced.
    """
    modules = dict(model.named_modules())
    experts: dict[tuple[str, str], dict[int, dict[str, Parts]]] = {}
    for path, parts in packed.items():
        module = modules.get(path)
        match = EXPERT_NAME.match(path)
        if isinstance(module, nn.Linear):
            shape = (module.out_features, module.in_features)
            model.set_submodule(path, PackedLinear(shape, parts, module.bias))
            _skip_initialisation(model, path)
        elif module is not None:
            raise ArchitectureError(
                f"{path}: is a {type(module).__name__} and cannot run packed; compress this model with a recipe that "
                "keeps it in 16 bit"
            )
        elif match and match[1] in modules:
            path, prefix, expert, name = match.groups()
            experts.setdefault((path, prefix), {}).setdefault(int(expert), {})[name] = parts
    for (path, prefix), indexed in experts.items():
        model.set_submodule(path, PackedExperts(modules[path], indexed, prefix))
        _skip_initialisation(model, path)


def check_rows(model: nn.Module, rows: Mapping[str, int]) -> None:
    """Raise CheckpointError where a packed matrix has another N than its module: 505 rows fill 32 tiles, as 512 do.

    rows: N by module path, of the matrices whose last tiles are partial; all others' tiles are full
    """
    for path, module in model.named_modules():
        if not isinstance(module, PackedMatrix):
            continue
        n = rows.get(path, ROWS * module.packed().packed.shape[0])
        if n != module.shape[0]:
            raise CheckpointError(
                f"{path}: packed with {n} rows, the model of config.json has {module.shape[0]} there; copy the "
                "checkpoint again"
            )


def _skip_initialisation(model: PreTrainedModel, path: str) -> None:
    """Some models initialise a layer's weight from the modules around it; there is no weight any more."""
    while "." in path:
        path = path.rpartition(".")[0]
        model.get_submodule(path)._is_hf_initialized = True


def configure(model: nn.Module, settings: CpuSettings) -> None:
    """Let all packed modules of a model compute so on CPUs; other models keep their own settings."""
    for module in modules_that_run(model):
        if isinstance(module, PackedModule):
            module.configure(settings)


def set_exponents(model: nn.Module, exponents: Mapping[str, int]) -> None:
    """Tell packed matrices of the powers of two that they are multiplied with. exponents: by module path"""
    for path, module in model.named_modules():
        if isinstance(module, PackedMatrix):
            module.exponent = exponents.get(path, 0)


def finish(model: PreTrainedModel) -> None:
    """After loading: check every packed matrix, and let every module settle where its weights have arrived."""
    for name, module in model.named_modules():
        if isinstance(module, PackedMatrix):
            check_loaded(module, name)
    decode_scaled(model)
    for module in model.modules():
        if isinstance(module, PackedModule):
            module.settle()


def on_meta(stored: Mapping[str, StoredTensor | TensorInfo]) -> dict[str, Tensor]:
    """Tensors without data, of the dtypes and shapes that these have in files."""
    return {name: torch.empty(t.shape, dtype=DTYPES[t.dtype], device="meta") for name, t in stored.items()}
