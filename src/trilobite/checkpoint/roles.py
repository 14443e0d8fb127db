"""What every tensor of a checkpoint is: its role, its layer, and how one [N, K] matrix is cut from it.

`role_names.RULES` is the whole knowledge about names: the first row that matches decides, for all architectures alike.
Fused experts (one [E, N, K] tensor for a layer) become one `Matrix` an expert and projection, with the names
that the model has when its experts are stored one by one. A tensor that matches no row is an error, never
skipped.

    Mixtral       block_sparse_moe.experts.3.w1.weight    [I, H]            one matrix: gate
    DeepSeek-V3   mlp.experts.3.gate_proj.weight          [I, H] fp8        one matrix, with its scales
    Qwen3.5-MoE   mlp.experts.gate_up_proj                [E, 2I, H]        gate rows, then up rows
    Granite-MoE   block_sparse_moe.input_linear.weight    [E, 2I, H]        the same under another name
    Llama 4       feed_forward.experts.gate_up_proj       [E, H, 2I]        transposed
    gpt-oss       mlp.experts.gate_up_proj                [E, H, 2I]        transposed; gate and up alternate
    gpt-oss       mlp.experts.gate_up_proj_blocks         [E, 2I, H/32, 16] MXFP4; gate and up rows alternate
    Inkling       mlp.experts.w13_weight                  [E, 2I, H]        gate and up rows alternate
    DBRX          ffn.experts.mlp.w1                      [E I, H]          the rows of all experts; w2 transposed
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from trilobite.checkpoint.kinds import EXPERT_INDEX, by_kind, experts_of_a_kind
from trilobite.checkpoint.layers import layer_key, layer_number, stack_of
from trilobite.checkpoint.role_names import RULES
from trilobite.checkpoint.source import Source
from trilobite.checkpoint.unpack import (
    FP8,
    MX_GROUP,
    UNPACKABLE,
    dequantize_blocks,
    dequantize_mxfp4,
    quantization_of,
    scale_of,
)
from trilobite.errors import ArchitectureError
from trilobite.recipe import Role

_RULES = tuple((re.compile(pattern), role, projection) for pattern, role, projection in RULES)

# How many dimensions a rule's tensors may have (others: up to 2). A 2-D "norm" is a matrix, not a norm.
_DIMS = {Role.EXPERT: (2, 3, 4), Role.NORM: (0, 1), Role.OTHER: tuple(range(9))}

# Only for shapes that do not tell: in most models the rows are outputs, [gate; up].
TRANSPOSED = ("gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text")
INTERLEAVED = ("gpt_oss",)
ALTERNATING = ".w13_weight"
"""How names end of tensors whose gate and up rows alternate in any model."""
LONG = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
SHORT = {"gate": "w1", "up": "w3", "down": "w2"}
"""What the matrices of an expert are called; the latter where a stacked tensor is called w13 or w2."""
FLAT = re.compile(r"\.experts\.mlp\.(?:w1|v1|w2)$")
"""Names of tensors that hold the rows of all experts one after the other."""
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""What configurations call the number of experts of a layer."""

_ROLE_ORDER = (
    Role.EMBEDDING,
    Role.ATTENTION,
    Role.ROUTER,
    Role.DENSE_MLP,
    Role.SHARED_EXPERT,
    Role.EXPERT,
    Role.NORM,
    Role.OTHER,
    Role.HEAD,
)
_PROJECTION_ORDER = ("q", "q_a", "q_b", "k", "kv_a", "v", "kv_b", "o", "gate", "gate_up", "up", "down", None)


