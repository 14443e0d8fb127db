"""Routers of models are multiplied by natively for few tokens, whatever their code looks like."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint
from torch import nn
from torch.nn.functional import linear

from trilobite.kernels import ops
from trilobite.kernels.cpu import dense
from trilobite.kernels.cpu.dense import MOST_TOKENS
from trilobite.runtime.load import load
from trilobite.runtime.modules.router import RouterWeight

pytestmark = pytest.mark.skipif(
    not ops.attends(torch.zeros(1, 16)), reason="the native library is not installed"
)


def test_linear_with_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """One or few tokens natively; more where torch has no tiles; gradients and other operators as of any parameter."""
    plain = torch.randn(8, 2048).bfloat16()
    w, x = RouterWeight(plain), torch.randn(1, 2048).bfloat16()
    few, many = (torch.randn(tokens, 2048).bfloat16() for tokens in (MOST_TOKENS, MOST_TOKENS + 1))
    bias = torch.randn(8).bfloat16()
    with torch.inference_mode():
        made = linear(x, w)
        assert type(made) is torch.Tensor
        assert torch.equal(made, ops.dense_linear(x, plain))
        assert torch.equal(linear(x, weight=w, bias=bias), ops.dense_linear(x, plain, bias))
        assert torch.equal(linear(few, w), ops.dense_linear(few, plain))
        monkeypatch.setattr(dense, "TILES", True)
        assert torch.equal(linear(many, w), linear(many, plain))
        monkeypatch.setattr(dense, "TILES", False)
        assert torch.equal(linear(many, w), ops.dense_linear(many, plain))
        assert torch.equal(linear(many, w)[:8], linear(many[:8], w))
        for converted in (w.float(), w.type(torch.float32), w.to(torch.float32)):
            assert torch.equal(linear(x.float(), converted), ops.dense_linear(x.float(), plain.float()))
            assert type(converted + 1) is torch.Tensor
        assert torch.equal(x @ w.T, x @ plain.T)
    linear(x, w).sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, x.expand(8, -1))


def test_copies_and_pickles() -> None:
    module = nn.Module()
    module.weight = RouterWeight(torch.randn(4, 8), requires_grad=False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other.weight) is RouterWeight
        assert not other.weight.requires_grad
        assert torch.equal(other.weight, module.weight)
        assert other.weight.data_ptr() != module.weight.data_ptr()
    assert type(module.state_dict()["weight"]) is torch.Tensor
    assert type(module.to(torch.bfloat16).weight) is RouterWeight
    assert module.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "layers", "routers"),
    [
        ("mixtral", (0, 1), ["mlp.gate"]),
        ("qwen2_moe", (1,), ["mlp.gate", "mlp.shared_expert_gate"]),
        ("deepseek", (1, 2), ["mlp.gate"]),
    ],
)
def test_routers_of_a_model(kind: str, layers: tuple[int, ...], routers: list[str], tmp_path: Path) -> None:
    """Those parameters, and no others; a model without packed weights has them too."""
    build_checkpoint(kind, tmp_path / kind, dtype=torch.bfloat16)
    model = load(str(tmp_path / kind))
    found = [n for n, p in model.named_parameters() if type(p) is RouterWeight]
    assert set(found) == {f"model.layers.{i}.{name}.weight" for i in layers for name in routers}
    with torch.inference_mode():
        ids = torch.randint(3, 200, (1, 6))
        ours = model(ids).logits
        model.save_pretrained(tmp_path / "saved")
    again = load(str(tmp_path / "saved"))
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, ours)
