"""Codebooks for vectors of eight weights: E8P, its residual forms for 3 and 4 bits, 1-bit E8, the half-integer grid.

A codeword stands for eight neighbours of a row of the transformed matrix (`incoherence`), `8 * bits` bits long:

    e8p-1   entry of the 1-bit E8 codebook
    e8p-2   bits 8-15: entry s of the source table; bit 8-i, i = 1..7: lane i is negative; bit 0: +1/4, else -1/4
    e8p-3   e8p-2, then bits 16-23: entry of the 1-bit E8 codebook, for what the first stage leaves
    e8p-4   e8p-2, then bits 16-31: a second E8P codeword for what the first leaves
    grid-b  eight codes of b bits, lane 0 the lowest: lane = code - (2**b - 1) / 2

E8P (QuIP#, section 4.2 and C): the lanes of s are 1/2, 3/2 or 5/2. The sign of lane 0 is not stored: it makes the sum
of the lanes even, before the shift. So 2**16 points of E8 + 1/4 follow from a table of 256 patterns, 1 KiB. Patterns
are sorted by norm, then lane by lane; the 29 of norm 12 come last, as section C.1 lists them.

The 1-bit E8 codebook: zero, the 240 shortest vectors of E8 in lexicographic order, then +2 and -2 on every axis but
the very last of these sixteen (section 4.3).

In a tile of 16 rows x 8 columns of `weight_packed` [ceil(N/16), K/8, 16 * bits] lie the first stages of its 16 rows,
two bytes each (of e8p-1 one), little endian, then the second stages, one or two bytes each; of the grid, `bits` bytes a
row. Rows past N are zero codes. `weight_lattice` is the record of 12 bytes that `LatticeRecord` draws.
"""

import itertools
import struct
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.formats.bitpack import ROWS
from trilobite.recipe import CODEBOOKS, TRANSFORMS, LatticeFormat

DIM = 8
"""Weights of a codeword."""
RECORD_BYTES = 12
PADDING = (
    "31113333 13113333 11313333 11133333 33313311 33313131 33311331 33313113 33311313 33311133 33133311 33133131 "
    "33131331 33133113 33131313 33131133 31333311 31333131 31331331 31333113 31331313 13331133 13333311 13333131 "
    "13331331 13333113 13331313 11331333 33113331"
)
"""Section C.1: the patterns of norm 12, in halves."""
RHO = {
    ("e8p", 1): (0.61, 1.0),
    ("e8p", 2): (1.03, 1.0),
    ("e8p", 3): (0.98, 2.04),
    ("e8p", 4): (0.89, 3.9),
    ("grid", 2): (1 / 0.9957, 1.0),
    ("grid", 3): (1 / 0.5860, 1.0),
    ("grid", 4): (1 / 0.3352, 1.0),
}
"""Factors on a matrix of unit variance, and on what the first stage leaves, of least error on a Gaussian source: those
of section F.5 (E8P: that of the published code; the text's 0.9 is for BlockLDLQ), and Max's of a uniform grid. For 1
bit: benchmarks.quality.codebooks. For 4 bits, 1.03 and 3.45 as published lose .0096, these .0083."""


@lru_cache(maxsize=1)
def source_patterns() -> Tensor:
    """The table S: [256, 8] int8, in halves (1, 3 or 5)."""
    small = (p for p in itertools.product((1, 3, 5), repeat=DIM) if sum(v * v for v in p) <= 40)
    patterns = sorted(small, key=lambda p: (sum(v * v for v in p), p))
    patterns += [tuple(int(c) for c in p) for p in PADDING.split()]
    return torch.tensor(patterns, dtype=torch.int8)


def decode_e8p(codes: Tensor, patterns: Tensor) -> Tensor:
    """E8P codewords to points, by the rule of section C.2.

    codes: [...] integer, 0 .. 65535    patterns: [256, 8] in halves    returns: [..., 8] fp32
    """
    c = codes.long()
    absolute = patterns[c >> 8].float() / 2
    lanes = torch.arange(DIM, device=codes.device)
    negative = (c[..., None] >> (DIM - lanes)) & 1
    negative[..., 0] = (negative[..., 1:].sum(-1) + absolute.sum(-1).long()) & 1
    shift = (c & 1)[..., None] * 0.5 - 0.25
    points: Tensor = absolute * (1 - 2 * negative) + shift
    return points


