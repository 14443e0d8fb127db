"""What every method takes and gives: METHODS[name](w, fmt, hessian=…, compensation=…) -> Quantized."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trilobite.formats.weight import PackedWeight
from trilobite.recipe import ITERATIONS, AnyFormat


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A quantized matrix and how it was found.

    error: |W - W_q|_F / |W|_F of what is stored    proxy: tr((W - W_q) H (W - W_q)^T) / tr(W H W^T), where H is known
    errors: after each iteration of MiLo, |W - W_dq - U V|_F / |W|_F, U and V still in fp32 (eq. 14)
    proxies: after each alternation of GPTQ and low rank, the proxy of what would be stored
    """

    weight: PackedWeight
    error: float
    proxy: float | None = None
    errors: tuple[float, ...] = ()
    proxies: tuple[float, ...] = ()

    @property
    def best(self) -> int:
        """Which of MiLo's iterations was kept."""
        return self.errors.index(min(self.errors))


@dataclass(frozen=True, kw_only=True)
class Compensation:
    """What to add to a quantized matrix. rank: of U V, 0 = nothing    compensator: its format    iterations: cap.

    refit: codes and factors are fitted to each other as they are stored
    seed: of the SVD, and of the transform of the outputs    input_seed: of that of the inputs (lattice formats)
    """

    rank: int = 0
    compensator: str = "int3"
    iterations: int = ITERATIONS
    refit: bool = True
    seed: int = 0
    input_seed: int = 0


class Method(Protocol):
    """How codes are found."""

    def __call__(
        self,
        w: Tensor,
        fmt: AnyFormat,
        *,
        hessian: Tensor | None = None,
        compensation: Compensation | None = None,
    ) -> Quantized:
        """Quantize one matrix.

        w: [N, K] any float dtype    hessian: [K, K] fp32, E[x x^T] of its inputs, for the methods that use one; or its
        diagonal [K], for search
        Raises WeightError for NaN, infinite or out-of-range weights, ShapeError when K does not divide into groups,
        CalibrationError for a useless Hessian, RecipeError where one is needed and there is none.
        """
