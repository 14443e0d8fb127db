import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle
from support.golden import make
from support.paths import ROOT

from trilobite.errors import ShapeError
from trilobite.formats import affine
from trilobite.formats.bitpack import (
    BITS,
    block_bytes,
    pack_blocks,
    pack_stream,
    unpack_blocks,
    unpack_stream,
)
from trilobite.formats.weight import PackedWeight, check, decode_factor, dequantize, encode_factor
from trilobite.recipe import Format

GOLDEN = json.loads((ROOT / "tests/support/golden" / "v1.json").read_text())
MATRICES = [c for c in GOLDEN if "format" in c]
FACTORS = [c for c in GOLDEN if "compensator" in c]


def random_codes(bits: int, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.int64).to(torch.uint8)


@given(st.sampled_from(BITS), st.integers(1, 4), st.integers(1, 5), st.integers(0, 10**6))
@settings(deadline=None)
def test_blocks_round_trip(bits: int, bands: int, blocks: int, seed: int) -> None:
    codes = random_codes(bits, 16 * bands, 32 * blocks, seed=seed)
    packed = pack_blocks(codes, bits)
    assert packed.shape == (bands, blocks, bits * 64)
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack_blocks(packed, bits), codes)


@pytest.mark.parametrize("bits", BITS)
def test_blocks_waste_no_bit(bits: int) -> None:
    assert block_bytes(bits) * 8 == bits * 16 * 32
    packed = pack_blocks(torch.full((16, 32), 2**bits - 1, dtype=torch.uint8), bits)
    assert (packed == 255).all()


@pytest.mark.parametrize("bits", BITS)
def test_every_bit_lies_where_the_layout_says(bits: int) -> None:
    codes = random_codes(bits, 32, 64)
    packed = pack_blocks(codes, bits)
    for band in range(2):
        for block in range(2):
            cut = codes[16 * band : 16 * band + 16, 32 * block : 32 * block + 32].numpy()
            assert np.array_equal(packed[band, block].numpy(), oracle.write_block(cut, bits))
            assert np.array_equal(oracle.read_block(packed[band, block].numpy(), bits), cut)


@pytest.mark.parametrize("bits", BITS)
def test_each_stored_bit_belongs_to_one_bit_of_one_code(bits: int) -> None:
    """A flipped bit is seen, and seen in one place only."""
    packed = pack_blocks(random_codes(bits, 16, 32), bits)
    codes = unpack_blocks(packed, bits)
    seen = set()
    for byte in range(block_bytes(bits)):
        for bit in range(8):
            broken = packed.clone()
            broken[0, 0, byte] ^= 1 << bit
            changed = (unpack_blocks(broken, bits) ^ codes).nonzero()
            assert len(changed) == 1
            r, k = changed[0].tolist()
            seen.add((r, k, int(unpack_blocks(broken, bits)[r, k] ^ codes[r, k])))
    assert len(seen) == 16 * 32 * bits


@pytest.mark.parametrize("bits", BITS)
def test_unpack_accepts_views(bits: int) -> None:
    """Codes are unpacked from tiles, where metadata lies between them: not contiguous."""
    packed = pack_blocks(random_codes(bits, 16, 64), bits)
    wide = torch.cat((packed, torch.full((1, 2, 64), 77, dtype=torch.uint8)), -1)
    assert torch.equal(unpack_blocks(wide[..., : bits * 64], bits), unpack_blocks(packed, bits))


@pytest.mark.parametrize(("n", "k"), [(15, 32), (17, 32), (16, 31), (16, 33), (1, 1)])
def test_blocks_refuse_other_shapes(n: int, k: int) -> None:
    with pytest.raises(ShapeError, match=rf"\[{n}, {k}\]"):
        pack_blocks(torch.zeros(n, k, dtype=torch.uint8), 3)


@pytest.mark.parametrize("bits", [1, 5, 16])
def test_blocks_refuse_other_widths(bits: int) -> None:
    with pytest.raises(ShapeError, match=f"{bits} bits"):
        pack_blocks(torch.zeros(16, 32, dtype=torch.uint8), bits)
    with pytest.raises(ShapeError, match=f"{bits} bits"):
        unpack_blocks(torch.zeros(1, 1, bits * 64, dtype=torch.uint8), bits)


