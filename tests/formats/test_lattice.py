import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.golden import make, make_lattice
from support.oracle_lattice import e8_codebook, padding, source, tile
from support.paths import ROOT
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.formats import lattice
from trilobite.formats.lattice import (
    RHO,
    LatticeRecord,
    decode_e8p,
    nearest,
    pack,
    points,
    read_record,
    unpack,
)
from trilobite.formats.weight import PackedWeight, check, dequantize, stored_shapes
from trilobite.recipe import LatticeFormat, parse_format

CPU = torch.device("cpu")
GOLDEN = json.loads((ROOT / "tests/support/golden" / "v1-lattice.json").read_text())
FORMATS = [parse_format(f"{c}-{b}") for c, all_bits in (("e8p", "1234"), ("grid", "234")) for b in all_bits]
HALF, THREE = 0.5, 1.5


def gauss(m: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(m, 8, generator=torch.Generator().manual_seed(seed)) * scale


def test_the_worked_example_of_the_paper() -> None:
    """Section C.2, which lets entry 21 be (1/2, 1/2, 1/2, 3/2, 1/2, 1/2, 1/2, 1/2).

    The paper's last line prints -3/4 for lane 1, which its line before has as -1/2: -1/2 + 1/4 is -1/4, and with -3/4
    the vector would not be in E8 + 1/4, as the paper says it is.
    """
    patterns = lattice.source_patterns().clone()
    patterns[21] = torch.tensor([1, 1, 1, 3, 1, 1, 1, 1])
    found = decode_e8p(torch.tensor(0b0001010110010111), patterns)
    assert found.tolist() == [-1 / 4, -1 / 4, 3 / 4, 7 / 4, -1 / 4, 3 / 4, -1 / 4, -1 / 4]


def test_source_table() -> None:
    s = lattice.source_patterns().double() / 2
    norms = s.square().sum(-1)
    assert (int((norms <= 10).sum()), int((norms == 12).sum()), len(s)) == (227, 29, 256)
    assert len(torch.unique(s, dim=0)) == 256
    assert torch.equal(s, torch.tensor(source(), dtype=torch.float64))
    assert torch.equal(s[227:], torch.tensor(padding(), dtype=torch.float64))
    assert lattice.source_patterns().max() < 16  # a nibble a lane: 1 KiB


def in_e8(x: Tensor) -> Tensor:
    """Whether vectors are all integers or all halves, with an even sum."""
    integers, halves = (x == x.round()).all(-1), (x + 0.5 == (x + 0.5).round()).all(-1)
    return (integers | halves) & (x.sum(-1) % 2 == 0)


def test_e8p_is_65536_points_of_the_shifted_lattice() -> None:
    p = lattice.e8p_points(CPU)
    assert len(torch.unique(p, dim=0)) == 1 << 16
    assert bool(in_e8(p - 0.25).all())
    assert not bool(in_e8(p).any())


def test_one_bit_codebook() -> None:
    """Section 4.3: the elements of E8 of norm at most 2, and 15 of norm 4."""
    p = lattice.e8_points(CPU)
    assert bool(in_e8(p).all())
    assert p.square().sum(-1).unique(return_counts=True)[1].tolist() == [1, 240, 15]
    assert torch.equal(p, torch.tensor(e8_codebook()))


def brute_force(x: Tensor, table: Tensor) -> Tensor:
    return torch.cdist(x.double(), table.double()).amin(-1)


def distance(x: Tensor, found: Tensor) -> Tensor:
    return (x.double() - found.double()).norm(dim=-1)


@pytest.mark.parametrize("scale", [0.1, 0.5, 1.0, 1.5, 3.0])
def test_nearest_e8p_is_exact(scale: float) -> None:
    """Against all 2**16 points."""
    x = gauss(600, scale)
    codes = lattice.nearest_e8p(x)
    assert torch.allclose(
        distance(x, lattice.e8p_points(CPU)[codes]), brute_force(x, lattice.e8p_points(CPU)), atol=1e-5
    )


@given(
    st.lists(
        st.sampled_from([-2.75, -1.5, -0.75, -0.25, 0.0, 0.25, 0.5, 1.25, 2.0, 40.0]), min_size=8, max_size=8
    )
)
@settings(max_examples=60, deadline=None)
def test_nearest_e8p_is_exact_at_ties_and_far_away(lanes: list[float]) -> None:
    x = torch.tensor([lanes])
    found = lattice.e8p_points(CPU)[lattice.nearest_e8p(x)]
    assert torch.allclose(distance(x, found), brute_force(x, lattice.e8p_points(CPU)), rtol=1e-5, atol=1e-5)


def test_points_are_their_own_nearest() -> None:
    p = lattice.e8p_points(CPU)
    assert torch.equal(lattice.nearest_e8p(p), torch.arange(1 << 16))
    assert torch.equal(lattice.nearest_e8(lattice.e8_points(CPU)), torch.arange(256))


def test_nearest_e8_and_grid_are_exact() -> None:
    x = gauss(500, 1.2)
    small = lattice.e8_points(CPU)
    assert torch.allclose(distance(x, small[lattice.nearest_e8(x)]), brute_force(x, small), atol=1e-5)
    for bits in (2, 3, 4):
        levels = torch.arange(2**bits) - (2**bits - 1) / 2
        _, found = nearest(x * 2, LatticeFormat(codebook="grid", bits=bits), 1.0)
        expected = levels[(x[..., None] * 2 - levels).abs().argmin(-1)]
        assert torch.equal((x * 2 - found).abs(), (x * 2 - expected).abs())


def test_many_vectors_are_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = gauss(1000)
    whole = lattice.nearest_e8p(x), lattice.nearest_e8(x)
    monkeypatch.setattr(lattice, "CHUNK", 64)
    assert torch.equal(lattice.nearest_e8p(x), whole[0])
    assert torch.equal(lattice.nearest_e8(x), whole[1])


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_codes_decode_to_the_points_that_were_found(fmt: LatticeFormat) -> None:
    codes, found = nearest(gauss(17 * 5), fmt, 2.5)
    assert torch.equal(points(codes, fmt, 2.5), found)
    codes = codes.view(17, 5)
    packed = pack(codes, fmt)
    assert tuple(packed.shape) == lattice.packed_shape(fmt, 17, 40) == (2, 5, 16 * fmt.bits)
    back = unpack(packed, fmt)
    assert torch.equal(back[:17], codes)
    assert not back[17:].any()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_tiles_are_those_of_the_specification(fmt: LatticeFormat) -> None:
    data = torch.randint(
        0, 256, (1, 1, 16 * fmt.bits), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    second = 0.125 if fmt.two_stages else 0.0
    found = lattice.decode(data, LatticeRecord(format=fmt, scale=0.5, second=second), (16, 8))
    assert np.allclose(
        found.numpy(), tile(data[0, 0].numpy(), fmt.codebook, fmt.bits, 0.5, second), atol=1e-6
    )


MSE = {
    "e8p-1": 0.3182,
    "e8p-2": 0.0909,
    "e8p-3": 0.0291,
    "e8p-4": 0.0083,
    "grid-2": 0.1188,
    "grid-3": 0.0374,
    "grid-4": 0.0115,
}
"""On a Gaussian source at the scales of RHO: published for E8P and RVQ3, Max's (1960) for grids, measured for e8p-1."""


@pytest.mark.parametrize("name", MSE)
def test_error_on_a_gaussian_source(name: str) -> None:
    fmt = LatticeFormat.parse(name)
    rho, ratio = RHO[fmt.codebook, fmt.bits]
    x = gauss(40_000)
    _, found = nearest(x * rho, fmt, ratio)
    assert float((found / rho - x).square().mean()) == pytest.approx(MSE[name], rel=0.02)


def test_the_published_scales_are_the_best() -> None:
    """Figure 3: E8P at .9 costs .098."""
    x, e8p = gauss(20_000), LatticeFormat(codebook="e8p", bits=2)
    errors = {}
    for rho in (0.9, 0.98, 1.03, 1.08, 1.2):
        _, found = nearest(x * rho, e8p, 1.0)
        errors[rho] = float((found / rho - x).square().mean())
    assert min(errors, key=errors.__getitem__) == 1.03
    assert errors[0.9] == pytest.approx(0.098, rel=0.02)


@pytest.mark.parametrize(
    "fmt", [replace(f, transform=t) for f in FORMATS for t in ("hadamard", "fourier")], ids=str
)
def test_records_survive(fmt: LatticeFormat) -> None:
    record = LatticeRecord(format=fmt, scale=0.25, second=0.125 if fmt.two_stages else 0.0)
    assert read_record(record.to_tensor()) == record
    assert record.to_tensor().numel() == lattice.RECORD_BYTES


GOOD = LatticeRecord(format=LatticeFormat(codebook="e8p", bits=3), scale=0.25, second=0.125).to_tensor()


@pytest.mark.parametrize(
    ("at", "value"), [(0, 2), (1, 0), (1, 5), (1, 8), (2, 2), (3, 1), (7, 127), (7, 255), (11, 0), (0, 1)]
)
def test_damaged_records_are_refused(at: int, value: int) -> None:
    damaged = GOOD.clone()
    damaged[at] = value
    if at == 11:
        damaged[8:] = 0  # no second scale
    if at == 7:
        damaged[6] = 128  # infinite or NaN
    with pytest.raises(ShapeError):
        read_record(damaged)


@pytest.mark.parametrize("bad", [GOOD[:8], GOOD.float(), GOOD.view(1, 12)], ids=["short", "floats", "matrix"])
def test_what_is_no_record_is_refused(bad: Tensor) -> None:
    with pytest.raises(ShapeError, match="record"):
        read_record(bad)


def golden_weight(case: dict) -> PackedWeight:
    parts = {
        s: torch.from_numpy(make.unpack(case[s])) for s in ("packed", "lattice", "signs_in", "signs_out")
    }
    return PackedWeight(shape=tuple(case["shape"]), **parts)


def test_golden_bytes_are_what_the_specification_says() -> None:
    assert make_lattice.cases() == GOLDEN


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c["format"])
def test_golden_bytes_decode_to_the_golden_values(case: dict) -> None:
    w = golden_weight(case)
    check(w)
    assert w.format == parse_format(case["format"])
    shapes = stored_shapes(w.format, *w.shape, tuned=case["tuned"])
    assert {s: tuple(t.shape) for s, t in w.tensors().items()} == shapes
    values = torch.from_numpy(make.unpack(case["values"]))
    assert torch.allclose(dequantize(w), values, atol=1e-6 * float(values.abs().max()))


@pytest.mark.parametrize("suffix", ["packed", "signs_in", "signs_out"])
@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c["format"])
def test_golden_notices_one_flipped_bit(case: dict, suffix: str) -> None:
    w = golden_weight(case)
    part = getattr(w, suffix).clone()
    part.view(-1)[0] ^= 1 if suffix != "packed" else 128
    if case["tuned"] and suffix != "packed":
        part.view(-1)[1] ^= 128
    values = torch.from_numpy(make.unpack(case["values"]))
    broken = dequantize(replace(w, **{suffix: part}))
    assert not torch.allclose(broken, values, atol=1e-6 * float(values.abs().max()))


