"""The original model, one block of it in memory at a time, run by transformers' own code.

The model is built on the meta device, without data. A block's weights come from the checkpoint through transformers'
own conversion (which renames and stacks experts) and go back to nothing when the block is done. What enters a block
besides hidden states (position embeddings, masks) is recorded on a pass through the model in which every block hands
its input on.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from trilobite.checkpoint.roles import Matrix
from trilobite.checkpoint.source import DTYPES, Source
from trilobite.checkpoint.unpack import dequantize_blocks, dequantize_mxfp4
from trilobite.errors import ArchitectureError, CalibrationError, CheckpointError
from trilobite.models.deepseek import register
from trilobite.models.names import memory_names

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a block is called with besides its hidden states."""


class _Stop(Exception):
    """Ends a forward pass whose rest is of no interest."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a matrix of the plan is in memory. expert: index in a module of stacked experts, or None."""

    module: str
    expert: int | None = None
    projection: str | None = None


class BlockModel:
    """A causal language model whose blocks are loaded and run one by one. Forward passes may run in several threads.

    blocks: names of the blocks in memory    dtype: of weights and activations
    """

    def __init__(self, source: Source, matrices: Sequence[Matrix], device: torch.device) -> None:
        """Build the model on meta. Raises ArchitectureError when it is not a stack of decoder blocks."""
        register()
        self.source, self.device = source, device
        self.model = _skeleton(source, device)
        self.dtype: torch.dtype = self.model.dtype
        stack = _stack(self.model, str(source.path))
        self.blocks = tuple(f"{stack}.{i}" for i in range(len(self.model.get_submodule(stack))))
        self._index = {block: i for i, block in enumerate(self.blocks)}
        self._places: dict[str, Place | None] = {}
        self._translate = memory_names(self.model)
        self._files: dict[str, list[Matrix]] = {}
        for matrix in {m.source: m for m in matrices}.values():
            self._files.setdefault(self._block_of(matrix.source), []).append(matrix)
        self._modules = dict(self.model.named_modules())
        self._arguments: dict[int, dict[str, Arguments]] = {}
        self._tuples = False

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
        path = path.rsplit(f".{matrix.expert}.", 1)[0]
        if not isinstance(getattr(self._modules.get(path), "down_proj", None), nn.Parameter):
            return None
        return Place(module=path, expert=matrix.expert, projection=matrix.projection)

    def block_of(self, place: Place) -> int | None:
        """Index of the block that a module is in; None for what is outside of all blocks."""
        return self._block_index(place.module)

    def module(self, path: str) -> nn.Module:
        """A module by its name in memory."""
        found: nn.Module = self._modules[path]
        return found

    def load(self, block: str) -> None:
        """Bring a block's weights in; "" is everything outside of the blocks. Raises CheckpointError."""
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
        with _quiet():
            found, _ = convert_and_load_state_dict_in_model(self.model, tensors, config)
        prefix = f"{block}." if block else ""
        wanted = {
            n for n in found.missing_keys if n.startswith(prefix) and (block or self._block_index(n) is None)
        }
        wanted -= set(self.model.all_tied_weights_keys)
        bad = sorted(wanted | {m[0] for m in found.mismatched_keys})
        if bad or found.conversion_errors:
            raise CheckpointError(
                f"{self.source.path}: {bad[0] if bad else next(iter(found.conversion_errors))} is missing or has "
                "another shape than its model; copy the checkpoint again"
            )

    def drop(self, block: str) -> None:
        """Give a block's memory back."""
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
        module = self.module(place.module)
        if place.expert is None:
            module.get_parameter("weight").copy_(w)
        else:
            expert_matrix(module, place).copy_(w)

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """What enters the first block. Everything outside of the blocks must be loaded.

        ids: [B, T] int64    returns: [B, T, H]
        """
        found: list[Tensor] = []

        def first(*args: Any, **kwargs: Any) -> None:
            found.append(_split(args, kwargs)[0])
            raise _Stop

        with self._replaced({self.blocks[0]: first}):
            self._forward(ids)
        return found[0]

    @torch.no_grad()
    def record(self, ids: Tensor) -> None:
        """Learn what each block is called with for a batch of this shape. Block 0 must be loaded, and the outside.

        ids: [S, T] int64, at least one window    Raises ArchitectureError where it depends on the tokens.
        """
        size = len(ids)
        if size not in self._arguments:
            self._arguments[size] = self._recorded(ids)

    def _recorded(self, ids: Tensor) -> dict[str, Arguments]:
        found: dict[str, Arguments] = {}

        def first(*args: Any, **kwargs: Any) -> None:
            hidden, rest, named = _split(args, kwargs)
            found[self.blocks[0]] = rest, named
            out = type(block).forward(block, hidden, *rest, **named)
            self._tuples = isinstance(out, tuple)
            raise _Stop

        def passer(name: str) -> Callable[..., Any]:
            def hand_on(*args: Any, **kwargs: Any) -> Any:
                hidden, rest, named = _split(args, kwargs)
                found[name] = rest, named
                return (hidden,) if self._tuples else hidden

            return hand_on

        block = self._modules[self.blocks[0]]
        with self._replaced({self.blocks[0]: first}):
            self._forward(ids)
        with self._replaced({name: passer(name) for name in self.blocks}):
            self._forward(ids)
        if missing := [name for name in self.blocks if name not in found]:
            raise ArchitectureError(f"{missing[0]}: is never run by its model, which cannot be calibrated")
        return found

    def check_arguments(self, ids: Tensor) -> None:
        """Raise ArchitectureError when two windows call a block with different things besides hidden states.

        ids: [S, T] int64
        """
        one, other = self._recorded(ids[:1]), self._recorded(ids[-1:])
        for name in self.blocks:
            if not _same(one[name], other[name]):
                raise ArchitectureError(
                    f"{name}: is called with more than hidden states that depends on the text; such a model cannot be "
                    "run block by block: choose a recipe without calibration"
                )

    @torch.no_grad()
    def run(self, block: str, hidden: Tensor) -> Tensor:
        """One block on a batch. Raises CalibrationError when the outcome is not finite.

        hidden: [B, T, H]    returns: [B, T, H]
        """
        args, kwargs = self._arguments[len(hidden)][block]
        out = self._modules[block](hidden, *args, **kwargs)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        if not bool(torch.isfinite(result.sum(dtype=torch.float32))) and not bool(
            torch.isfinite(result).all()
        ):
            raise CalibrationError(
                f"{block}: its output holds NaN or infinity on the calibration text; the checkpoint is damaged, or "
                f"overflows in {self.dtype}"
            )
        return result

    def parameter(self, matrix: Matrix) -> str | None:
        """Name in memory of the parameter that a kept tensor is; None where it is none of its own."""
        name = self._translate(matrix.name)
        found = self._modules.get(name.rpartition(".")[0])
        own = None if found is None else found._parameters.get(name.rpartition(".")[2])
        return name if own is not None and tuple(own.shape) == matrix.shape else None

    def parameters(self, block: str) -> dict[str, Tensor]:
        """The parameters of a loaded block by name, "" is everything outside of the blocks but the embedding."""
        index = self._index.get(block)
        found = {
            f"{path}.{name}".lstrip("."): parameter.detach()
            for path, module in self._modules.items()
            if self._block_index(path) == index
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        for name, source in self.model.all_tied_weights_keys.items():
            if name in found and source in found:
                found[name] = found[source]
        embedding = self.model.get_input_embeddings()
        return {n: p for n, p in found.items() if self._modules[n.rpartition(".")[0]] is not embedding}

    def apply(self, block: str, hidden: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """One block in fp32 with other parameters than its own, differentiable. Not for several threads.

        hidden: [B, T, H] any float dtype    parameters: fp32, all of the block's by name    returns: [B, T, H] fp32
        """
        args, kwargs = _in_fp32(self._arguments[len(hidden)][block])
        own = {name.removeprefix(f"{block}."): p for name, p in parameters.items()}
        out = functional_call(self._modules[block], own, (hidden.float(), *args), kwargs, tie_weights=False)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def logits(self, ids: Tensor, hidden: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """What the model makes of what left the last block, in fp32, differentiable. Not for several threads.

        ids: [B, T] int64    hidden: [B, T, H]    parameters: those of `parameters("")`    returns: [B, T, vocabulary]
        """
        given: dict[str, Callable[..., Any]] = {
            name: lambda *a, **k: (hidden,) if self._tuples else hidden for name in self.blocks
        }
        with self._replaced(given):
            out = functional_call(
                self.model,
                dict(parameters),
                kwargs={"input_ids": ids.to(self.device), "use_cache": False},
                tie_weights=False,
            )
        result: Tensor = out.logits
        return result

    @torch.no_grad()
    def head_input(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """What enters the output head, given what left the last block.

        ids: [B, T] int64    hidden: [B, T, H]    returns: [B, T, H]
        """
        given: dict[str, Callable[..., Any]] = {
            name: lambda *a, **k: (hidden,) if self._tuples else hidden for name in self.blocks
        }
        found: list[Tensor] = []
        with self._replaced(given):
            self._forward(ids, found)
        return found[0]

    def _forward(self, ids: Tensor, head_inputs: list[Tensor] | None = None) -> None:
        """The whole model up to its head."""

        def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            if head_inputs is not None:
                head_inputs.append(args[0])
            raise _Stop

        head = self.model.get_output_embeddings()
        handle = head.register_forward_pre_hook(stop)
        try:
            self.model(input_ids=ids.to(self.device), use_cache=False)
        except _Stop:
            pass
        finally:
            handle.remove()

    @contextmanager
    def _replaced(self, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """Blocks do something else for a while."""
        for name, function in functions.items():
            self._modules[name].forward = function  # type: ignore[method-assign]
        try:
            yield
        finally:
            for name in functions:
                del self._modules[name].forward


def expert_matrix(experts: nn.Module, place: Place) -> Tensor:
    """One expert's matrix [N, K], a view of a stacked parameter."""
    assert place.expert is not None
    gated = isinstance(getattr(experts, "gate_up_proj", None), Tensor)
    name = "down_proj" if place.projection == "down" else "gate_up_proj" if gated else "up_proj"
    stacked = getattr(experts, name)[place.expert]
    w: Tensor = stacked.mT if getattr(experts, "is_transposed", False) else stacked
    if name != "gate_up_proj":
        return w
    half = int(place.projection == "up")
    return w.chunk(2)[half] if getattr(experts, "is_concatenated", True) else w[half::2]


def stacked_experts(experts: Any, matrices: Mapping[tuple[int, str], Tensor]) -> dict[str, Tensor]:
    """The stacked parameters of an experts module, made of its matrices: the inverse of `expert_matrix`.

    matrices: by expert and projection (gate, up, down), [N, K]
    """
    count = len(experts.down_proj)

    def stack(*projections: str) -> Tensor:
        rows = [[matrices[e, p] for p in projections] for e in range(count)]
        if len(projections) == 1:
            found = torch.stack([row[0] for row in rows])
        elif getattr(experts, "is_concatenated", True):
            found = torch.stack([torch.cat(row) for row in rows])
        else:
            found = torch.stack([torch.stack(row, 1).flatten(0, 1) for row in rows])
        return found.mT if getattr(experts, "is_transposed", False) else found

    gated = isinstance(getattr(experts, "gate_up_proj", None), Tensor)
    first = {"gate_up_proj": stack("gate", "up")} if gated else {"up_proj": stack("up")}
    return first | {"down_proj": stack("down")}


def check_experts(experts: nn.Module, path: str) -> None:
    """Raise ArchitectureError for stacked experts that transformers does not describe to us."""
    known = all(hasattr(experts, a) for a in ("_apply_gate", "is_transposed", "is_concatenated", "has_gate"))
    if not known or getattr(experts, "has_post_expert_norm", False):
        raise ArchitectureError(
            f"{path}: {type(experts).__name__} computes in a way of its own that calibration does not know; use a "
            "method without calibration for the experts (search)"
        )


def intermediate(experts: Any, expert: int, x: Tensor) -> Tensor:
    """What enters an expert's down projection: act(gate x) * (up x), with the module's own activation and biases.

    x: [T, H]    returns: [T, I]
    """
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    w = getattr(experts, name)[expert]
    out = x @ (w if experts.is_transposed else w.mT)
    if experts.has_bias:
        out = out + getattr(experts, f"{name}_bias")[expert]
    result: Tensor = experts._apply_gate(out) if experts.has_gate else experts.act_fn(out)
    return result


class Watch:
    """Hooks on the modules of a block that note what enters them. Threads have their own notes.

    inputs: names of linears by tensor (so that q, k and v are one)    routed: (states, index) by experts module
    """

    def __init__(self, model: BlockModel, linears: Sequence[str], experts: Sequence[str]) -> None:
        """Begin to watch."""
        self._notes = threading.local()
        self._handles = [
            model.module(path).register_forward_pre_hook(self._linear(path)) for path in linears
        ] + [
            model.module(path).register_forward_pre_hook(self._experts(path), with_kwargs=True)
            for path in experts
        ]

    def __enter__(self) -> "Watch":
        """Nothing to acquire."""
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """Forget this thread's notes; tensors are kept alive from here on, so that their addresses tell them apart."""
        self._notes.inputs, self._notes.routed = {}, {}

    def inputs(self) -> dict[str, Tensor]:
        """By linear: what entered it, [T, K]."""
        noted: dict[str, list[Tensor]] = self._notes.inputs
        return {name: x[0] if len(x) == 1 else torch.cat(x) for name, x in noted.items()}

    def routed(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By experts module: hidden states [T, H] and the indices of their experts [T, A]."""
        found: dict[str, tuple[Tensor, Tensor]] = self._notes.routed
        return found

    def _linear(self, path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._notes.inputs.setdefault(path, []).append(args[0].flatten(0, -2))

        return note

    def _experts(self, path: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values = [*args, *kwargs.values()]
            states = values[0].flatten(0, -2)
            index = next(v for v in values[1:] if isinstance(v, Tensor) and not v.is_floating_point())
            self._notes.routed[path] = states, index.reshape(len(states), -1)

        return note


def same_inputs(inputs: Mapping[str, Tensor]) -> dict[str, str]:
    """By linear: the first linear that the same tensor enters. inputs: of one forward pass, still alive."""
    leaders: dict[tuple[Any, ...], str] = {}
    return {
        name: leaders.setdefault((x.data_ptr(), tuple(x.shape), x.stride(), x._version), name)
        for name, x in inputs.items()
    }


def _skeleton(source: Source, device: torch.device) -> PreTrainedModel:
    """The model on meta, with real values in the buffers that no checkpoint holds (rotary frequencies)."""
    try:
        config = AutoConfig.from_pretrained(source.path)
    except (ValueError, KeyError) as e:
        raise ArchitectureError(
            f"{source.path}: model_type {source.config.get('model_type')!r} is unknown to transformers, which "
            "calibration runs the model with; choose a recipe without calibration"
        ) from e
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ArchitectureError(
            f"{source.path}: {type(config).__name__} has no causal language model in transformers, and calibration "
            "runs decoder-only models; choose a recipe without calibration"
        )
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else _body_dtype(source)
    with _quiet(), torch.device("meta"):
        model: PreTrainedModel = kind._from_config(config, dtype=dtype)
    owners = [(m, name) for m in model.modules() for name in m._non_persistent_buffers_set]
    for module, name in owners:
        if (buffer := module._buffers[name]) is not None:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
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


def _stack(model: PreTrainedModel, where: str) -> str:
    """Name of the list of decoder blocks."""
    config = model.config.get_text_config()
    if config.is_encoder_decoder:
        raise ArchitectureError(
            f"{where}: an encoder-decoder model; calibration runs decoder-only models: choose a recipe without it"
        )
    count = getattr(config, "num_hidden_layers", None)
    lists = [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and len(m) == count and count
    ]
    found: str | None = min(lists, key=lambda name: name.count("."), default=None)
    if found is None:
        raise ArchitectureError(
            f"{where}: {type(model).__name__} has no list of {count} decoder blocks to run one by one; choose a "
            "recipe without calibration"
        )
    return found


def _original(source: Source, matrix: Matrix) -> tuple[str, Tensor]:
    """One tensor of the checkpoint in 16 bit, under the name that it has in 16-bit checkpoints."""
    view = matrix.view
    w = source.read(matrix.source)
    if not view.scale:
        return matrix.source, w
    scale = source.read(view.scale)
    if view.block:
        return matrix.source, dequantize_blocks(w, scale, view.block, matrix.source)
    # gpt-oss keeps its experts as [E, K, N] in 16 bit, and as blocks of rows in MXFP4.
    return matrix.source.removesuffix("_blocks"), dequantize_mxfp4(w, scale).mT.contiguous()


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Hidden states, other positional arguments, keyword arguments."""
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("hidden_states"), (), rest


def _in_fp32(value: Any) -> Any:
    """The same, with all floating-point tensors in fp32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_in_fp32(v) for v in value)
    if isinstance(value, dict):
        return {k: _in_fp32(v) for k, v in value.items()}
    return value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(v, other[k]) for k, v in one.items())
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and notes of transformers."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
