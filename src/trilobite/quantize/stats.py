"""What a matrix looks like before it is quantized: kurtosis, and the rank of its quantization residual."""

import torch
from torch import Tensor

from trilobite.formats.weight import dequantize
from trilobite.quantize.matrix import bands, quantize
from trilobite.recipe import Format


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


def residual_rank(w: Tensor, *, fmt: Format, method: str = "rtn", tau: float = 0.5) -> int:
    """How many singular values of the residual W - W_dq are smaller than tau * sigma_max (MiLo Table 2).

    w: [N, K] any float dtype    Computes all singular values: seconds for 4096 columns.
    """
    residual = w.float() - dequantize(quantize(w, fmt, method))
    sigma = torch.linalg.svdvals(residual)
    return int((sigma < tau * sigma[0]).sum())
