"""Which matrices read the same vector, and what writes it.

Between a norm and what reads its output, between `up` and `down` of one MLP, between `v` and `o` of one attention the
model passes a vector x on whose channels nothing works but products. For any s > 0 the writer may then give s x and the
readers have their columns divided by s: the model computes the same. So column scales need no place on disk and no work
at run time, whatever the format, the kernel and the device.

What reads what is known by names, for the architectures in `KNOWN` (a test compares the logits of each, bit by bit). A
layer with a tensor that no pattern names is left alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trilobite.checkpoint.layers import stack_of
from trilobite.checkpoint.roles import Matrix, text_config
from trilobite.checkpoint.source import Source
from trilobite.recipe import BODY_ROLES

KNOWN = (
    "axk1",
    "deepseek",
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "kolibri1",
    "mellum",
    "mimo_v2_flash",
    "minimax_m2",
    "mistral4",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "solar_open",
)
"""Model types, all with norms whose gain is what the checkpoint holds (not one less)."""

ATTENTION, MLP = r"self_attn\.", r"(?:mlp|block_sparse_moe)\."
INPUT, OUTPUT = "input_layernorm", "post_attention_layernorm"
READS: tuple[tuple[str, str], ...] = (
    (ATTENTION + r"(?:q|k|v|q_a)_proj", INPUT),
    (ATTENTION + r"kv_a_proj_with_mqa", INPUT),
    (ATTENTION + r"q_b_proj", "self_attn.q_a_layernorm"),
    (ATTENTION + r"kv_b_proj", "self_attn.kv_a_layernorm"),
    (ATTENTION + r"o_proj", "self_attn.v_proj|self_attn.kv_b_proj"),
    (MLP + r"(?:gate|shared_expert_gate)", OUTPUT),
    (MLP + r"(?:experts\.\d+\.|shared_experts?\.)?(?:gate_proj|up_proj|w1|w3)", OUTPUT),
    (r"(.*\.)down_proj", r"\1up_proj"),
    (r"(.*\.)w2", r"\1w3"),
)
"""Modules of a layer, and which module writes what they read: a norm, or a linear."""
_READS = tuple((re.compile(pattern), writer) for pattern, writer in READS)
_ASIDE = re.compile(r"(?:.*\.)?\w*norm\.weight|.*bias")
"""Tensors of a layer that are no matrices."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Port:
    """A tensor and the channel of a stream that each of its columns (a reader) or rows (a writer) is; -1 = none.

    channels: [K] or [N] int64, or None where they are the channels in their order
    """

    matrix: Matrix
    channels: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """A vector of `size` channels: the matrices that read it, and the tensors that write it.

    writers: matrices, their biases, or the gain of a norm
    """

    name: str
    size: int
    readers: tuple[Port, ...]
    writers: tuple[Port, ...]


def find_streams(source: Source, matrices: Sequence[Matrix]) -> list[Stream]:
    """All streams of a checkpoint, in the order of its matrices; none for an architecture that is not known."""
    config = text_config(source)
    if config.get("model_type") not in KNOWN:
        return []
    layers: dict[str, dict[str, Matrix]] = {}
    for m in matrices:
        if m.layer is not None:
            prefix = re.match(rf"{re.escape(stack_of(m.name))}\.?\w+\.{m.layer}\.", m.name)
            if prefix:
                layers.setdefault(prefix[0], {})[m.name.removeprefix(prefix[0])] = m
    return [s for prefix, tensors in layers.items() for s in _of_layer(prefix, tensors, config)]


def _of_layer(prefix: str, tensors: Mapping[str, Matrix], config: Mapping[str, object]) -> list[Stream]:
    """The streams of one layer. tensors: by name inside of the layer."""
    readers: dict[str, list[Matrix]] = {}
    for name, m in tensors.items():
        if _ASIDE.fullmatch(name):
            continue
        module = name.removesuffix(".weight")
        known = (match.expand(writer) for pattern, writer in _READS if (match := pattern.fullmatch(module)))
        writers = next(known, None)
        if writers is None or len(m.shape) != 2:
            return []
        found = [w for w in writers.split("|") if f"{w}.weight" in tensors]
        if not found:
            return []
        readers.setdefault(found[0], []).append(m)
    streams = []
    for writer, of_writer in readers.items():
        written = [tensors[n] for n in (f"{writer}.weight", f"{writer}.bias") if n in tensors]
        channels = _channels(writer, written[0].shape[0], of_writer[0].shape[1], config)
        if channels is None or not any(m.role in BODY_ROLES for m in of_writer):
            continue
        rows, columns, size = channels
        streams.append(
            Stream(
                name=prefix + writer,
                size=size,
                readers=tuple(Port(matrix=m, channels=columns) for m in of_writer),
                writers=tuple(Port(matrix=m, channels=rows) for m in written),
            )
        )
    return streams


def _channels(
    writer: str, n: int, k: int, config: Mapping[str, object]
) -> tuple[Tensor | None, Tensor | None, int] | None:
    """Channels of a writer's n rows and of its readers' k columns, and their number; None where nothing fits."""
    if not writer.startswith(("self_attn.v_proj", "self_attn.kv_b_proj")):
        return (None, None, n) if n == k else None
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or k % heads or config.get("clip_qkv"):
        return None
    size = k // heads  # of what a head gives to o
    if writer == "self_attn.kv_b_proj":  # per head: the keys' part, then the values
        if n % heads or n // heads < size:
            return None
        rows = torch.full((heads, n // heads), -1)
        rows[:, -size:] = torch.arange(k).view(heads, size)
        return rows.flatten(), None, k
    if n % size or k % n:
        return None
    # Query heads that share a value head read the same channels.
    columns = torch.arange(n).view(n // size, 1, size).expand(-1, k // n, -1)
    return None, columns.flatten(), n
