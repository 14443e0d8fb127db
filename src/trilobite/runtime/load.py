"""Load a checkpoint, packed or original, as a transformers model; packed weights stay in the mapped file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trilobite.checkpoint.packed import REPORT, check_finished, check_version, read_report
from trilobite.checkpoint.source import Source, open_source
from trilobite.checkpoint.unpack import UNPACKABLE, check_scales, quantization_of
from trilobite.checkpoint.verify import check_intact, check_names
from trilobite.errors import (
    CheckpointError,
    DeviceError,
    OffloadError,
    SettingError,
    TrilobiteError,
    one_line,
    refuse_exhausted,
)
from trilobite.kernels.layer import CpuSettings
from trilobite.models.auto import read_config, read_tokenizer
from trilobite.models.quiet import quiet
from trilobite.models.skeleton import model_class, skeleton
from trilobite.runtime.attention import attend_natively
from trilobite.runtime.collector import without_collecting
from trilobite.runtime.heap import keep_freed_memory
from trilobite.runtime.mapped import EXPERT_PART, map_files
from trilobite.runtime.modules.router import route_natively
from trilobite.runtime.modules.swap import configure
from trilobite.runtime.offload.device import bound_on_gpu, gpu_tier
from trilobite.runtime.offload.plan import AUTO, GpuMemory, Offload
from trilobite.runtime.offload.streaming import bound
from trilobite.runtime.read_ahead import read_ahead
from trilobite.runtime.recurrent import keep_states_natively
from trilobite.runtime.step.replay import replay_steps


@without_collecting()
def load(
    path_or_id: str | Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    activations: str = "exact",
    threads: int | None = None,
    memory: str | int | Offload | None = None,
    gpu_memory: str | int | GpuMemory | None = None,
    verify: bool = False,
) -> PreTrainedModel:
    """Load a packed or an original checkpoint for inference.

    Tensors are views of the mapped files: loading reads the headers, and pages come in when they are first used, or
    before, where there is memory for all of them (`read_ahead`). On another device they are copied there. Never runs a
    checkpoint's own code.

    dtype: of what stays unpacked, and of the activations; default: the checkpoint's
    activations, threads: of packed weights on CPUs, for this model alone: "exact", or "int8", which rounds what enters
    their products to 8 bits; default: as many threads as torch
    memory: run in so much of it, experts streaming from the disk: bytes, "8GiB", "auto" (only where the model does not
    fit), or an `Offload` with more to say; for packed checkpoints on the CPU, and with gpu_memory
    gpu_memory: run on a GPU in so much of its memory, experts streaming from the host's: bytes, "10GiB", or a
    `GpuMemory`; memory bounds the host's beneath
    verify: read a packed checkpoint whole first, and compare it with its checksums
    Raises CheckpointError, FormatVersionError, ArchitectureError, SettingError; where there is no such device or memory
    ends, DeviceError or OffloadError.
    """
    _check_device(device)
    settings = CpuSettings(activations, threads)
    if memory not in (None, AUTO) and device != "cpu" and gpu_memory is None:
        raise OffloadError(f"memory={memory!r} goes with device='cpu' or with gpu_memory, not {device!r}")
    gpu = None if gpu_memory is None else gpu_tier(gpu_memory, "cuda" if device == "cpu" else device)
    check_finished(Path(path_or_id))
    source = open_source(path_or_id)
    quantization = quantization_of(source, "trilobite", *UNPACKABLE)
    packed = quantization.get("quant_method") == "trilobite"
    if packed:
        check_version(quantization.get("format_version"), str(source.path))
        if (source.path / REPORT).exists():
            read_report(source.path)
    else:
        check_scales(source)
    if verify:
        check_intact(source)
    mapped = map_files(source)
    tensors = mapped.tensors
    if device == "cpu" and gpu is None and memory in (None, AUTO):
        read_ahead(mapped.files)
    config = read_config(source)
    if packed:
        config.quantization_config = {**quantization, "mapped": mapped}
        loaded = {name: t for name, t in tensors.items() if not EXPERT_PART.match(name)}
    else:
        loaded = tensors
    model, report = _from_tensors(config, source, loaded, dtype)
    _check_complete(source.path, report)
    if packed and (source.path / REPORT).exists():
        check_names(source)
    if (source.path / "generation_config.json").exists():
        model.generation_config = _generation_config(source.path)
    model.name_or_path = str(source.path)
    configure(model, settings)
    attend_natively(model)
    keep_states_natively(model)
    route_natively(model)
    model.eval()
    if gpu is not None:
        bound_on_gpu(model, source, tensors, memory, gpu)
        return model
    model = _to_device(model, device)
    if device == "cpu":
        keep_freed_memory()
        bound(model, source, tensors, memory)
        replay_steps(model)
    return model


def _check_complete(folder: Path, report: Mapping[str, Any]) -> None:
    """Raise CheckpointError for tensors of other shapes than the model's, and for those that are not there."""
    for name, *shapes in sorted(report["mismatched_keys"]):
        have, wanted = map(tuple, shapes)
        raise CheckpointError(
            f"{folder}: {name} is {have}, config.json asks for {wanted}; copy the checkpoint again"
        )
    if report["missing_keys"]:
        names = sorted(report["missing_keys"])
        raise CheckpointError(f"{folder}: {len(names)} tensors are missing, first {names[0]}; copy it again")