@dataclass(frozen=True, kw_only=True)
class View:
    """How a matrix is cut from its tensor on disk. The default takes the tensor as it is.

    expert: index in dimension 0    half: 0 the gate, 1 the up part of a fused pair
    transposed: stored as [K, N]    interleaved: gate and up alternate instead of following each other
    scale: tensor of the scales    block: rows and columns that share one (fp8); None with a scale = MXFP4
    rows: that many in dimension 0 are of one expert; None: one
    """

    expert: int | None = None
    rows: int | None = None
    half: int | None = None
    transposed: bool = False
    interleaved: bool = False
    scale: str | None = None
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class Matrix:
    """One matrix [N, K], or one tensor that is kept as it is.

    name: Hugging Face name of this one matrix    source: the tensor on disk that holds it
    """

    name: str
    role: Role
    layer: int | None
    expert: int | None
    projection: str | None
    shape: tuple[int, ...]
    source: str
    view: View

    @property
    def layer_key(self) -> str | None:
        """Its layer as files and reports call it, which tells an encoder's from a decoder's."""
        return layer_key(self.name)

    @property
    def quantizable(self) -> bool:
        """Whether this is a weight matrix. The plan decides whether it is quantized."""
        known = self.role not in (Role.NORM, Role.OTHER)
        return known and len(self.shape) == 2 and not self.name.endswith("bias")


class _Match(NamedTuple):
    role: Role
    projection: str | None


def identify(
    source: Source, *, extra_rules: Sequence[tuple[str, Role]] = (), keep_unmatched: bool = False
) -> list[Matrix]:
    """Every tensor of the checkpoint exactly once, cut into matrices, in the order in which they are packed.

    extra_rules: (glob, role) from a recipe, asked before `RULES`
    keep_unmatched: keep the tensors that match no role, as OTHER, instead of raising ArchitectureError

    Raises CheckpointError when the checkpoint is already quantized.
    """
    quantization = quantization_of(source, *UNPACKABLE)
    block = quantization.get("weight_block_size") or (128, 128)
    scales = {name: scale for name in source.tensors if (scale := scale_of(source, name))}
    consumed = set(scales.values())
    of_a_kind = experts_of_a_kind(_model_type(source), source.tensors)
    matrices: list[Matrix] = []
    unmatched: list[str] = []
    for name, info in source.tensors.items():
        if name in consumed:
            continue
        match = _match(name, info.shape, extra_rules)
        if match is None:
            unmatched.append(name)
            match = _Match(Role.OTHER, None)
        scale = scales.get(name)
        blocks = (int(block[0]), int(block[1])) if scale and info.dtype in FP8 else None
        view = View(scale=scale, block=blocks)
        if match.role is Role.EXPERT and (len(info.shape) > 2 or FLAT.search(name)):
            matrices += _cut_experts(source, name, match.projection, view)
        else:
            index = EXPERT_INDEX.search(name) if match.role is Role.EXPERT else None
            expert = int(index[1]) if index else None
            called = by_kind(name, of_a_kind) if of_a_kind and index else name
            matrices.append(
                Matrix(
                    called, match.role, layer_number(name), expert, match.projection, info.shape, name, view
                )
            )
    if unmatched and not keep_unmatched:
        unmatched.sort(key=_natural)
        raise ArchitectureError(
            f"{_model_type(source)!r}: {len(unmatched)} tensors match no role (first: {unmatched[0]}); "
            "nothing was written; add a mapping in a recipe (docs/roles.md) or pass --keep-unmatched"
        )
    return sorted(matrices, key=_order)


def read_matrix(source: Source, matrix: Matrix) -> Tensor:
    """The matrix [N, K], contiguous, in its source dtype; fp8 and MXFP4 become bf16, what is rescaled fp32.

    Kept tensors come as they are. Of a fused tensor only one expert's bytes are read.
    """
    w = _original(source, matrix)
    return w if source.rescaling is None else source.rescaling.apply(matrix.name, w)


def _original(source: Source, matrix: Matrix) -> Tensor:
    view = matrix.view
    w = _read(source, matrix.source, view.expert, view.rows)
    if view.scale:
        scale = _read(source, view.scale, view.expert)
        if view.block:
            w = dequantize_blocks(w, scale, view.block, matrix.source)
        else:
            # Halving first spares the work on the other half.
            return dequantize_mxfp4(_half(w, view), _half(scale, view))
    return _half(w.mT if view.transposed else w, view).contiguous()


