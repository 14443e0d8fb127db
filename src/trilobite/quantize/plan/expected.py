"""Whether a checkpoint is the model that its config.json describes, and what of it can run packed.

Asked before anything is read or written: what loading would refuse, planning refuses. The model is built without data,
and the checkpoint's names and shapes go the way that loading sends them.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trilobite.checkpoint.roles import Matrix
from trilobite.checkpoint.source import DTYPES, Source
from trilobite.errors import ArchitectureError, CheckpointError
from trilobite.models.auto import read_config
from trilobite.models.direct import taken_directly
from trilobite.models.experts import EXPERT_NAME, expert_activation
from trilobite.models.names import memory_names
from trilobite.models.skeleton import Difference, compare, skeleton
from trilobite.recipe import Role

DAMAGED = "copy the checkpoint again, or correct config.json"


def unfit_matrices(
    source: Source, matrices: Sequence[Matrix], *, keep_unmatched: bool = False
) -> dict[str, str]:
    """Check a checkpoint against its model; returns why single matrices cannot run packed, by name.

    keep_unmatched: pass by the tensors that the model does not have
    Raises CheckpointError where a tensor is missing, superfluous or of another shape or dtype than its model's,
    ArchitectureError where there is no model that runs.
    """
    config = read_config(source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = skeleton(config, source)
    kinds = {name: type(module) for name, module in model.named_modules()}
    reasons = _unfit(model, matrices)
    _check_dtypes(source, matrices)
    found = compare(model, dict(_on_meta(source, m) for m in {m.source: m for m in matrices}.values()))
    _report(source, type(model).__name__, found, kinds, keep_unmatched=keep_unmatched)
    return reasons


def _on_meta(source: Source, m: Matrix) -> tuple[str, Tensor]:
    """A tensor without data, under the name and in the shape that it has in a 16-bit checkpoint."""
    info, name = source.tensors[m.source], m.source
    shape, dtype = info.shape, DTYPES[info.dtype]
    if m.view.scale and not m.view.block:
        # gpt-oss keeps its experts as [E, K, N] in 16 bit, and as blocks of rows in MXFP4.
        name, shape = name.removesuffix("_blocks"), (shape[0], 32 * shape[2], shape[1])
    if m.view.scale:
        dtype = torch.bfloat16
    return name, torch.empty(shape, dtype=dtype, device="meta")


def _check_dtypes(source: Source, matrices: Sequence[Matrix]) -> None:
    """Raise CheckpointError for weights that are no floating-point numbers."""
    for m in matrices:
        dtype = source.tensors[m.source].dtype
        if (
            (m.quantizable or m.role is Role.NORM)
            and not m.view.scale
            and not DTYPES[dtype].is_floating_point
        ):
            raise CheckpointError(
                f"{source}: {m.source} is {dtype}; expected weights in 16 or 32 bit, fp8 with scales or mxfp4: "
                "compress the original checkpoint"
            )


def _report(
    source: Source,
    name: str,
    found: Difference,
    kinds: Mapping[str, type[nn.Module]],
    *,
    keep_unmatched: bool,
) -> None:
    """Raise CheckpointError for the first thing that differs."""
    for tensor, (have, want) in found.wrong.items():
        raise CheckpointError(
            f"{source}: {tensor} is {list(have)}, the {name} of config.json has {list(want)} there; {DAMAGED}"
        )
    if found.unclear:
        raise CheckpointError(
            f"{source}: {found.unclear[0]} does not come together: expected all experts of a layer with all their "
            f"matrices, in one shape; {DAMAGED}"
        )
    if found.missing:
        raise CheckpointError(
            f"{source}: {len(found.missing)} tensors of the {name} of config.json are missing, first "
            f"{found.missing[0]}; {DAMAGED}"
        )
    layers = [n for n in found.unexpected if _is_layer_too_many(n, kinds)]
    if layers or (found.unexpected and not keep_unmatched):
        remedy = DAMAGED if layers else f"{DAMAGED}, or pass --keep-unmatched where they may be left out"
        raise CheckpointError(
            f"{source}: {len(found.unexpected)} tensors are in no {name} as config.json describes it, first "
            f"{(layers or found.unexpected)[0]}; {remedy}"
        )


def _is_layer_too_many(name: str, kinds: Mapping[str, type[nn.Module]]) -> bool:
    """Whether a tensor belongs to a layer after the model's last."""
    path = name.split(".")
    return any(
        part.isdigit()
        and issubclass(kinds.get(".".join(path[:i]), nn.Module), nn.ModuleList)
        and ".".join(path[: i + 1]) not in kinds
        for i, part in enumerate(path)
    )


def _unfit(model: PreTrainedModel, matrices: Sequence[Matrix]) -> dict[str, str]:
    """Why matrices cannot run packed, by name: those that no linear layer or module of experts holds."""
    translate, taken = memory_names(model), taken_directly(model)
    modules = dict(model.named_modules())
    reasons: dict[str, str] = {}
    stacks: dict[str, str] = {}
    for m in matrices:
        if not m.quantizable:
            continue
        path = translate(m.name).removesuffix(".weight")
        match = EXPERT_NAME.match(path)
        if isinstance(modules.get(path), nn.Linear):
            if path.rpartition(".")[2] in taken:
                reasons[m.name] = f"{type(model).__name__} computes with it directly"
            elif translate(f"{m.name}_packed") != f"{path}.weight_packed":
                reasons[m.name] = f"{type(model).__name__} finds it under its 16-bit name only"
            continue
        if match and match[1] in modules:
            if match[1] not in stacks:
                stacks[match[1]] = _stack_trouble(modules[match[1]])
            reason = stacks[match[1]]
        elif path in modules:
            reason = f"a {type(modules[path]).__name__} runs in 16 bit only"
        elif _passed_by(path, modules):
            continue
        else:
            reason = f"its {type(model).__name__} has no linear layer for it"
        if reason:
            reasons[m.name] = reason
    return reasons


def _stack_trouble(module: nn.Module) -> str:
    """Why a module of stacked experts cannot run packed; "" where it can."""
    try:
        expert_activation(module)
    except ArchitectureError as e:
        return str(e)
    return ""


def _passed_by(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether loading passes by a whole block that the model does not have, such as an extra prediction layer."""
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return not path or isinstance(modules[path], nn.ModuleList)
