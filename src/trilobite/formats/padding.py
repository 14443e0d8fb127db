"""Sides of matrices that are no multiple of a block: filled up with zeros before they are packed.

Columns of zeros meet inputs of zeros, so they change no result. Experts get rows of zeros too: the rows of gate and up
are the columns of down. Such rows decode to zeros, but with double quantization, where rows share their scales.
Lattice formats take any length.
"""

from torch import Tensor
from torch.nn.functional import pad

from trilobite.formats.bitpack import BLOCK
from trilobite.recipe import AnyFormat, LatticeFormat


def filled_up(shape: tuple[int, int], fmt: AnyFormat, *, expert: bool) -> tuple[int, int]:
    """[N, K] as a matrix is packed."""
    n, k = shape
    if isinstance(fmt, LatticeFormat):
        return n, k
    return whole_blocks(n) if expert else n, whole_blocks(k)


def whole_blocks(length: int) -> int:
    """The next multiple of a block."""
    return -(-length // BLOCK) * BLOCK


def fill_up(x: Tensor, *sides: int) -> Tensor:
    """Zeros after the last values of the last dimensions, until these have such lengths."""
    missing = [side - length for side, length in zip(sides, x.shape[-len(sides) :], strict=True)]
    if not any(missing):
        return x
    return pad(x, [part for width in reversed(missing) for part in (0, width)])