def cut(w: Tensor, view: View) -> Tensor:
    """A matrix [N, K] as a view of the whole tensor that holds it."""
    part = w
    if view.expert is not None:
        rows = view.rows
        part = w[view.expert] if rows is None else w[view.expert * rows : (view.expert + 1) * rows]
    return _half(part.mT if view.transposed else part, view)


def _read(source: Source, name: str, expert: int | None, rows: int | None = None) -> Tensor:
    if expert is None:
        return source.read(name)
    if rows is not None:
        return source.read_part(name, expert * rows, (expert + 1) * rows)
    return source.read_part(name, expert, expert + 1)[0]


def _half(w: Tensor, view: View) -> Tensor:
    """The gate or the up rows of a fused pair."""
    if view.half is None:
        return w
    return w[view.half :: 2] if view.interleaved else w.chunk(2)[view.half]


def _match(name: str, shape: tuple[int, ...], extra_rules: Sequence[tuple[str, Role]]) -> _Match | None:
    """Role and projection of a tensor, or None."""
    by_table = _match_table(re.sub(r"(?<=[._])\d+(?=\.)", "0", name), len(shape))
    for glob, role in extra_rules:
        if fnmatchcase(name, glob):
            # The table still knows which projection it is.
            return _Match(role, by_table.projection if by_table else None)
    return by_table


@cache
def _match_table(name: str, dims: int) -> _Match | None:
    """The same, for a name whose layer and expert are zero: DeepSeek-V3 has 90,000 names of 60 kinds."""
    for pattern, role, projection in _RULES:
        if dims in _DIMS.get(role, (0, 1, 2)) and pattern.search(name):
            return _Match(role, projection)
    # Vectors cost nothing to keep, unless they belong to an expert, of which nothing may go unnoticed.
    return _Match(Role.OTHER, None) if dims < 2 and "expert" not in name else None


