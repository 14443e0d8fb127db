"""Native inner loops of the quantizers: one call finds the lines of a band of rows, rounds, and packs its tiles.

The twin of quantize/{rtn,search,hqq}.py. Codes are identical except where a weight lies within rounding of the middle
between two codes (a few in 100,000 with hqq, whose powers are approximated to 1e-5).
"""

import ctypes
from ctypes import Structure, c_int64, c_void_p

import torch
from torch import Tensor

from trilobite.formats.affine import packed_shape, scale_shape
from trilobite.kernels.cpu import native
from trilobite.recipe import Format

METHODS = {"rtn": 0, "search": 1, "hqq": 2}
Line = tuple[Tensor, Tensor | None]

_lib, _ = native.load()


class _Args(Structure):
    """`trilobite_quantize_args`."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("w", "scale", "offset", "weight", "original", "values", "packed", "super")
        ),
        *(
            (name, c_int64)
            for name in ("rows", "k", "group", "bits", "symmetric", "method", "steps", "given", "threads")
        ),
    )


def tier() -> str:
    """Which instruction set the loops use: results may differ in the last bit between two of them."""
    return str(_lib.trilobite_tier().decode()) if _lib else "torch"


def supports(w: Tensor, fmt: Format, method: str) -> bool:
    """Whether the native library quantizes such a band. Double quantization needs all of a row of tiles at a time."""
    return _lib is not None and w.device.type == "cpu" and not fmt.double_quant and method in METHODS


def quantize_band(
    w: Tensor,
    fmt: Format,
    method: str,
    *,
    steps: int,
    start: Line | None = None,
    original: Tensor,
    residual: Tensor,
    packed: bool,
    weight: Tensor | None = None,
) -> tuple[Line, Tensor | None, Tensor | None]:
    """Quantize a band of rows on the calling thread.

    w, original: [N, K] fp32    steps: alternations of search from each start
    start: line [N, K/G] fp32 that a search starts from, in place of the ranges of groups
    residual: [N, K] fp32, receives the original minus what is stored    packed: whether to make tiles
    weight: [K] fp32 > 0, of the columns' errors in a search
    returns: the line [N, K/G] fp32 as found; the tiles or None; the super-scales or None
    Raises ShapeError for shapes that do not fit, ResourceError without memory.
    """
    assert _lib is not None
    n, k = w.shape
    shape = packed_shape(fmt, n, k)
    w, original = w.contiguous(), original.contiguous()
    assert w.dtype == original.dtype == torch.float32
    assert w.shape == original.shape == residual.shape
    assert residual.is_contiguous()
    assert residual.dtype == torch.float32
    scale = torch.empty(n, k // fmt.group_size(k), dtype=torch.float32)
    offset = None if fmt.symmetric else torch.empty_like(scale)
    for line, given in zip((scale, offset), start or (None, None), strict=True):
        if line is not None and given is not None:
            line.copy_(given)
    tiles = torch.empty(shape, dtype=torch.uint8) if packed else None
    if weight is not None and not fmt.super_scales:
        groups = weight.view(scale.shape[1], -1)
        weight = groups / groups.mean(1, keepdim=True)
    weight = None if weight is None else weight.contiguous()
    second = scale_shape(fmt, n, k)
    supers = None if second is None else torch.empty(second, dtype=torch.uint8)
    tensors = (w, scale, offset, weight, original, residual, tiles, supers)
    pointers = [None if t is None else t.data_ptr() for t in tensors]
    flags = int(fmt.symmetric), METHODS[method], steps, int(start is not None)
    sizes = (n, k, fmt.group_size(k), fmt.bits, *flags, 1)
    _lib.trilobite_quantize(ctypes.byref(_Args(*pointers, *sizes)))
    return (scale, offset), tiles, supers
