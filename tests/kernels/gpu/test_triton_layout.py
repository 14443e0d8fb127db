"""The GPU layout against the stored tiles: the same weights bit for bit, and nothing wasted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packing import packed_weight

from trilobite.errors import ShapeError
from trilobite.formats import affine
from trilobite.formats.weight import PackedWeight, decode_factor
from trilobite.kernels.gpu.layout import pack as triton_layout
from trilobite.kernels.gpu.layout.pack import repack, restore
from trilobite.kernels.gpu.layout.words import pack_words, unpack_words
from trilobite.kernels.layer import PackColumn, codings_of, spec_of
from trilobite.recipe import Format

FORMATS = [
    *(
        f"int{b}-{g}{s}"
        for b in (2, 3, 4, 8)
        for g in ("g32", "g64", "g128", "channel")
        for s in ("", "-sym")
    ),
    *(f"int{b}-g16{s}" for b in (2, 4, 8) for s in ("", "-sym")),
]


def column(pair: int, lane: int, half: int) -> int:
    """Which column of a chunk is that, by the definition in docs/gpu.md."""
    i, h = divmod(pair, 2)
    return 16 * i + 8 * h + 2 * lane + half


def code_by_hand(words: torch.Tensor, row: int, k: int, bits: int) -> int:
    """One code out of its words, bit by bit, by the definition: slow, and another way than `unpack_words`."""
    chunk, within = divmod(k, 128)
    pair, lane, half = next(
        (f, t, p) for f in range(16) for t in range(4) for p in range(2) if column(f, t, p) == within
    )
    word = [int(words[chunk, w, row, lane]) & 0xFFFFFFFF for w in range(bits)]
    halves = [(w >> (16 * half)) & 0xFFFF for w in word]
    if bits == 3 and pair == 15:
        return (halves[0] & 1) | (halves[1] & 1) << 1 | (halves[2] & 1) << 2
    each, low = (5, 1) if bits == 3 else (16 // bits, 0)
    return (halves[pair // each] >> (low + bits * (pair % each))) & (2**bits - 1)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_code_lies_where_the_specification_says(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 160), dtype=torch.uint8)
    words = pack_words(codes, bits)
    assert words.shape == (2, bits, 3, 4)
    assert [[code_by_hand(words, r, k, bits) for k in range(160)] for r in range(3)] == codes.tolist()


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([2, 3, 4, 8, 16]), st.integers(1, 40), st.integers(1, 300))
def test_words_come_back(bits: int, n: int, k: int) -> None:
    dtype = torch.int16 if bits == 16 else torch.uint8
    top = 2**15 if bits == 16 else 2**bits
    codes = torch.randint(-top if bits == 16 else 0, top, (n, k)).to(dtype)
    assert torch.equal(unpack_words(pack_words(codes, bits), k), codes)


@pytest.mark.parametrize("fmt", FORMATS)
def test_decodes_as_the_tiles_do(fmt: str) -> None:
    """From the words and the fp16 scales alone, against affine.decode: equal, not close."""
    w = packed_weight(50, 384, fmt)
    pack = repack([[w]])
    row, (coding,) = pack.table[0, 0].tolist(), pack.codings[0]
    words = pack.slab[row[PackColumn.WORDS] :][: 3 * coding.bits * 50 * 4].view(3, coding.bits, 50, 4)
    codes = unpack_words(words, 384).float()
    group = coding.group or 384
    meta = pack.slab[row[PackColumn.META] :].view(torch.float16)
    scale, offset = torch.empty(50, 384 // group), torch.empty(50, 384 // group)
    for g in range(384 // group):
        if coding.symmetric:
            scale[:, g] = meta[100 * (g // 2) : 100 * (g // 2 + 1)][g % 2 :: 2].float()
            offset[:, g] = -(2.0 ** (coding.bits - 1)) * scale[:, g]
        else:
            scale[:, g], offset[:, g] = meta[100 * g : 100 * g + 100].float().view(50, 2).T
    decoded = codes * scale.repeat_interleave(group, 1) + offset.repeat_interleave(group, 1)
    assert torch.equal(decoded, affine.decode(w.packed, w.scale, w.format, w.shape))


SUPER = ["int2-g16-super", "int3-g16-super", "int3-g32-super", "int4-g32-super"]


@pytest.mark.parametrize("fmt", SUPER)
@pytest.mark.parametrize("k", [32, 96, 160, 384, 544])
def test_bytes_under_super_scales_lie_where_the_specification_says(fmt: str, k: int) -> None:
    w = packed_weight(50, k, fmt)
    assert w.scale is not None
    pack = repack([[w]])
    group, row = pack.codings[0][0].group, pack.table[0, 0].tolist()
    meta = pack.slab[row[PackColumn.META] :]
    tile = 64 if k % 64 == 0 else 32
    stored = w.packed[..., affine.code_bytes(Format.parse(fmt), k) :]
    for n in (0, 17, 49):
        for g in range(k // group):
            word = int(meta[g // 4 * 50 + n])
            by_row = stored[n // 16, g * group // tile].view(16, -1)[n % 16]
            assert word >> 8 * (g % 4) & 255 == int(by_row[g % (tile // group)])
        for d in range(-(-k // 256)):
            word = int(meta[(-(-k // group // 4) + d // 2) * 50 + n]) >> 16 * (d % 2) & 0xFFFF
            assert word == int(w.scale[n // 16, d].view(torch.int16)[n % 16]) & 0xFFFF


@pytest.mark.parametrize("k", [64, 96, 416, 768])
@pytest.mark.parametrize("fmt", SUPER)
def test_tiles_under_super_scales_come_back_bit_for_bit(fmt: str, k: int) -> None:
    w = packed_weight(50, k, fmt, rank=3)
    [[back]] = restore(repack([[w]]))
    assert back is not None
    for name, tensor in w.tensors().items():
        assert torch.equal(back.tensors()[name], tensor), name


@pytest.mark.parametrize("fmt", ["int3-g64", "int2-g32-sym", "int8-channel-sym", "int4-g128"])
@pytest.mark.parametrize(("rank", "kind"), [(0, "int3"), (5, "int3"), (3, "int8"), (2, "fp16")])
def test_tiles_come_back_bit_for_bit(fmt: str, rank: int, kind: str) -> None:
    w = packed_weight(50, 384, fmt, rank=rank, kind=kind)
    [[back]] = restore(repack([[w]]))
    assert back is not None
    assert back.tensors().keys() == w.tensors().keys()
    for name, tensor in w.tensors().items():
        assert torch.equal(back.tensors()[name], tensor), name


def test_a_flipped_bit_is_noticed() -> None:
    w = packed_weight(16, 128, "int3-g64")
    pack = repack([[w]])
    pack.slab[7] ^= 1 << 20
    [[back]] = restore(pack)
    assert back is not None
    assert not torch.equal(back.packed, w.packed)


def test_double_quantization_becomes_fp16_scales() -> None:
    w = packed_weight(48, 256, "int3-g64-dq")
    [[back]] = restore(repack([[w]]))
    assert back is not None
    exact = affine.decode(w.packed, w.scale, w.format, w.shape)
    found = affine.decode(back.packed, None, back.format, back.shape)
    # One rounding of scale and offset each to 11 bits; codes reach 7.
    assert (found - exact).abs().max() <= 2**-11 * (7 + 7) * exact.abs().max() / 3.5
    assert not torch.equal(found, exact)


def test_no_byte_is_wasted() -> None:
    w = packed_weight(128, 512, "int3-g64", rank=64)
    assert w.lra is not None
    assert w.lrb is not None
    wider = 128 * 64 // 8  # codes of U take 4 bits instead of 3
    assert triton_layout.arrange([[w]])[2] * 4 == w.nbytes() + wider
    assert repack([[w]]).slab.nbytes == w.nbytes() + wider
    for fmt in ("int3-g64", "int3-g16-super"):
        plain = packed_weight(128, 512, fmt)
        assert repack([[plain]]).slab.nbytes == plain.nbytes()


def test_experts_of_different_formats_form_classes() -> None:
    rows = [
        [packed_weight(32, 64, f, rank=r), packed_weight(32, 64, f, rank=r), packed_weight(64, 32, f)]
        for f, r in (("int3-g32", 0), ("int4-g32", 2), ("int3-g32", 0), ("int4-g32", 7))
    ]
    pack = repack(rows)
    assert [c[0].bits for c in pack.codings] == [3, 4]
    assert pack.codings[1][0].rank == 7
    assert pack.table[:, 0, PackColumn.CLASS].tolist() == [0, 1, 0, 1]
    assert pack.table[:, 0, PackColumn.RANK].tolist() == [0, 2, 0, 7]
    assert codings_of(tuple(spec_of(pack.codings)), 3) == pack.codings
    back = restore(pack)
    assert all(
        torch.equal(a.packed, b.packed)
        for old, new in zip(rows, back, strict=True)
        for a, b in zip(old, new, strict=True)
        if b is not None
    )


def test_groups_that_no_kernel_knows_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"groups of 96 columns.*--group-size 64"):
        repack([[packed_weight(16, 192, "int3-g96")]])
    triton_layout.check_format(Format(bits=3, group=96), (16, 96))  # one group a row is any number of columns


def test_factors_decode_alike() -> None:
    w = packed_weight(70, 192, "int3-g64", rank=3)
    [[back]] = restore(repack([[w]]))
    assert isinstance(back, PackedWeight)
    assert back.lra is not None
    assert w.lra is not None
    assert torch.equal(decode_factor(back.lra, 70), decode_factor(w.lra, 70))
