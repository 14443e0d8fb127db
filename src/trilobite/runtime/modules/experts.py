"""PackedExperts: one module in the place of every `*Experts` module of transformers."""

import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from trilobite.errors import ArchitectureError, CheckpointError, ShapeError
from trilobite.formats.weight import PackedWeight
from trilobite.kernels import ops
from trilobite.kernels.expert_table import DOWN, GATE, UP, build, expert_weight
from trilobite.kernels.reference import GPT_OSS, GPT_OSS_ALPHA, GPT_OSS_LIMIT
from trilobite.runtime.modules.linear import PackedMatrix, check_restorable, leaves_gpu, moved

if TYPE_CHECKING:
    from trilobite.kernels.ops import Pack

PROJECTIONS = {"gate_proj": GATE, "w1": GATE, "up_proj": UP, "w3": UP, "down_proj": DOWN, "w2": DOWN}
"""Names of an expert's matrices in checkpoints."""
BIASES = ("gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
_biases = itemgetter(*BIASES)
EXPERT_NAME = re.compile(rf"^(.*\.experts)\.(\d+)\.({'|'.join(PROJECTIONS)})$")


class PackedExperts(nn.Module):
    """All routed experts of one layer, one operator call for all of them.

    Children `0.gate_proj`, `0.up_proj`, ... have the names of the checkpoint, so that it loads and saves tensor by
    tensor, without stacking: experts may differ in format and rank. After loading, `gather` finds (or makes) the one
    slab of bytes in which all of them lie. On a GPU it repacks them once instead, and lets the children's buffers go:
    the same bytes in the order of the GPU kernels; `state_dict`, and moving back to the CPU, restore them bit for bit.

    forward: hidden_states [T, H], top_k_index [T, A] int64, top_k_weights [T, A] -> [T, H]
    """

    gate_up_proj_bias: nn.Parameter | None
    up_proj_bias: nn.Parameter | None  # of experts without gates
    down_proj_bias: nn.Parameter | None

    def __init__(self, original: nn.Module, experts: dict[int, dict[str, dict[str, Tensor]]]) -> None:
        """original: the transformers module, on meta    experts: index -> checkpoint name -> parts by suffix."""
        super().__init__()
        down, transposed = original.down_proj, bool(getattr(original, "is_transposed", False))
        assert isinstance(down, Tensor)
        self.num_experts = int(down.shape[0])
        self.hidden_size, self.intermediate_size = (
            int(s) for s in (down.shape[1:][::-1] if transposed else down.shape[1:])
        )
        self.activation = _activation(original)
        self.interleaved = not getattr(original, "is_concatenated", True)
        self.transposed = transposed
        self.config = original.config
        self.originals = dict(original.named_parameters(recurse=False))
        if sorted(experts) != list(range(self.num_experts)):
            raise ArchitectureError(
                f"{type(original).__name__}: {len(experts)} of {self.num_experts} experts are packed; "
                "expected all experts of a layer"
            )
        expected = {GATE, UP, DOWN} if "gate_up_proj" in self.originals else {UP, DOWN}
        for index in range(self.num_experts):
            if missing := expected - {PROJECTIONS[name] for name in experts[index]}:
                names = " and ".join(("gate", "up", "down")[p] for p in sorted(missing))
                raise CheckpointError(
                    f"{type(original).__name__}: expert {index} has no packed {names}; expected all its matrices: copy "
                    "the checkpoint again"
                )
            expert = nn.Module()
            for name, parts in experts[index].items():
                expert.add_module(name, PackedMatrix(self.shape_of(name), parts))
            self.add_module(str(index), expert)
        for name in BIASES:
            self.register_parameter(name, self.originals.get(name))
        self.slab: Tensor | None = None
        self.table: Tensor | None = None
        self._bound: ops.Binding[ops.BoundExperts] | None = None
        self.pack: Pack | None = None
        self.double_quant = any("scale" in parts for named in experts.values() for parts in named.values())
        self.register_load_state_dict_post_hook(_forget_slab)  # type: ignore[no-untyped-call]

    def shape_of(self, name: str) -> tuple[int, int]:
        """[N, K] of an expert's matrix by its checkpoint name."""
        if PROJECTIONS[name] == DOWN:
            return self.hidden_size, self.intermediate_size
        return self.intermediate_size, self.hidden_size

    def cut(self, stacked: Tensor, expert: int, name: str) -> Tensor:
        """One expert's matrix [N, K] out of a stacked parameter of the original module."""
        w = stacked[expert].mT if self.transposed else stacked[expert]
        if PROJECTIONS[name] == DOWN or w.shape[0] == self.intermediate_size:
            return w.contiguous()
        first = PROJECTIONS[name] == GATE
        half = w[0 if first else 1 :: 2] if self.interleaved else w.chunk(2)[0 if first else 1]
        return half.contiguous()

    def stacked_name(self, name: str) -> str:
        """Name of the original module's parameter that holds an expert's matrix."""
        if PROJECTIONS[name] == DOWN:
            return "down_proj"
        return "gate_up_proj" if "gate_up_proj" in self.originals else "up_proj"

    def matrices(self) -> list[tuple[PackedMatrix | None, PackedMatrix, PackedMatrix]]:
        """(gate, up, down) of every expert; gate is None in models without gates."""
        rows = []
        for index in range(self.num_experts):
            expert = self.get_submodule(str(index))
            found: dict[int, Any] = {PROJECTIONS[name]: child for name, child in expert.named_children()}
            rows.append((found.get(GATE), found[UP], found[DOWN]))
        return rows

    def gather(self) -> None:
        """Find the slab that all parts lie in, or copy them into one and let the buffers be views of it.

        On a GPU with Triton, repack them instead.
        """
        matrices = self.matrices()
        weights: list[tuple[PackedWeight | None, PackedWeight, PackedWeight]] = [
            (None if gate is None else gate.packed(), up.packed(), down.packed())
            for gate, up, down in matrices
        ]
        if ops.gpu_layout(w for row in weights for w in row):
            self.pack, self.slab, self.table = ops.repack(weights), None, None
            self._put([(None, None, None)] * len(weights))
            return
        self.slab, self.table = build(weights)
        shapes = [[None if m is None else m.shape for m in row] for row in matrices]
        self._put(
            [
                [
                    None if s is None else expert_weight(self.slab, self.table[e, p], s)
                    for p, s in enumerate(row)
                ]
                for e, row in enumerate(shapes)
            ]
        )

    def _put(self, weights: Sequence[Sequence[PackedWeight | None]]) -> None:
        """Let the children's buffers be those of these weights; None: let them go."""
        for row, found in zip(self.matrices(), weights, strict=True):
            for matrix, weight in zip(row, found, strict=True):
                if matrix is not None and weight is not None:
                    matrix.replace(weight)
                elif matrix is not None:
                    matrix.clear()

    def stored(self) -> list[list[PackedWeight | None]]:
        """The weights as stored, out of the GPU layout. Raises CheckpointError where that keeps too little."""
        assert self.pack is not None
        check_restorable(self.double_quant)
        up, down = (self.intermediate_size, self.hidden_size), (self.hidden_size, self.intermediate_size)
        return ops.restore(self.pack, [up, up, down])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedExperts":
        if self.pack is not None and leaves_gpu(fn, self.pack.table):
            self._put(self.stored())
            self.pack = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._bound = None
        if self.pack is not None:
            self.pack = moved(self.pack, fn)
        elif self.matrices()[0][1].weight_packed.device.type == "cuda":
            self.gather()
        return self

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """The tensors under the names of the checkpoint, as stored, on the CPU when they are repacked."""
        found = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        if self.pack is not None:
            for index, (row, weights) in enumerate(zip(self._names(), self.stored(), strict=True)):
                for name, weight in zip(row, weights, strict=True):
                    if name is not None and weight is not None:
                        for suffix, part in weight.tensors().items():
                            found[f"{prefix}{index}.{name}.weight_{suffix}"] = part.cpu()
        return found

    def _names(self) -> list[list[str | None]]:
        """Checkpoint names of (gate, up, down) of every expert."""
        rows = []
        for index in range(self.num_experts):
            named = {PROJECTIONS[n]: n for n, _ in self.get_submodule(str(index)).named_children()}
            rows.append([named.get(p) for p in (GATE, UP, DOWN)])
        return rows

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum over each token's experts; index E and above means no expert."""
        if self.pack is None and (self.slab is None or self.slab.device != hidden_states.device):
            self.gather()
        if self.pack is not None:
            if hidden_states.shape[-1] != self.hidden_size:
                raise ShapeError(
                    f"experts: x has K={hidden_states.shape[-1]}, the experts have K={self.hidden_size}"
                )
            return ops.experts_gpu(
                hidden_states,
                top_k_index,
                top_k_weights,
                self.pack,
                intermediate=self.intermediate_size,
                activation=self.activation,
                gate_up_bias=self._gate_up_bias(),
                down_bias=self.down_proj_bias,
            )
        assert self.slab is not None
        assert self.table is not None
        if type(hidden_states) is Tensor and hidden_states.is_cpu and not torch.compiler.is_compiling():
            call = self._call(self.slab, self.table)
            if call is not None:
                return call(hidden_states, top_k_index, top_k_weights)
        return ops.experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.slab,
            self.table,
            intermediate=self.intermediate_size,
            activation=self.activation,
            gate_up_bias=self._gate_up_bias(),
            down_bias=self.down_proj_bias,
        )

    def _call(self, slab: Tensor, table: Tensor) -> "ops.BoundExperts | None":
        """The call bound to the tensors that are in place now."""
        tensors = (slab, table, *_biases(self._parameters))
        if self._bound is None or not self._bound.holds(*tensors):
            call = ops.bind_experts(
                slab,
                table,
                hidden=self.hidden_size,
                intermediate=self.intermediate_size,
                activation=self.activation,
                gate_up_bias=self._gate_up_bias(),
                down_bias=self.down_proj_bias,
            )
            self._bound = ops.Binding(call, *tensors)
        return self._bound.call

    def _gate_up_bias(self) -> Tensor | None:
        """[E, 2I] with the gate's part first, also where the checkpoint alternates the two; [E, I] without gates."""
        bias = self.gate_up_proj_bias
        if bias is None:
            return self.up_proj_bias
        if not self.interleaved:
            return bias
        return torch.cat((bias[:, ::2], bias[:, 1::2]), 1)

    def extra_repr(self) -> str:
        """What `print(model)` shows, instead of thousands of children."""
        return f"{self.num_experts} x [{self.intermediate_size}, {self.hidden_size}], {self.activation}"


