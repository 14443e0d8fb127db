"""Native search for the nearest points of the lattice codebooks.

The twin of `nearest` in formats/lattice.py, which explains it. Codes differ where two points are equally near, up to
rounding.
"""

import torch
from torch import Tensor

from trilobite.kernels.cpu import native
from trilobite.recipe import LatticeFormat

_lib, _ = native.load()


def supports(x: Tensor, fmt: LatticeFormat) -> bool:
    """Whether the native library searches for such vectors. Grids need no search."""
    return _lib is not None and x.device.type == "cpu" and fmt.codebook == "e8p"


def nearest(x: Tensor, fmt: LatticeFormat, ratio: float) -> tuple[Tensor, Tensor]:
    """Codewords for vectors in units of the first stage's scale, and the points that they decode to.

    x: [M, 8] fp32    ratio: first scale / second scale    returns: [M] int64, [M, 8] fp32
    Raises ShapeError for a ratio that is not positive.
    """
    assert _lib is not None
    assert x.dtype == torch.float32
    assert x.shape[1:] == (8,)
    x = x.contiguous()
    codes, points = torch.empty(len(x), dtype=torch.int64), torch.empty_like(x)
    _lib.trilobite_nearest_points(x.data_ptr(), len(x), fmt.bits, ratio, codes.data_ptr(), points.data_ptr())
    return codes, points
