"""Codes that benchmarks.quality.grids measures: the best paths of trellises, and grids that round."""

from itertools import product

import torch

from benchmarks.lib.trellis import Code, encode, train, viterbi

RANDOM = torch.Generator().manual_seed(0)


def test_no_row_of_a_trellis_is_nearer() -> None:
    """Of all 4^5 rows of five weights whose windows are of five bits."""
    w, scale = torch.randn(3, 5, generator=RANDOM), torch.rand(3, 5, generator=RANDOM) + 0.5
    h, table = torch.rand(5, generator=RANDOM) + 0.1, torch.randn(32, generator=RANDOM)
    codes = torch.tensor(list(product(range(4), repeat=5)))
    before = torch.nn.functional.pad(codes, (2, 0))
    windows = (before[:, :-2] << 4 | before[:, 1:-1] << 2 | codes) & 31

    def error(of_rows: torch.Tensor) -> torch.Tensor:
        return ((w - scale * table[of_rows]).square() * h).sum(-1)

    least = torch.stack([error(row.expand(3, 5)) for row in windows]).amin(0)
    found = viterbi(w, scale, h, table, 2)
    assert all(any(torch.equal(row, one) for one in windows) for row in found)
    torch.testing.assert_close(error(found), least)


def test_a_grid_of_even_levels_rounds() -> None:
    """Where a scale of 1 is by far the best, codes are those of rounding."""
    code = Code(bits=2, window=2, group=16, tables=torch.tensor([[-1.5, -0.5, 0.5, 1.5]]))
    levels = torch.randint(4, (4, 256), generator=RANDOM)
    w = levels - 1.5 + 0.1 * (torch.rand(4, 256, generator=RANDOM) - 0.5)
    coded = encode(w, code)
    assert torch.equal(coded.index, (w + 1.5).round().long())
    torch.testing.assert_close(coded.decoded(code), levels - 1.5, rtol=0.1, atol=0)
    assert code.size == 2 + 4 / 16 + 16 / 256


def test_training_helps() -> None:
    """Levels that are fitted lose less than those that they began with."""
    sample = torch.randn(16, 64, generator=RANDOM)
    grid = Code(bits=2, window=2, group=16, tables=torch.zeros(1, 4))
    trellis = Code(bits=2, window=6, group=16, shifts=(0, 2), tables=torch.zeros(1, 64))
    errors = {}
    for code in (grid, trellis):
        for rounds in (1, 4):
            trained = train(code, sample, starts=1, rounds=rounds)
            errors[code.window, rounds] = float((encode(sample, trained).decoded(trained) - sample).norm())
    assert errors[6, 4] < errors[6, 1]
    assert errors[2, 4] < errors[2, 1]
