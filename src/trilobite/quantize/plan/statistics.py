"""What a matrix looks like before it is quantized: kurtosis, and the rank of its quantization residual."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from trilobite.checkpoint.roles import Matrix, read_matrix
from trilobite.checkpoint.source import Source
from trilobite.formats.padding import fill_up, whole_blocks
from trilobite.formats.weight import dequantize
from trilobite.quantize.methods.bands import bands
from trilobite.quantize.methods.registry import quantize
from trilobite.quantize.naming import naming
from trilobite.quantize.watcher import SILENT, Watcher
from trilobite.recipe import BODY_ROLES, Format, Role

SAMPLE = 2**20
"""Weights whose kurtosis stands for that of a matrix in its report: a hundredth of what rounding it takes."""
SIDE = 128
"""Rows or columns, whichever are fewer, whose residual stands for that of a matrix in its report."""
TAU = 0.5
"""Singular values below this share of the largest count as small (MiLo Table 2)."""


def kurtosis(w: Tensor) -> float:
    """Excess kurtosis E[(X - mu)^4] / sigma^4 - 3: 0 for a normal distribution, positive for heavy tails.

    MiLo (section 3.1.1) prints the formula without the -3, but the values of its Table 2 (-0.89 .. 1.57) have it.

    w: [N, K] any float dtype
    """
    n, k = w.shape
    mean = sum(float(w[r].double().sum()) for r in bands(n, k)) / w.numel()
    second = fourth = 0.0
    for rows in bands(n, k):
        square = (w[rows].double() - mean).square_()
        second += float(square.sum())
        fourth += float(square.square_().sum())
    return fourth * w.numel() / second**2 - 3 if second > 0 else 0.0


def sampled_kurtosis(w: Tensor) -> float:
    """`kurtosis` of about SAMPLE weights, of rows evenly spread; of all of them where there are no more.

    w: [N, K] any float dtype
    """
    return kurtosis(w[:: max(1, w.numel() // SAMPLE)])


def residual_rank(w: Tensor) -> int:
    """How many singular values of the residual W - RTN-INT3(W) are smaller than TAU * sigma_max (MiLo Table 2).

    w: [N, K] any float dtype    Computes all singular values: seconds for 4096 columns.
    """
    sigma = torch.linalg.svdvals(_residual(w))
    return int((sigma < TAU * sigma[0]).sum())


def sampled_residual_share(w: Tensor) -> float:
    """`residual_rank` over min(N, K), of rows and columns evenly spread; of all where the fewer are below 2 SIDE.

    The sample is as oblong as the matrix, since that alone moves the singular values of a residual without structure.

    w: [N, K] any float dtype
    """
    step = max(1, min(w.shape) // SIDE)
    residual = _residual(w[::step])[:, ::step]
    short = residual if residual.shape[0] <= residual.shape[1] else residual.T
    squares = torch.linalg.eigvalsh(short @ short.T)
    return float((squares < TAU**2 * squares[-1]).float().mean())


def _residual(w: Tensor) -> Tensor:
    n, k = w.shape
    padded = fill_up(w, n, whole_blocks(k))
    fmt = Format(bits=3, group=64 if padded.shape[1] % 64 == 0 else 32)
    return (padded.float() - dequantize(quantize(padded, fmt, "rtn")))[:, :k]


@dataclass(frozen=True, kw_only=True)
class RoleSample:
    """What a sample of one role's matrices looks like, as in MiLo Table 2: means over `matrices` of them.

    residual_rank: singular values of W - RTN-INT3-g64(W) below half the largest    share: that over min(N, K)
    """

    matrices: int
    kurtosis: float
    residual_rank: float
    share: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def sample_roles(
    source: Source,
    matrices: Sequence[Matrix],
    *,
    samples: int | None,
    watcher: Watcher = SILENT,
) -> dict[Role, RoleSample]:
    """Measure at most `samples` matrices of every role that is quantized, evenly spread; None = all.

    Raises WeightError that names the matrix.
    """
    chosen: dict[Role, list[Matrix]] = {}
    for role in BODY_ROLES:
        of_role = [m for m in matrices if m.role is role and m.quantizable]
        count = len(of_role) if samples is None else min(samples, len(of_role))
        if count:
            chosen[role] = [of_role[i * len(of_role) // count] for i in range(count)]
    total = sum(map(len, chosen.values()))
    samples_by_role: dict[Role, RoleSample] = {}
    done = 0
    for role, picked in chosen.items():
        measured: list[tuple[float, int, float]] = []
        for m in picked:
            watcher.progress("kurtosis and residual rank", done, total)
            w = read_matrix(source, m)
            with naming(m.name):
                rank = residual_rank(w)
            measured.append((kurtosis(w), rank, rank / min(w.shape)))
            done += 1
        means = [sum(column) / len(measured) for column in zip(*measured, strict=True)]
        samples_by_role[role] = RoleSample(
            matrices=len(measured), kurtosis=means[0], residual_rank=means[1], share=means[2]
        )
    return samples_by_role
