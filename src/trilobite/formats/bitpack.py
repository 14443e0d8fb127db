"""Zero-waste packing of 2-, 3-, 4- and 8-bit codes: the tile layout and the plain bit stream.

A *block* is 16 rows x 32 columns and takes exactly `bits * 64` bytes. It is cut into `bits` planes of 64 bytes; byte
`4*r + c` of a plane belongs to row `r` (0..15) and to a column `k` with `k % 4 == c`. Columns come in eight *steps* of
four: step `s` holds columns `4*s .. 4*s+3`. A 512-bit register that loads one plane therefore holds 16 dword lanes,
one row each, and a shift and a mask turn it into the 16x4 codes of one step.

    bits   plane p, bit position -> step
    8      plane s = step s
    4      low nibble of plane p = step 2p, high nibble = step 2p+1
    2      bits 2i, 2i+1 of plane p = step 4p+i
    3      bits 0-2 of plane p = step 2p, bits 3-5 = step 2p+1 (p = 0, 1, 2);
           step 6: low two bits in bits 6-7 of plane 0, high bit in bit 6 of plane 2;
           step 7: low two bits in bits 6-7 of plane 1, high bit in bit 7 of plane 2

docs/format.md draws this; tests/golden holds bytes that every backend must decode to the same values.
"""

import torch
from torch import Tensor

from trilobite.errors import ShapeError

ROWS = 16
"""Rows of a tile."""
BLOCK = 32
"""Columns of a block: the smallest multiple of columns that packs without waste at every bit width."""
BITS = (2, 3, 4, 8)


def block_bytes(bits: int) -> int:
    """Bytes of one block of 16 x 32 codes."""
    return bits * 64


def pack_blocks(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into blocks.

    codes: [16*B, 32*C] uint8, each below 2**bits    returns: [B, C, bits*64] uint8
    Raises ShapeError when the dimensions are no multiples of 16 and 32.
    """
    n, k = codes.shape
    if n % ROWS or k % BLOCK:
        raise ShapeError(f"pack: codes are [{n}, {k}]; rows must be a multiple of {ROWS}, columns of {BLOCK}")
    # [B, 16 rows, C, 8 steps, 4] -> [B, C, 8 steps, 64 bytes]
    s = (
        codes.view(n // ROWS, ROWS, k // BLOCK, 8, 4)
        .permute(0, 2, 3, 1, 4)
        .reshape(n // ROWS, k // BLOCK, 8, 64)
    )
    if bits == 8:
        planes = s
    elif bits == 4:
        planes = s[:, :, 0::2] | (s[:, :, 1::2] << 4)
    elif bits == 2:
        planes = s[:, :, 0::4] | (s[:, :, 1::4] << 2) | (s[:, :, 2::4] << 4) | (s[:, :, 3::4] << 6)
    elif bits == 3:
        planes = s[:, :, 0:6:2] | (s[:, :, 1:6:2] << 3)
        six, seven = s[:, :, 6], s[:, :, 7]
        planes[:, :, 0] |= six << 6  # uint8: the high bit falls off, as wanted
        planes[:, :, 1] |= seven << 6
        planes[:, :, 2] |= ((six >> 2) << 6) | ((seven >> 2) << 7)
    else:
        raise ShapeError(f"pack: {bits} bits; supported are {BITS}")
    return planes.reshape(n // ROWS, k // BLOCK, block_bytes(bits))


def unpack_blocks(blocks: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_blocks`.

    blocks: [B, C, bits*64] uint8    returns: [16*B, 32*C] uint8
    """
    b, c, _ = blocks.shape
    p = blocks.reshape(b, c, bits, 64)
    if bits == 8:
        s = p
    elif bits == 4:
        s = torch.stack((p & 15, p >> 4), 3)
    elif bits == 2:
        s = torch.stack((p & 3, (p >> 2) & 3, (p >> 4) & 3, p >> 6), 3)
    elif bits == 3:
        low = torch.stack((p & 7, (p >> 3) & 7), 3).reshape(b, c, 6, 64)
        six = (p[:, :, 0] >> 6) | ((p[:, :, 2] >> 4) & 4)
        seven = (p[:, :, 1] >> 6) | ((p[:, :, 2] >> 5) & 4)
        s = torch.cat((low, six[:, :, None], seven[:, :, None]), 2)
    else:
        raise ShapeError(f"unpack: {bits} bits; supported are {BITS}")
    return s.reshape(b, c, 8, ROWS, 4).permute(0, 3, 1, 2, 4).reshape(b * ROWS, c * BLOCK)


def pack_stream(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into a little-endian bit stream: code `i` takes bits `i*bits .. i*bits+bits-1`.

    codes: [..., 8*M] uint8, each below 2**bits    returns: [..., M*bits] uint8
    """
    if bits == 8:
        return codes.clone()
    octets = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8).to(torch.int64)
    word = (octets << (bits * torch.arange(8, device=codes.device))).sum(-1)
    return torch.stack([(word >> (8 * i)) & 255 for i in range(bits)], -1).to(torch.uint8).flatten(-2)


def unpack_stream(stream: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_stream`.

    stream: [..., M*bits] uint8    returns: [..., 8*M] uint8
    """
    if bits == 8:
        return stream.clone()
    octets = stream.reshape(*stream.shape[:-1], stream.shape[-1] // bits, bits).to(torch.int64)
    word = (octets << (8 * torch.arange(bits, device=stream.device))).sum(-1)
    shifts = bits * torch.arange(8, device=stream.device)
    codes: Tensor = (word[..., None] >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)
