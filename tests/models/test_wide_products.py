import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trilobite.models.wide_products import CHUNK, FEW, WideProducts, wide_products

HALVES = (torch.bfloat16, torch.float16)


def near(found: Tensor, exact: Tensor) -> None:
    """Each entry is the exact one rounded, up or down by one place where fp32 sums decide."""
    assert found.dtype in HALVES
    assert found.shape == exact.shape
    step = torch.finfo(found.dtype).eps
    assert ((found.double() - exact).abs() <= step * exact.abs() * 0.5001 + 1e-5).all()


@pytest.fixture(params=HALVES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).to(dtype)


@pytest.mark.parametrize("rows", [0, 1, FEW, FEW + 1, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype: torch.dtype, rows: int, bias: bool) -> None:
    """In chunks of rows of the weight, the last of which is smaller."""
    k = CHUNK // 64
    x, w = normal(rows, k, dtype=dtype), normal(70, k, dtype=dtype) / 64
    b = normal(70, dtype=dtype) if bias else None
    with WideProducts(dtype):
        found = F.linear(x, w, b)
    exact = x.double() @ w.double().T
    near(found, exact if b is None else exact + b.double())


def test_leading_dimensions(dtype: torch.dtype) -> None:
    x, w = normal(2, 31, 24, dtype=dtype), normal(40, 24, dtype=dtype)
    with WideProducts(dtype):
        near(F.linear(x, w), x.double() @ w.double().T)
        near(x @ w.T, x.double() @ w.double().T)


@pytest.mark.parametrize("rows", [3, 40])
def test_batches(dtype: torch.dtype, rows: int) -> None:
    x, w = normal(3, rows, 16, dtype=dtype), normal(3, 16, 20, dtype=dtype)
    with WideProducts(dtype):
        near(x @ w, x.double() @ w.double())


def test_groups() -> None:
    """One has no rows, one few, one many."""
    x, w = normal(60, 16, dtype=torch.bfloat16), normal(4, 24, 16, dtype=torch.bfloat16)
    offs = torch.tensor([5, 5, 50, 60], dtype=torch.int32)
    with WideProducts(torch.bfloat16):
        found = F.grouped_mm(x, w.mT, offs=offs)
    first = 0
    for of_group, last in zip(w, offs.tolist(), strict=True):
        near(found[first:last], x[first:last].double() @ of_group.double().T)
        first = last


def test_other_dtypes_are_left_alone() -> None:
    x, w = torch.randn(40, 16), torch.randn(20, 16)
    with WideProducts(torch.bfloat16):
        assert torch.equal(F.linear(x, w), x @ w.T)


def test_only_where_torch_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for fast in (True, False):
        monkeypatch.setattr("trilobite.models.wide_products._fast", lambda _, fast=fast: fast)
        with wide_products(torch.bfloat16, cpu) as mode:
            assert isinstance(mode, WideProducts) is not fast
    with wide_products(torch.bfloat16, torch.device("meta")) as mode:
        assert mode is None


def test_a_torch_without_onednn_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    with wide_products(torch.bfloat16, torch.device("cpu")) as mode:
        assert isinstance(mode, WideProducts)


def test_fp32_is_fast() -> None:
    with wide_products(torch.float32, torch.device("cpu")) as mode:
        assert mode is None


def test_gradients() -> None:
    """The mode is below autograd: products of the backward pass are wide, too."""
    layer = nn.Linear(24, 40, dtype=torch.bfloat16)
    x = normal(50, 24, dtype=torch.bfloat16)
    with WideProducts(torch.bfloat16):
        layer(x).sum().backward()
    assert layer.weight.grad is not None
    near(layer.weight.grad, x.double().sum(0).expand(40, 24))
