"""Column scales: what to divide the columns of some matrices by, so that groups of a row quantize with less loss.

Rows in groups have scales of their own in every format of integers, columns have none. Alternately dividing the groups
of each row and the columns by their root mean square, as SINQ does (arXiv:2509.22944), leaves columns of one size. Then
the error of a weight is in proportion to the size of its column; and what a model multiplies by large weights is small:
training and norms see to that.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trilobite.checkpoint.roles import read_matrix
from trilobite.checkpoint.source import Source
from trilobite.quantize.columns.streams import Stream
from trilobite.recipe import BODY_ROLES

GROUP = 64
"""Columns of a row that are divided by one number while scales are found, whatever the groups of the format."""
ROUNDS = 8
SAMPLE, FEWEST = 1 << 22, 8
"""Weights that are looked at for one stream, in rows evenly spread over its matrices, and the fewest rows of each."""
LARGEST = 32.0
"""Scales beyond it, and below its inverse, would bring fp16 scales of groups out of their range."""


def column_scales(source: Source, stream: Stream) -> Tensor:
    """The scales of a stream, whose readers' columns are divided by them: [size] fp32 with a geometric mean of 1."""
    bodies = [p for p in stream.readers if p.matrix.role in BODY_ROLES]
    rows = max(FEWEST, SAMPLE // sum(p.matrix.shape[1] for p in bodies))
    sizes = even_columns([_some(read_matrix(source, p.matrix), rows) for p in bodies]).log()
    channels = stream.readers[0].channels
    if channels is not None:  # several columns read one channel
        sums = torch.zeros(stream.size).index_add_(0, channels, sizes)
        sizes = sums / torch.bincount(channels, minlength=stream.size)
    return (sizes - sizes.mean()).exp().clamp(1 / LARGEST, LARGEST)


def _some(w: Tensor, rows: int) -> Tensor:
    """At most so many rows, evenly spread. w: [N, K]    returns: [rows, K] fp32."""
    step = -(-w.shape[0] // rows)
    return w[step // 2 :: step].float()


def even_columns(matrices: Sequence[Tensor]) -> Tensor:
    """What to divide the columns of all matrices by, so that they have one size where all groups of rows have.

    matrices: [N, K] fp32, of one K    returns: [K] fp32 > 0
    """
    w = torch.cat(list(matrices))
    k = w.shape[1]
    group = GROUP if k % GROUP == 0 else k
    square = w.square_().view(len(w), -1, group)
    tiny = torch.finfo(torch.float32).tiny
    inverse = torch.ones(k)  # of the columns' mean squares
    for _ in range(ROUNDS):
        rows = (square * inverse.view(-1, group)).mean(-1, keepdim=True)
        evened = square / rows.clamp_min(tiny)
        columns = evened.view(len(w), k).mean(0)
        # A column of zeros has no size, and may have any scale.
        columns = torch.where(columns > 0, columns, 1.0)
        inverse = columns.log().mean().exp() / columns
    return inverse.rsqrt()