def _forget_slab(module: nn.Module, _: object) -> None:
    """After `load_state_dict(assign=True)` the children's buffers are not views of the slab any more."""
    assert isinstance(module, PackedExperts)
    module.slab = None


def _activation(original: nn.Module) -> str:
    """Name of an experts module's gated activation. Raises ArchitectureError for one that we do not compute."""
    kind = type(original).__name__
    if kind == "GptOssExperts":
        alpha, limit = (getattr(original, name) for name in ("alpha", "limit"))
        if (alpha, limit) != (GPT_OSS_ALPHA, GPT_OSS_LIMIT):
            raise ArchitectureError(
                f"{kind}: its gate has alpha {alpha} and limit {limit}, the packed experts know {GPT_OSS_ALPHA} and "
                f"{GPT_OSS_LIMIT}; compress this model with --keep expert"
            )
        return GPT_OSS
    gate = getattr(type(original), "_apply_gate", None)
    default = gate is None or gate.__name__ == "_default_apply_gate"
    config = original.config
    for key in ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function"):
        name = getattr(config, key, None)
        if name in ACT2FN and isinstance(getattr(original, "act_fn", None), type(ACT2FN[name])):
            break
    else:
        default = False
    if not default or getattr(original, "has_post_expert_norm", False):
        raise ArchitectureError(
            f"{kind}: computes its activation in a way of its own that the packed experts do not know; compress this "
            "model with --keep expert"
        )
    return str(name)