@lru_cache(maxsize=4)
def e8p_points(device: torch.device) -> Tensor:
    """All E8P points by codeword: [65536, 8] fp32."""
    return decode_e8p(torch.arange(1 << 16), source_patterns()).to(device)


@lru_cache(maxsize=4)
def e8_points(device: torch.device) -> Tensor:
    """The 1-bit E8 codebook: [256, 8] fp32."""
    integers = itertools.product((-1.0, 0.0, 1.0), repeat=DIM)
    halves = itertools.product((-0.5, 0.5), repeat=DIM)
    roots = sorted(v for v in (*integers, *halves) if sum(x * x for x in v) == 2 and sum(v) % 2 == 0)
    axes = [tuple(sign * 2.0 * (i == j) for j in range(DIM)) for i in range(DIM) for sign in (1, -1)]
    return torch.tensor([(0.0,) * DIM, *roots, *axes[:-1]], device=device)


CLASSES = ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (0, 1), (1, 1))
"""Patterns of norm at most 10 up to the order of their lanes: (lanes of 3/2, lanes of 5/2), all others 1/2."""
PAD_CLASS = 5
"""Lanes of 3/2 in a pattern of norm 12."""
CHUNK = 1 << 15
"""Vectors that are searched at a time."""


@lru_cache(maxsize=4)
def _pattern_index(device: torch.device) -> Tensor:
    """Sum of 3**lane * (half - 1) / 2 -> row of the source table: [3**8] int64."""
    keys = ((source_patterns().long() - 1) // 2 * 3 ** torch.arange(DIM)).sum(-1)
    index = torch.zeros(3**DIM, dtype=torch.int64)
    index[keys] = torch.arange(256)
    return index.to(device)


def nearest_e8p(x: Tensor) -> Tensor:
    """Codewords of the E8P points nearest to the given vectors: exact, without looking at all 2**16.

    For either shift, with a = |x - shift|: a class of patterns (all orders of the same lanes) does best when its
    largest lanes meet the largest a. Where the signs of x - shift have the wrong parity for the class, one lane has to
    change its sign, cheapest the smallest a, which then faces 1/2. So a sort gives the best of every whole class; the
    29 patterns that are no whole class are tried one by one where their class could win.

    x: [M, 8] fp32    returns: [M] int64
    """
    if len(x) > CHUNK:
        return torch.cat([nearest_e8p(part) for part in torch.split(x, CHUNK)])
    m, device = len(x), x.device
    shift = torch.tensor([-0.25, 0.25], device=device)
    z = (x[:, None] - shift[:, None]).flatten(0, 1)  # [2M, 8], both shifts
    negative = z < 0
    odd = negative.sum(-1) & 1
    a = z.abs()
    largest, order = a.sort(-1, descending=True)
    top = torch.nn.functional.pad(largest.cumsum(-1), (1, 0))  # top[:, k]: sum of the k largest
    smallest = largest[:, -1]
    even_sum, odd_sum = top[:, DIM] / 2 - odd * smallest, top[:, DIM] / 2 - (1 - odd) * smallest
    scores = []
    for threes, fives in CLASSES:
        product = (odd_sum if threes & 1 else even_sum) + top[:, threes + fives]
        product = product + largest[:, 0] if fives else product
        norm = 2.0 + 2 * threes + 6 * fives
        scores.append(norm - 2 * product)
    score, best = torch.stack(scores, -1).min(-1)
    keys = _class_keys(order).gather(1, best[:, None])[:, 0]
    index = _pattern_index(device)[keys]
    mismatch = odd != torch.tensor([t & 1 for t, _ in CLASSES], device=device)[best]
    flipped = order[:, -1].clone()
    _try_padding(a, odd, 12 - 2 * (odd_sum + top[:, PAD_CLASS]), (score, index, mismatch, flipped))
    # |x - point|^2 = |z|^2 + score, and |z|^2 differs between the shifts.
    distance = (score + z.square().sum(-1)).view(m, 2)
    chosen = torch.arange(m, device=device) * 2 + distance.argmin(-1)
    negative[torch.arange(2 * m, device=device), flipped] ^= mismatch
    signs = (negative[chosen, 1:].long() << torch.arange(DIM - 1, 0, -1, device=device)).sum(-1)
    return index[chosen] << 8 | signs | chosen & 1


def _class_keys(order: Tensor) -> Tensor:
    """Key of `_pattern_index` of every class, given the lanes from the largest to the smallest: [M, classes]."""
    weight = torch.tensor([3**i for i in range(DIM)], device=order.device)[order]
    sums = torch.nn.functional.pad(weight.cumsum(-1), (1, 0))
    return torch.stack([sums[:, t + f] + (weight[:, 0] if f else 0) for t, f in CLASSES], -1)


def _try_padding(a: Tensor, odd: Tensor, bound: Tensor, best: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Improve (score, index, mismatch, flipped lane) in place by the patterns of norm 12.

    a: [M, 8]    odd: [M] parity of the signs    bound: [M], no pattern of norm 12 has a lower score
    """
    score, index, mismatch, flipped = best
    (rows,) = torch.where(bound < score)
    first = 256 - len(PADDING.split())
    pads = source_patterns()[first:].float().to(a.device) / 2
    each = a[rows, None] * pads  # [rows, 29, 8]
    least, lane = each.min(-1)
    wrong = odd[rows] == 0
    candidate, pick = (12 - 2 * (each.sum(-1) - 2 * wrong[:, None] * least)).min(-1)
    (better,) = torch.where(candidate < score[rows])
    rows, pick = rows[better], pick[better]
    score[rows] = candidate[better]
    index[rows] = first + pick
    mismatch[rows] = wrong[better]
    flipped[rows] = lane[better, pick]


def nearest_e8(x: Tensor) -> Tensor:
    """Codes of the nearest points of the 1-bit E8 codebook. x: [M, 8] fp32    returns: [M] int64."""
    points = e8_points(x.device)
    half_norm = points.square().sum(-1) / 2
    return torch.cat([(half_norm - part @ points.T).argmin(-1) for part in torch.split(x, CHUNK)])


def _first_points(fmt: LatticeFormat, device: torch.device) -> Tensor:
    """What the first stage's codewords stand for: [256 or 65536, 8] fp32."""
    return e8_points(device) if fmt.bits == 1 else e8p_points(device)


def nearest(x: Tensor, fmt: LatticeFormat, ratio: float) -> tuple[Tensor, Tensor]:
    """Codewords for vectors in units of the first stage's scale, and the points that they decode to.

    x: [M, 8] fp32    ratio: first scale / second scale    returns: [M] int64, [M, 8] fp32
    """
    if fmt.codebook == "grid":
        top = 2**fmt.bits - 1
        lanes = (x + top / 2).round_().clamp_(0, top)
        shifts = fmt.bits * torch.arange(DIM, device=x.device)
        return (lanes.long() << shifts).sum(-1), lanes - top / 2
    codes = nearest_e8(x) if fmt.bits == 1 else nearest_e8p(x)
    near = _first_points(fmt, x.device)[codes]
    if not fmt.two_stages:
        return codes, near
    rest = (x - near) * ratio
    second = nearest_e8(rest) if fmt.bits == 3 else nearest_e8p(rest)
    table = e8_points(x.device) if fmt.bits == 3 else e8p_points(x.device)
    return codes | second << 16, near.add_(table[second], alpha=1 / ratio)


def points(codes: Tensor, fmt: LatticeFormat, ratio: float) -> Tensor:
    """What codewords stand for, in units of the first stage's scale.

    codes: [...] int64    returns: [..., 8] fp32
    """
    if fmt.codebook == "grid":
        shifts = fmt.bits * torch.arange(DIM, device=codes.device)
        lanes: Tensor = (codes[..., None] >> shifts) & (2**fmt.bits - 1)
        return lanes.float().sub_((2**fmt.bits - 1) / 2)
    if not fmt.two_stages:
        found: Tensor = _first_points(fmt, codes.device)[codes]
        return found
    table = e8_points(codes.device) if fmt.bits == 3 else e8p_points(codes.device)
    return e8p_points(codes.device)[codes & 0xFFFF].add_(table[codes >> 16], alpha=1 / ratio)


@dataclass(frozen=True, kw_only=True)
class LatticeRecord:
    """`weight_lattice`, 12 bytes: codebook (0 e8p, 1 grid), bits, transform (0 hadamard, 1 fourier), 0; two fp32.

    scale: of the first stage    second: scale of the second stage, 0 without one
    """

    format: LatticeFormat
    scale: float
    second: float = 0.0

    @property
    def ratio(self) -> float:
        """First scale / second scale; 1 without a second stage."""
        return self.scale / self.second if self.second else 1.0

    def times(self, factor: float) -> "LatticeRecord":
        """The record of the same codes for a matrix that is `factor` times as large."""
        return LatticeRecord(format=self.format, scale=self.scale * factor, second=self.second * factor)

    def to_tensor(self) -> Tensor:
        """As stored: uint8 [12]."""
        f = self.format
        kind = (CODEBOOKS.index(f.codebook), f.bits, TRANSFORMS.index(f.transform), 0)
        return torch.tensor(list(struct.pack("<4B2f", *kind, self.scale, self.second)), dtype=torch.uint8)


def read_record(stored: Tensor) -> LatticeRecord:
    """The record of a stored matrix. Raises ShapeError for bytes that are none."""
    if stored.dtype != torch.uint8 or stored.shape != (RECORD_BYTES,):
        raise ShapeError(
            f"lattice record is {stored.dtype} {list(stored.shape)}, expected {RECORD_BYTES} bytes of uint8"
        )
    codebook, bits, transform, zero, scale, second = struct.unpack("<4B2f", bytes(stored.tolist()))
    least = 1 if codebook == 0 else 2
    if codebook >= len(CODEBOOKS) or not least <= bits <= 4 or transform >= len(TRANSFORMS) or zero:
        raise ShapeError(
            f"lattice record says codebook {codebook}, {bits} bits, transform {transform}: none that this release "
            "reads; upgrade trilobite, or copy the checkpoint again"
        )
    fmt = LatticeFormat(codebook=CODEBOOKS[codebook], bits=bits, transform=TRANSFORMS[transform])
    finite = 0 <= scale < float("inf") and 0 <= second < float("inf")
    if not finite or (second > 0) != (fmt.two_stages and scale > 0):
        raise ShapeError(f"lattice record has scales {scale} and {second}; copy the checkpoint again")
    return LatticeRecord(format=fmt, scale=scale, second=second)


def packed_shape(fmt: LatticeFormat, n: int, k: int) -> tuple[int, int, int]:
    """Shape of `weight_packed`, uint8, of an [n, k] matrix. Raises ShapeError when 8 does not divide K."""
    if k % DIM:
        raise ShapeError(f"K={k} is not a multiple of {DIM}, the length of a lattice codeword")
    return -(-n // ROWS), k // DIM, ROWS * fmt.bits


def pack(codes: Tensor, fmt: LatticeFormat) -> Tensor:
    """Lay codewords out in tiles. codes: [N, K/8] int64    returns: [ceil(N/16), K/8, 16 * bits] uint8."""
    n, blocks = codes.shape
    codes = torch.nn.functional.pad(codes, (0, 0, 0, -n % ROWS)).view(-1, ROWS, blocks).mT
    octets = [((codes >> 8 * i) & 255).to(torch.uint8) for i in range(fmt.bits)]  # each [tile_rows, K/8, 16]
    if fmt.codebook == "grid":
        return torch.stack(octets, -1).flatten(2)
    stages = [torch.stack(stage, -1).flatten(2) for stage in (octets[:2], octets[2:]) if stage]
    return torch.cat(stages, -1)


def unpack(packed: Tensor, fmt: LatticeFormat) -> Tensor:
    """Inverse of `pack`: [tile_rows, K/8, 16 * bits] uint8 -> [16 * tile_rows, K/8] int64."""
    tile_rows, blocks, _ = packed.shape
    if fmt.codebook == "grid":
        octets = list(packed.view(tile_rows, blocks, ROWS, fmt.bits).unbind(-1))
    else:
        octets = list(packed[..., : 2 * ROWS].reshape(tile_rows, blocks, ROWS, -1).unbind(-1))
        if fmt.two_stages:
            octets += packed[..., 2 * ROWS :].reshape(tile_rows, blocks, ROWS, -1).unbind(-1)
    codes = octets[0].long()
    for i, octet in enumerate(octets[1:], 1):
        codes |= octet.long() << 8 * i
    return codes.mT.reshape(tile_rows * ROWS, blocks)


def decode(packed: Tensor, record: LatticeRecord, shape: tuple[int, int]) -> Tensor:
    """The transformed matrix that tiles stand for: [N, K] fp32."""
    n, k = shape
    codes = unpack(packed, record.format)[:n]
    return points(codes, record.format, record.ratio).mul_(record.scale).reshape(n, k)
