"""A block as a function of what fine-tuning trains in it: sign vectors, norms, a router; a head outside of the blocks.

In the paper's order also the matrices that are still to be quantized.

The forward pass computes with the values as they will be stored, rounded to 16 bit; gradients pass the rounding
unchanged. So the loss that decides is that of the packed model.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trilobite.checkpoint.roles import Matrix
from trilobite.checkpoint.source import DTYPES
from trilobite.formats.incoherence import Spin
from trilobite.formats.weight import PackedWeight, decode_factor, rotated, spins, unrotated
from trilobite.quantize.calibrate.model import BlockModel, Exchange, as_it_is
from trilobite.quantize.calibrate.stacked_experts import check_experts, expert_matrix, stacked_experts
from trilobite.quantize.calibrate.weights import Place
from trilobite.quantize.plan.plan import PlanLine, decoded, packed_weight
from trilobite.recipe import LatticeFormat, Role


class _Round(torch.autograd.Function):
    """To 16 bit and back; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    rounded: Tensor = _Round.apply(x, dtype)  # type: ignore[no-untyped-call]
    return rounded


@dataclass(frozen=True, kw_only=True)
class _Lattice:
    """A weight in a lattice format. base: decoded codes in rotated coordinates, where they are kept    plain: U V."""

    weight: PackedWeight
    transform: str
    names: tuple[str, str]
    base: Tensor | None
    plain: Tensor | None

    def matrix(self, s_in: Tensor, s_out: Tensor) -> Tensor:
        """W(s_in, s_out), [N, K] fp32, differentiable."""
        base = rotated(self.weight) if self.base is None else self.base
        spin_in, spin_out = (Spin(transform=self.transform, s=s) for s in (s_in, s_out))
        w = unrotated(base, spin_in, spin_out)
        return w if self.plain is None else (w + self.plain) * 2.0**self.weight.exponent


_Source = Tensor | _Lattice | str
"""Where a matrix comes from: a constant, codes, or the name by which it is trained itself."""


