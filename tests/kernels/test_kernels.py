"""Both operators as PyTorch sees them: registration, fake implementations, torch.compile."""

import pytest
import torch
from support.packing import packed_weight, relative_error, stored_layer

from trilobite.errors import ArchitectureError, ShapeError
from trilobite.kernels import ops, reference
from trilobite.kernels.layer import ExpertsLayer


def _layer() -> ExpertsLayer:
    experts = [
        tuple(packed_weight(*shape, "int3-g32", seed=e) for shape in ((32, 64), (32, 64), (64, 32)))
        for e in range(3)
    ]
    return stored_layer(experts)  # type: ignore[arg-type]


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 64), torch.tensor([[0, 2], [1, 3]]), torch.rand(2, 2)


def _experts_arguments() -> tuple[object, ...]:
    layer = _layer()
    return *_inputs(), layer.slab, layer.table, None, None, 32, "silu"


def test_opcheck_of_linear() -> None:
    w = packed_weight(32, 64, "int3-g32-dq", rank=3)
    arguments = (torch.randn(2, 64), w.packed, w.scale, w.lra, w.lrb, torch.randn(32), 32)
    torch.library.opcheck(torch.ops.trilobite.linear.default, arguments)


def test_opcheck_of_experts() -> None:
    torch.library.opcheck(torch.ops.trilobite.experts.default, _experts_arguments())


def test_compile_without_graph_breaks() -> None:
    w, layer, (x, *routing) = packed_weight(64, 64, "int3-g64"), _layer(), _inputs()

    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(ops.linear(x, w)) + x
        return ops.experts(y, *routing, layer) * 2

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x), run(x)) < 1e-6
    y = torch.relu(reference.linear(x, w)) + x
    assert relative_error(compiled(x), reference.experts(y, *routing, layer) * 2) < 1e-5


def test_fake_shapes() -> None:
    w = packed_weight(50, 64, "int3-g64")
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    y = torch.ops.trilobite.linear(x.to("meta"), w.packed.to("meta"), None, None, None, None, 50)
    assert (y.shape, y.dtype) == ((2, 3, 50), torch.bfloat16)


def test_unknown_activation() -> None:
    *arguments, _ = _experts_arguments()
    with pytest.raises(ArchitectureError, match="no-such-activation"):
        torch.ops.trilobite.experts(*arguments, "no-such-activation")


@pytest.mark.parametrize("activation", ["silu", "mish"], ids=["engine", "reference"])
def test_routing_that_does_not_fit_is_refused(activation: str) -> None:
    """By every backend alike."""
    x, index, weights, *layer, _ = _experts_arguments()
    assert isinstance(index, torch.Tensor)
    assert isinstance(weights, torch.Tensor)
    for wrong, text in (
        ((index[:1], weights[:1]), r"expected \[T, H\], \[T, A\], \[T, A\]"),
        ((index[:, :1], weights), r"expected \[T, H\], \[T, A\], \[T, A\]"),
        ((index[:, 0], weights[:, 0]), r"expected \[T, H\], \[T, A\], \[T, A\]"),
        ((index.float(), weights), "float32, expected int64 or int32"),
    ):
        with pytest.raises(ShapeError, match=text):
            torch.ops.trilobite.experts(x, *wrong, *layer, activation)


def test_tables_that_do_not_fit_are_refused() -> None:
    x, index, weights, slab, table, *rest = _experts_arguments()
    with pytest.raises(ShapeError, match="slab"):
        torch.ops.trilobite.experts(x, index, weights, slab[:64], table, *rest)  # type: ignore[index]
