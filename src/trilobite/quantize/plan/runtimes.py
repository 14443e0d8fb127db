"""Whether another program than ours runs what a plan makes."""

from collections.abc import Callable, Mapping

from trilobite.checkpoint.fused import FUSED, partly_packed, refuse_lattice
from trilobite.errors import RecipeError
from trilobite.quantize.plan.plan import Plan
from trilobite.recipe import LatticeFormat, Role


def check_vllm(plan: Plan) -> None:
    """Raise RecipeError that names the recipe to use where vLLM cannot run it (docs/vllm.md)."""
    packed: dict[str, bool] = {}
    for line in plan.lines:
        name = line.matrix.name.removesuffix(".weight")
        if isinstance(line.format, LatticeFormat):
            raise RecipeError(refuse_lattice(name, line.format.bits))
        if line.matrix.quantizable and line.matrix.role is not Role.EXPERT:
            packed[name] = line.format is not None
    for path in dict.fromkeys(name.rpartition(".")[0] for name in packed):
        for fused, parts in FUSED.items():
            names = [name for part in parts if (name := f"{path}.{part}") in packed]
            chosen = [name for name in names if packed[name]]
            if len(chosen) not in (0, len(names)):
                raise RecipeError(partly_packed(f"{path}.{fused}", chosen, names))


RUNTIMES: Mapping[str, Callable[[Plan], None]] = {"vllm": check_vllm}
"""Programs that a checkpoint can be meant for, and the check of a plan."""
