"""PackedMatrix holds one packed weight as buffers; PackedLinear is the nn.Linear made of it."""

import torch
from torch import Tensor, nn

from trilobite.errors import CheckpointError
from trilobite.formats.weight import SUFFIXES, PackedWeight, check
from trilobite.kernels import ops


class PackedMatrix(nn.Module):
    """One packed weight [N, K]: buffers `weight_packed`, `weight_scale`, `weight_lra`, `weight_lrb` as stored.

    Buffers, not parameters: transformers takes a model's dtype from its first parameter, and ours are bytes.
    """

    def __init__(self, shape: tuple[int, int], parts: dict[str, Tensor]) -> None:
        """parts: the tensors by suffix (`packed`, ...), on the meta device before loading."""
        super().__init__()
        self.shape = shape
        for suffix in SUFFIXES:
            self.register_buffer(f"weight_{suffix}", parts.get(suffix))

    def packed(self) -> PackedWeight:
        """The packed weight, as views of the buffers."""
        parts = {s: getattr(self, f"weight_{s}") for s in SUFFIXES}
        return PackedWeight(shape=self.shape, **parts)

    def replace(self, w: PackedWeight) -> None:
        """Put other tensors in the place of the buffers."""
        for suffix in SUFFIXES:
            setattr(self, f"weight_{suffix}", getattr(w, suffix))


class PackedLinear(PackedMatrix):
    """nn.Linear on a packed weight.

    forward: x [..., K] -> [..., N] in x.dtype
    """

    def __init__(self, shape: tuple[int, int], parts: dict[str, Tensor], bias: nn.Parameter | None) -> None:
        """bias: [N], taken over from the linear layer that this replaces."""
        super().__init__(shape, parts)
        self.out_features, self.in_features = shape
        self.bias = bias
        self.register_parameter("weight", None)  # some models ask for its dtype when it is a tensor
        self._bound: tuple[Tensor, Tensor | None, ops.BoundLinear | None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """y = x W^T + bias."""
        if type(x) is Tensor and x.is_cpu and not torch.compiler.is_compiling():
            call = self._call()
            if call is not None:
                return call(x)
        return ops.linear(x, self.packed(), self.bias)

    def _call(self) -> "ops.BoundLinear | None":
        """The call bound to the tensors that are in place now."""
        packed, bias = self._buffers["weight_packed"], self.bias
        bound = self._bound
        if bound is None or bound[0] is not packed or bound[1] is not bias:
            assert packed is not None
            bound = self._bound = (packed, bias, ops.bind_linear(self.packed(), bias))
        return bound[2]

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        w = self.packed()
        return f"{self.in_features}, {self.out_features}, {w.format}, rank={w.rank}"


def check_loaded(matrix: PackedMatrix, name: str) -> None:
    """Raise CheckpointError when a buffer was not loaded, ShapeError when the parts do not fit together."""
    for suffix in SUFFIXES:
        part = getattr(matrix, f"weight_{suffix}")
        if part is not None and part.device == torch.device("meta"):
            raise CheckpointError(f"{name}.weight_{suffix} is missing from the checkpoint; copy it again")
    check(matrix.packed(), name)
