"""PackedExperts: one module in the place of every `*Experts` module of transformers."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from trilobite.errors import ArchitectureError, CheckpointError
from trilobite.formats.padding import fill_up, whole_blocks
from trilobite.formats.weight import PackedWeight
from trilobite.kernels import ops
from trilobite.kernels.expert_table import DOWN, GATE, UP, build, expert_weight, same_storage
from trilobite.kernels.layer import Codings, ExpertsLayer, Pack
from trilobite.models.experts import PROJECTIONS, expert_activation
from trilobite.models.stacked_experts import unchanged
from trilobite.runtime.modules.matrix import PackedMatrix
from trilobite.runtime.modules.residence import AsStored, OnGpu, PackedModule, Residence

BIASES = ("gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
_biases = itemgetter(*BIASES)


class PackedExperts(PackedModule):
    """All routed experts of one layer, one operator call for all of them.

    Children `0.gate_proj`, `0.up_proj`, ... (`expert_0.fc1`, ...) have the names of the checkpoint, so that it loads and
    saves tensor by tensor, without stacking: experts may differ in format and rank.

    forward: hidden_states [T, H], top_k_index [T, A] int64, top_k_weights [T, A] -> [T, H]
    """

    original: nn.Module
    """The module of transformers, without data: what `dequantize` makes whole again."""
    residence: "Residence[PackedExperts] | None"
    gate_up_proj_bias: nn.Parameter | None
    up_proj_bias: nn.Parameter | None  # of experts without gates
    down_proj_bias: nn.Parameter | None

    def __init__(
        self, original: nn.Module, experts: dict[int, dict[str, dict[str, Tensor]]], prefix: str = ""
    ) -> None:
        """original: the transformers module, on meta    experts: index -> checkpoint name -> parts by suffix.

        prefix: of the names of children, which are numbers without it
        """
        super().__init__()
        self.prefix = prefix
        self.activation = expert_activation(original)
        down, transposed = original.down_proj, bool(getattr(original, "is_transposed", False))
        assert isinstance(down, Tensor)
        self.num_experts = int(down.shape[0])
        self.hidden_size, self.intermediate_size = (
            int(s) for s in (down.shape[1:][::-1] if transposed else down.shape[1:])
        )
        self.interleaved = not getattr(original, "is_concatenated", True)
        self.transposed = transposed
        self.scales_inputs = bool(getattr(original, "scales_inputs", False))
        has_norm = getattr(original, "has_post_expert_norm", False)
        self.post_expert_norm = original.get_submodule("post_expert_norm") if has_norm else None
        self.passes_on = bool(getattr(original, "passes_on", False))
        self.config = getattr(original, "config", None)
        # Past nn.Module, which would make its parameters ours; on meta it takes no memory.
        object.__setattr__(self, "original", original)
        if sorted(experts) != list(range(self.num_experts)):
            raise ArchitectureError(
                f"{type(original).__name__}: {len(experts)} of {self.num_experts} experts are packed; "
                "expected all experts of a layer"
            )
        expected = {GATE, UP, DOWN} if "gate_up_proj" in original._parameters else {UP, DOWN}
        for index in range(self.num_experts):
            if missing := expected - {PROJECTIONS[name] for name in experts[index]}:
                names = " and ".join(("gate", "up", "down")[p] for p in sorted(missing))
                raise CheckpointError(
                    f"{type(original).__name__}: expert {index} has no packed {names}; expected all its matrices: copy "
                    "the checkpoint again"
                )
        lattice = any("lattice" in parts for named in experts.values() for parts in named.values())
        sides = self.hidden_size, self.intermediate_size
        # As packed: filled up, but in lattice formats.
        self.sides = sides if lattice else (whole_blocks(sides[0]), whole_blocks(sides[1]))
        for index in range(self.num_experts):
            expert = nn.Module()
            for name, parts in experts[index].items():
                expert.add_module(name, PackedMatrix(self.shape_of(name), parts))
            self.add_module(f"{prefix}{index}", expert)
        for name in BIASES:
            self.register_parameter(name, original._parameters.get(name))
        self.residence = None
        self.register_load_state_dict_post_hook(_settle_anew)  # type: ignore[no-untyped-call]

    def shape_of(self, name: str) -> tuple[int, int]:
        """[N, K] of an expert's packed matrix by its checkpoint name."""
        hidden, intermediate = self.sides
        return (hidden, intermediate) if PROJECTIONS[name] == DOWN else (intermediate, hidden)

    def plain(self, w: Tensor, name: str) -> Tensor:
        """A dequantized matrix without what filled it up."""
        down = PROJECTIONS[name] == DOWN
        n, k = (self.hidden_size, self.intermediate_size)[:: 1 if down else -1]
        return w[:n, :k]

    def cut(self, stacked: Tensor, expert: int, name: str) -> Tensor:
        """One expert's matrix [N, K], as a view of a stacked parameter of the original module."""
        w = stacked[expert].mT if self.transposed else stacked[expert]
        if PROJECTIONS[name] == DOWN or w.shape[0] == self.intermediate_size:
            return w
        first = PROJECTIONS[name] == GATE
        return w[0 if first else 1 :: 2] if self.interleaved else w.chunk(2)[0 if first else 1]

    def stacked_name(self, name: str) -> str:
        """Name of the original module's parameter that holds an expert's matrix."""
        if PROJECTIONS[name] == DOWN:
            return "down_proj"
        return "gate_up_proj" if "gate_up_proj" in self.original._parameters else "up_proj"

    def matrices(self) -> list[tuple[PackedMatrix | None, PackedMatrix, PackedMatrix]]:
        """(gate, up, down) of every expert; gate is None in models without gates."""
        rows: list[Any] = []
        for index in range(self.num_experts):
            expert = self.expert(index)
            rows.append(tuple(None if name is None else expert._modules[name] for name in self.leaves(index)))
        return rows

    def expert(self, index: int) -> nn.Module:
        """The module that holds one expert's matrices."""
        return self.get_submodule(f"{self.prefix}{index}")

    def leaves(self, expert: int) -> tuple[str | None, str, str]:
        """What an expert's (gate, up, down) are called in the checkpoint."""
        named = {PROJECTIONS[name]: name for name, _ in self.expert(expert).named_children()}
        return named.get(GATE), named[UP], named[DOWN]

    def as_stored(self) -> "Residence[PackedExperts]":
        """In the memory that all parts lie in, or in a slab of copies, of which the buffers become views."""
        weights: list[Any] = [
            tuple(None if m is None else m.packed() for m in row) for row in self.matrices()
        ]
        slab, table = build(weights)
        if not same_storage(slab, weights[0][UP].packed):
            self.put([[self._view(slab, row[p], p) for p in (GATE, UP, DOWN)] for row in table])
        return _ExpertsAsStored(slab, table)

    def _view(self, slab: Tensor, row: Tensor, projection: int) -> PackedWeight | None:
        hidden, intermediate = self.sides
        shape = (hidden, intermediate) if projection == DOWN else (intermediate, hidden)
        return expert_weight(slab, row, shape)

    def on_gpu(self, pack: Pack, restorable: bool) -> "Residence[PackedExperts]":
        """All experts in one pack."""
        return _ExpertsOnGpu(pack, restorable)

    def layer(self, slab: Tensor, table: Tensor, codings: Codings = ()) -> ExpertsLayer:
        """The operator's argument: weights in this slab, and the biases that the module has now."""
        return ExpertsLayer(
            slab=slab,
            table=table,
            hidden=self.sides[0],
            intermediate=self.sides[1],
            activation=self.activation,
            gate_up_bias=self._gate_up_bias(),
            down_bias=None if self.down_proj_bias is None else fill_up(self.down_proj_bias, self.sides[0]),
            codings=codings,
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum over each token's experts; index E and above means no expert, or one that gives what it is given."""
        residence = self.residence
        if residence is None:
            residence = self.settle()
        if self.scales_inputs or self.post_expert_norm is not None:
            return self._slot_by_slot(residence, hidden_states, top_k_index, top_k_weights)
        y = self._run(residence, hidden_states, top_k_index, top_k_weights)
        if self.passes_on:
            y = y + unchanged(hidden_states, top_k_index, top_k_weights, self.num_experts)
        return y

    @property
    def plainly(self) -> bool:
        """Whether its forward is the operator and nothing else."""
        of_its_own = self.scales_inputs or self.post_expert_norm is not None or self.passes_on
        return not of_its_own and self.sides[0] == self.hidden_size

    def _run(
        self, residence: "Residence[PackedExperts]", x: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        if self.sides[0] == self.hidden_size:
            return residence.run(self, x, index, weights)
        return residence.run(self, fill_up(x, self.sides[0]), index, weights)[:, : self.hidden_size]

    def _slot_by_slot(
        self, residence: "Residence[PackedExperts]", x: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        """Each of a token's experts as if for a token of its own: weights multiply what enters, or what a norm gives."""
        slots = index.shape[-1]
        rows, each = x.repeat_interleave(slots, 0), weights.reshape(-1, 1)
        if self.scales_inputs:
            rows, each = (rows * each).to(x.dtype), torch.ones_like(each)
        y = self._run(residence, rows, index.reshape(-1, 1), torch.ones_like(each))
        if self.post_expert_norm is not None:
            y = self.post_expert_norm(y)
        return (y * each).to(x.dtype).view(-1, slots, x.shape[-1]).sum(1)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: without the slab, of which the buffers are views; the first call makes another."""
        in_buffers = self.residence is not None and self.residence.in_buffers
        return {**self.__dict__, "residence": None if in_buffers else self.residence}

    def _gate_up_bias(self) -> Tensor | None:
        """[E, 2I] with the gate's part first, also where the checkpoint alternates the two; [E, I] without gates."""
        bias, width = self.gate_up_proj_bias, self.sides[1]
        if bias is None:
            return None if self.up_proj_bias is None else fill_up(self.up_proj_bias, width)
        if not self.interleaved and width == self.intermediate_size:
            return bias
        gate, up = (bias[:, ::2], bias[:, 1::2]) if self.interleaved else bias.chunk(2, 1)
        return torch.cat((fill_up(gate, width), fill_up(up, width)), 1)

    def extra_repr(self) -> str:
        """What `print(model)` shows, instead of thousands of children."""
        return f"{self.num_experts} x [{self.intermediate_size}, {self.hidden_size}], {self.activation}"


class _ExpertsAsStored(AsStored[PackedExperts]):
    """In one slab, of which the buffers are views."""

    def __init__(self, slab: Tensor, table: Tensor) -> None:
        self.slab, self.table = slab, table

    def tensors(self, module: PackedExperts) -> tuple[Tensor | None, ...]:
        return self.slab, self.table, *_biases(module._parameters)

    def bind(self, module: PackedExperts) -> Callable[..., Tensor] | None:
        return ops.bind_experts(module.layer(self.slab, self.table), module.settings)

    def operate(self, module: PackedExperts, *inputs: Tensor) -> Tensor:
        x, index, weights = inputs
        return ops.experts(x, index, weights, module.layer(self.slab, self.table), module.settings)

    def moved(
        self, module: PackedExperts, fn: Callable[[Tensor], Tensor]
    ) -> "Residence[PackedExperts] | None":
        probe = torch.empty(0, dtype=torch.uint8, device=self.slab.device)
        return _ExpertsAsStored(self.slab, self.table) if fn(probe).device == probe.device else None


class _ExpertsOnGpu(OnGpu[PackedExperts]):
    """The layer is put together once, and again when a bias has changed."""

    def run(self, module: PackedExperts, *inputs: Tensor) -> Tensor:
        x, index, weights = inputs
        return ops.experts(x, index, weights, self._layer(module, x))

    def _layer(self, module: PackedExperts, x: Tensor) -> ExpertsLayer:
        if type(x) is not Tensor or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return module.layer(self.pack.slab, self.pack.table, self.pack.codings)
        biases, binding = _biases(module._parameters), self.binding
        if binding is None or not binding.holds(*biases):
            layer = module.layer(self.pack.slab, self.pack.table, self.pack.codings)
            binding = self.binding = ops.Binding(layer, *biases)
        made: ExpertsLayer = binding.made
        return made


def _settle_anew(module: nn.Module, _: object) -> None:
    """After `load_state_dict(assign=True)` the children's buffers are not views of the slab any more."""
    assert isinstance(module, PackedExperts)
    if module.residence is not None and module.residence.in_buffers:
        module.residence = None