class Part:
    """A block, or what is outside of the blocks, as a function of what is trained in it.

    trained: fp32 leaves by stored name    signs: the names among them that are vectors of transforms
    """

    def __init__(
        self,
        model: BlockModel,
        path: str,
        lines: Sequence[PlanLine],
        read: Callable[[PlanLine], Sequence[Tensor]],
        *,
        keep: bool = True,
        originals: Collection[str] = (),
        exponent: Callable[[PlanLine], int] = lambda _: 0,
    ) -> None:
        """path: a loaded block, or "" for the outside    read, exponent: what is stored of a line    keep: decoded.

        originals: matrices, by name, that are trained as they were loaded, until they are quantized
        """
        self.model, self.path, self._exponent = model, path, exponent
        self.trained: dict[str, Tensor] = {}
        self.signs: set[str] = set()
        self._dtypes: dict[str, torch.dtype] = {}
        self._kept: dict[str, str] = {}
        self._packed: dict[Place, _Source] = {}
        self._codes: dict[str, Tensor] = {}
        constants = model.parameters(path)
        roles = (Role.NORM, Role.ROUTER) if path else (Role.NORM, Role.HEAD)
        for line in lines:
            if line.format is not None:
                place = model.place(line.matrix)
                if place is not None and self._holds(place.module):
                    if line.matrix.name in originals:
                        self._train(line.matrix.name, model.matrix(place).detach(), torch.float32)
                        self._packed[place] = line.matrix.name
                    else:
                        self._packed[place] = self._decoder(line, read(line), keep=keep)
            elif line.matrix.role in roles and (name := self._parameter(line.matrix)) in constants:
                self._kept[name] = line.matrix.name
                self._train(line.matrix.name, read(line)[0], DTYPES[line.stored[0].dtype])
        self._experts = self._complete(sorted({p.module for p in self._packed if p.expert is not None}))
        made = {f"{p.module}.weight" for p in self._packed if p.expert is None} | self._kept.keys()
        made |= {
            f"{path}.{name}" for path in self._experts for name in ("gate_up_proj", "up_proj", "down_proj")
        }
        self._constants = {name: t.float() for name, t in constants.items() if name not in made}

    def _holds(self, module: str) -> bool:
        index = self.model.block_of(Place(module=module))
        return (self.model.blocks[index] if index is not None else "") == self.path

    def _parameter(self, matrix: Matrix) -> str:
        return self.model.parameter(matrix) or ""

    def _train(self, name: str, value: Tensor, dtype: torch.dtype) -> None:
        self.trained[name] = value.to(self.model.device).float().clone().requires_grad_()
        self._dtypes[name] = dtype

    def _decoder(self, line: PlanLine, stored: Sequence[Tensor], *, keep: bool) -> Tensor | _Lattice:
        """A packed matrix: what is trained and what is not, or all of it where nothing is."""
        if not isinstance(line.format, LatticeFormat):
            return decoded(line, stored, self.model.device, self._exponent(line))
        weight = packed_weight(line, stored, self.model.device, self._exponent(line))
        names = (f"{line.matrix.name}_signs_in", f"{line.matrix.name}_signs_out")
        for name, spin in zip(names, spins(weight), strict=True):
            self._train(name, spin.s, torch.float16)
            self.signs.add(name)
        n, k = weight.shape
        plain = None
        if weight.lra is not None and weight.lrb is not None:
            plain = decode_factor(weight.lra, n).T @ decode_factor(weight.lrb, k)
        return _Lattice(
            weight=weight,
            transform=line.format.transform,
            names=names,
            base=rotated(weight) if keep else None,
            plain=plain,
        )

    def quantize(self, line: PlanLine, stored: Sequence[Tensor]) -> None:
        """A matrix that was trained as it was loaded is quantized from now on. stored: its tensors."""
        place = self.model.place(line.matrix)
        assert place is not None
        del self.trained[line.matrix.name], self._dtypes[line.matrix.name]
        self._codes |= {t.name: data for t, data in zip(line.stored, stored, strict=True)}
        self._packed[place] = source = self._decoder(line, stored, keep=True)
        if place.expert is not None and place.projection is not None:
            self._experts[place.module][place.expert, place.projection] = source

    def _complete(self, modules: Sequence[str]) -> dict[str, dict[tuple[int, str], "_Source"]]:
        """All matrices of the modules of experts that hold a packed one."""
        by_module = {}
        for path in modules:
            experts: Any = self.model.module(path)
            check_experts(experts, path)
            matrices: dict[tuple[int, str], _Source] = {}
            for e in range(len(experts.down_proj)):
                for projection in ("gate", "up", "down") if experts.has_gate else ("up", "down"):
                    place = Place(module=path, expert=e, projection=projection)
                    own = self._packed.get(place)
                    if own is None:
                        own = expert_matrix(experts, e, projection).detach().float().clone()
                    matrices[e, projection] = own
            by_module[path] = matrices
        return by_module

    def parameters(self) -> dict[str, Tensor]:
        """All parameters by name, fp32, with the values that will be stored."""
        now = {name: _round(x, self._dtypes[name]) for name, x in self.trained.items()}

        def matrix(source: _Source) -> Tensor:
            if isinstance(source, str):
                return now[source]
            return source if isinstance(source, Tensor) else source.matrix(*(now[n] for n in source.names))

        parameters = self._constants | {name: now[stored] for name, stored in self._kept.items()}
        for place, source in self._packed.items():
            if place.expert is None:
                parameters[f"{place.module}.weight"] = matrix(source)
        for path, of_path in self._experts.items():
            stacked = stacked_experts(self.model.module(path), {k: matrix(v) for k, v in of_path.items()})
            parameters |= {f"{path}.{name}": tensor for name, tensor in stacked.items()}
        return parameters

    def __call__(self, hidden: Tensor, first: int = 0, exchange: Exchange = as_it_is) -> Tensor:
        """The block on a batch, as `BlockModel.apply` has it. hidden: [B, T, H]    returns: [B, T, H] fp32."""
        return self.model.apply(self.path, hidden, self.parameters(), first, exchange)

    def values(self) -> dict[str, Tensor]:
        """What is trained, and what was quantized meanwhile, by stored name, as stored."""
        values = dict(self._codes)
        for name, x in self.trained.items():
            value = x.detach().to(self._dtypes[name]).cpu()
            values[name] = value.view(torch.uint8) if name in self.signs else value
        return values
