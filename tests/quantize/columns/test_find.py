import torch
from torch import Tensor

from trilobite.quantize.columns.find import GROUP, even_columns


def matrix(n: int = 96, k: int = 192, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def test_planted_columns_are_found() -> None:
    """Columns of very different sizes, rows in groups too: what is left is the noise of 192 samples."""
    generator = torch.Generator().manual_seed(1)
    columns = torch.exp2(torch.randint(-3, 4, (192,), generator=generator).float())
    rows = torch.exp2(torch.randint(-3, 4, (96, 192 // GROUP, 1), generator=generator).float())
    first = (matrix().view(96, -1, GROUP) * rows).view(96, 192) * columns
    found = even_columns([first, 5 * matrix(seed=2) * columns])
    ratio = found / columns
    assert float((ratio / ratio.log().mean().exp()).log().abs().max()) < 0.25


def test_even_columns_stay() -> None:
    found = even_columns([torch.ones(32, 64)])
    assert torch.allclose(found, torch.ones(64))


def test_dead_columns_and_rows_do_no_harm() -> None:
    w = matrix()
    w[:, 7], w[3], w[:, 64:128] = 0, 0, 0
    found = even_columns([w])
    assert bool(torch.isfinite(found).all())
    assert bool((found > 0).all())


def test_a_width_that_groups_do_not_divide() -> None:
    assert even_columns([matrix(k=96)]).shape == (96,)