def _generation_config(folder: Path) -> GenerationConfig:
    """Raises CheckpointError for a file that transformers cannot read, or whose values are of a kind it trips over."""
    try:
        config = GenerationConfig.from_pretrained(folder)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
            value = getattr(config, name)
            if value is not None and not _integers(value if isinstance(value, list) else [value]):
                raise ValueError(f"{name} is {value!r}, expected integers")
        for name in ("output_hidden_states", "output_attentions"):  # all layers', or those of some layers
            value = getattr(config, name, None)
            if value is not None and not isinstance(value, bool) and not _integers(value):
                raise ValueError(f"{name} is {value!r}, expected true, false or integers")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(
            f"{folder / 'generation_config.json'}: cannot be read: {e}; copy it again, or delete it"
        ) from e
    return config


def _integers(values: object) -> bool:
    return isinstance(values, list) and all(type(i) is int for i in values)


def _from_tensors(
    config: PreTrainedConfig, source: Source, tensors: dict[str, Tensor], dtype: torch.dtype | None
) -> tuple[PreTrainedModel, Any]:
    """The model with its tensors in it, and what did not fit."""
    kind = model_class(config, source)
    try:
        with quiet():
            return kind.from_pretrained(  # type: ignore[no-any-return]
                None,
                config=config,
                state_dict=tensors,
                dtype=dtype or "auto",
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported by an error of our own
            )
    except TrilobiteError:
        raise
    except Exception as e:
        refuse_exhausted(source.path, e)
        skeleton(config, source)  # says so where the configuration is to blame
        raise CheckpointError(
            f"{source.path}: its tensors do not make the model that config.json asks for ({type(e).__name__}: "
            f"{one_line(e)}); copy the checkpoint again"
        ) from e


def _check_device(device: str) -> None:
    """Raise SettingError for what is no device, DeviceError for a GPU that is not there."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise SettingError(f"device {device!r}: expected cpu, cuda, or cuda:N") from e
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"device {device!r}: torch sees {torch.cuda.device_count()} GPUs here; use device='cpu', or install a "
            "CUDA build of torch"
        )


def _to_device(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Move a model. Raises DeviceError saying how much it needs where memory does not suffice."""
    needed = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    try:
        return model.to(device)  # type: ignore[no-any-return]
    except torch.OutOfMemoryError as e:
        total = torch.cuda.mem_get_info(device)[1]
        raise DeviceError(
            f"{model.name_or_path}: needs {needed / 1e9:.1f} GB and the memory of its activations, {device} has "
            f"{total / 1e9:.1f} GB; what would fit is a recipe with less than {total / needed:.0%} of these bytes "
            "(`trilobite plan` prints a recipe's), or device='cpu'"
        ) from e


def load_tokenizer(path_or_id: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside a checkpoint. Raises CheckpointError when there is none."""
    return read_tokenizer(open_source(path_or_id).path)