@given(st.sampled_from((2, 3, 4, 8)), st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6))
@settings(deadline=None)
def test_stream_round_trip(bits: int, rows: int, octets: int, seed: int) -> None:
    codes = random_codes(bits, rows, 8 * octets, seed=seed)
    stream = pack_stream(codes, bits)
    assert stream.shape == (rows, octets * bits)
    assert torch.equal(unpack_stream(stream, bits), codes)
    for r in range(rows):
        assert np.array_equal(stream[r].numpy(), oracle.write_stream(codes[r].tolist(), bits))
        assert oracle.read_stream(stream[r].numpy(), bits, 8 * octets) == codes[r].tolist()


def tensor(row: dict) -> torch.Tensor:
    return torch.from_numpy(make.unpack(row))


def golden_weight(case: dict) -> PackedWeight:
    scale = tensor(case["scale"]) if "scale" in case else None
    n, k = case["shape"]
    return PackedWeight(shape=(n, k), packed=tensor(case["packed"]), scale=scale)


def test_golden_bytes_are_what_the_specification_says() -> None:
    for made, stored in zip(make.cases(), GOLDEN, strict=True):
        assert made.keys() == stored.keys()
        for key, value in stored.items():
            # Not the texts: another release of zlib may compress otherwise.
            same = (
                np.array_equal(make.unpack(made[key]), make.unpack(value))
                if isinstance(value, dict)
                else made[key] == value
            )
            assert same, (stored.get("format"), key)


def test_golden_cases_cover_the_format() -> None:
    formats = {Format.parse(c["format"]) for c in MATRICES}
    assert {(f.bits, f.symmetric, f.double_quant) for f in formats} == {
        (b, s, d) for b in BITS for s in (False, True) for d in (False, True)
    }
    assert {c["compensator"] for c in FACTORS} == {"int3", "int8", "fp16"}


@pytest.mark.parametrize("case", MATRICES, ids=lambda c: f"{c['format']}-{c['shape']}")
def test_golden_bytes_decode_to_the_golden_values(case: dict) -> None:
    w = golden_weight(case)
    check(w)
    assert w.format == Format.parse(case["format"])
    assert torch.equal(dequantize(w), tensor(case["values"]))


@pytest.mark.parametrize("case", MATRICES, ids=lambda c: f"{c['format']}-{c['shape']}")
def test_golden_values_encode_to_the_golden_bytes(case: dict) -> None:
    fmt, packed = Format.parse(case["format"]), tensor(case["packed"])
    meta = packed[..., fmt.group * 2 * fmt.bits :]
    nothing = torch.empty(0)
    grid = affine.Grid(scale=nothing, offset=nothing, stored=meta, super=None)
    assert torch.equal(affine.encode(tensor(case["codes"]), grid, fmt), packed)


@pytest.mark.parametrize("case", MATRICES, ids=lambda c: f"{c['format']}-{c['shape']}")
def test_golden_notices_one_flipped_bit(case: dict) -> None:
    w = golden_weight(case)
    w.packed[0, 0, 5] ^= 4
    assert not torch.equal(dequantize(w), tensor(case["values"]))


@pytest.mark.parametrize("case", FACTORS, ids=lambda c: c["compensator"])
def test_golden_factors_decode_and_encode(case: dict) -> None:
    stored, values = tensor(case["factor"]), tensor(case["values"])
    assert torch.equal(decode_factor(stored, case["length"]), values)
    if case["compensator"] == "fp16":
        assert torch.equal(encode_factor(values, values[:, :0], "fp16"), stored)
        return
    scale = stored[..., -2:].contiguous().view(torch.float16)[..., 0].float()
    again = encode_factor(values, scale, case["compensator"])
    # Padding is stored as zero values; the golden bytes have arbitrary codes there.
    assert torch.equal(again[:, 0], stored[:, 0])
    assert torch.equal(decode_factor(again, case["length"]), values)