def _cut_experts(source: Source, name: str, projection: str | None, view: View) -> list[Matrix]:
    """The matrices of a fused [E, ...] tensor.

    One that only a recipe's rule calls `expert` has no known projection: it is cut along E, as stored.
    """
    shape = source.tensors[name].shape
    if view.scale and not view.block:
        if len(shape) != 4 or shape[3] * 2 != MX_GROUP:
            raise ArchitectureError(f"{name}: MXFP4 blocks of shape {list(shape)}; expected [E, N, K/32, 16]")
        shape = (*shape[:2], shape[2] * MX_GROUP)
        transposed = False
    elif FLAT.search(name):
        shape = _unflattened(source, name)
        transposed = projection == "down"
    elif len(shape) != 3:
        raise ArchitectureError(f"{name}: fused experts of shape {list(shape)}; expected [E, N, K]")
    else:
        transposed = projection is not None and _is_transposed(source, name, projection)
    experts, n, k = (shape[0], shape[2], shape[1]) if transposed else shape
    if projection == "gate_up" and n % 2:
        raise ArchitectureError(f"{name}: {n} rows of gate and up; expected an even number")
    path = _experts_path(name)
    names = SHORT if re.search(r"\.w(?:13|2)_weight$", name) else LONG
    halves = ((0, "gate"), (1, "up")) if projection == "gate_up" else ((None, projection),)
    return [
        Matrix(
            name=f"{path}.{e}.{names[part]}.weight" if part else f"{name.removesuffix('.weight')}.{e}.weight",
            role=Role.EXPERT,
            layer=layer_number(name),
            expert=e,
            projection=part,
            shape=(n if half is None else n // 2, k),
            source=name,
            view=View(
                expert=e,
                half=half,
                transposed=transposed,
                interleaved=half is not None
                and (_model_type(source) in INTERLEAVED or name.endswith(ALTERNATING)),
                rows=shape[1] if FLAT.search(name) else None,
                scale=view.scale,
                block=view.block,
            ),
        )
        for e in range(experts)
        for half, part in halves
    ]


def _experts_path(name: str) -> str:
    """`a.experts.gate_up_proj`, `a.input_linear.weight` and `a.experts.mlp.w1` -> `a.experts`.

    Step 3.7's `moe.gate_proj.weight` -> `mlp.experts`, where its model has them.
    """
    parent = name.removesuffix(".weight").rpartition(".")[0]
    parent = parent.removesuffix(".mlp") if FLAT.search(name) else parent
    if parent.endswith(".moe"):
        return f"{parent.removesuffix('.moe')}.mlp.experts"
    return parent if parent.endswith(".experts") else f"{parent}.experts"


def _unflattened(source: Source, name: str) -> tuple[int, int, int]:
    """[E, rows of one, columns] of a tensor that holds the rows of all experts."""
    config = text_config(source)
    inside = config.get("ffn_config")
    counts = [c.get(key) for c in (config, inside) if isinstance(c, dict) for key in COUNTS]
    experts = next((n for n in counts if type(n) is int and n > 0), 0)
    n, k = source.tensors[name].shape
    if not experts or n % experts:
        raise ArchitectureError(f"{name}: {n} rows of {experts} experts; expected as many of each")
    return experts, n // experts, k


def _is_transposed(source: Source, name: str, projection: str) -> bool:
    """Whether a fused tensor is stored as [E, K, N].

    gate_up [E, 2I, H] and down [E, H, I] fit together in one orientation only, whatever the sizes. Where
    there is no such pair the hidden size tells, and where that is ambiguous, the architecture.
    """
    if pair := _pair(source, name):
        (n, k), down = pair
        if (n, k) == (2 * down[1], down[0]):
            return False
        if (k, n) == (2 * down[0], down[1]):
            return True
        raise ArchitectureError(
            f"{name}: an expert's gate_up is {[n, k]}, its down {list(down)}; expected [2I, H] and [H, I], "
            "or both transposed"
        )
    a, b = source.tensors[name].shape[1:]
    hidden = text_config(source).get("hidden_size")
    if a != b and hidden in (a, b):
        return bool((a == hidden) != (projection == "down"))
    return _model_type(source) in TRANSPOSED


PAIRS = (
    ("gate_up_proj", "down_proj"),
    ("input_linear", "output_linear"),
    ("fc1", "fc2"),
    ("w13_weight", "w2_weight"),
)
"""What the stacked tensors of gate and up, and of down, are called."""


def _pair(source: Source, name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The per-expert shapes of the gate_up and down tensors of this layer, when it has both."""
    for up, down in PAIRS:
        names = [re.sub(rf"\b(?:{up}|{down})(\.weight)?$", rf"{part}\1", name) for part in (up, down)]
        if len(set(names)) == 2 and all(n in source.tensors for n in names):
            return source.tensors[names[0]].shape[1:], source.tensors[names[1]].shape[1:]
    return None


def text_config(source: Source) -> dict[str, Any]:
    """The language model's part of the configuration: multimodal models nest it."""
    text = source.config.get("text_config")
    return {**source.config, **text} if isinstance(text, dict) else source.config


def _model_type(source: Source) -> str:
    return str(source.config.get("model_type", "unknown"))


def _order(m: Matrix) -> tuple[object, ...]:
    """Embedding, then layer by layer (encoder before decoder), then what belongs to no layer, the head last.

    Inside a layer by role, then expert by expert, so that the parts of one expert are neighbours on disk.
    """
    inside = m.layer is not None
    place = 1 if inside else {Role.EMBEDDING: 0, Role.HEAD: 3}.get(m.role, 2)
    stack = stack_of(m.name)
    return (
        place,
        "encoder" not in stack,
        stack,
        -1 if m.layer is None else m.layer,
        _ROLE_ORDER.index(m.role),
        _natural(m.name.rsplit(".", 2)[0]),  # module by module, so expert by expert
        _PROJECTION_ORDER.index(m.projection),
        m.name,
    )


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts `layers.2` before `layers.10`."""
    return tuple((int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", name))