WHOLE = golden_weight(GOLDEN[2])
FAULTS = {
    "no record": {"lattice": None},
    "no input signs": {"signs_in": None},
    "no output signs": {"signs_out": None},
    "a tile too few": {"packed": WHOLE.packed[:, :-1]},
    "a band too few": {"packed": WHOLE.packed[:-1]},
    "codes of 2 bits": {"packed": WHOLE.packed[..., :32]},
    "codes as floats": {"packed": WHOLE.packed.float()},
    "signs too short": {"signs_in": WHOLE.signs_in[:-1]},
    "signs as floats": {"signs_out": WHOLE.signs_out.float()},
    "one side tuned": {"signs_in": torch.zeros(80, dtype=torch.uint8)},
    "second-level scales": {"scale": torch.zeros(2, 1, 8, dtype=torch.uint8)},
    "another K": {"shape": (20, 48)},
    "another N": {"shape": (40, 40)},
    "K that is no multiple of 8": {"shape": (20, 42)},
    "U alone": {"lra": torch.zeros(3, 1, 26, dtype=torch.uint8)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parts_that_do_not_fit_are_refused(fault: str) -> None:
    check(WHOLE)
    with pytest.raises(ShapeError) as e:
        check(replace(WHOLE, **FAULTS[fault]), "layers.0.q_proj")
    assert "\n" not in str(e.value)


def test_releases_without_lattice_formats_refuse_the_tiles() -> None:
    """They know neither the record nor its suffix, and groups of 8 columns belong to none of their formats."""
    for case in GOLDEN:
        w = golden_weight(case)
        with pytest.raises(ShapeError, match=r"no known format|does not belong"):
            check(PackedWeight(shape=w.shape, packed=w.packed))
