"""PackedLinear: an nn.Linear made of one packed weight."""

from collections.abc import Callable
from operator import itemgetter

from torch import Tensor, nn

from trilobite.formats.padding import fill_up, whole_blocks
from trilobite.formats.weight import SUFFIXES
from trilobite.kernels import ops
from trilobite.kernels.layer import Pack
from trilobite.runtime.modules.matrix import PackedMatrix
from trilobite.runtime.modules.residence import AsStored, OnGpu, PackedModule, Residence

_parts = itemgetter(*(f"weight_{s}" for s in SUFFIXES))


class PackedLinear(PackedModule, PackedMatrix, nn.Linear):
    """nn.Linear on a packed weight: one for those who look for such layers, as PEFT's adapters do; `weight` is None.

    forward: x [..., K] -> [..., N] in x.dtype
    """

    residence: "Residence[PackedLinear]"
    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(self, shape: tuple[int, int], parts: dict[str, Tensor], bias: nn.Parameter | None) -> None:
        """bias: [N], taken over from the linear layer that this replaces."""
        rows, columns = shape
        super().__init__((rows, columns if "lattice" in parts else whole_blocks(columns)), parts)
        self.out_features, self.in_features = shape
        self.register_parameter("bias", bias)
        self.register_parameter("weight", None)  # some models ask for its dtype when it is a tensor
        self.residence = self.as_stored()

    def forward(self, x: Tensor) -> Tensor:
        """y = x W^T + bias."""
        if self.shape[1] != self.in_features:
            x = fill_up(x, self.shape[1])
        return self.residence.run(self, x)

    @property
    def qweight(self) -> Tensor:
        """The codes, wherever they are: PEFT puts an adapter beside them."""
        if isinstance(self.residence, OnGpu):
            return self.residence.pack.slab
        return self.get_buffer("weight_packed")

    def matrices(self) -> list[list[PackedMatrix | None]]:
        """Itself."""
        return [[self]]

    def as_stored(self) -> "Residence[PackedLinear]":
        """Nothing to make ready."""
        return _LinearAsStored()

    def on_gpu(self, pack: Pack, restorable: bool) -> "Residence[PackedLinear]":
        """One matrix."""
        return _LinearOnGpu(pack, restorable)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        if isinstance(self.residence, OnGpu):
            return f"{self.in_features}, {self.out_features}, GPU layout {self.residence.pack.codings[0][0]}"
        w = self.packed()
        return f"{self.in_features}, {self.out_features}, {w.format}, rank={w.rank}"


class _LinearAsStored(AsStored[PackedLinear]):
    def tensors(self, module: PackedLinear) -> tuple[Tensor | None, ...]:
        return (*_parts(module._buffers), module._parameters["bias"])

    def bind(self, module: PackedLinear) -> Callable[..., Tensor] | None:
        return ops.bind_linear(module.packed(), module.bias, module.settings)

    def operate(self, module: PackedLinear, *inputs: Tensor) -> Tensor:
        return ops.linear(inputs[0], module.packed(), module.bias, module.settings)

    def moved(self, module: PackedLinear, fn: Callable[[Tensor], Tensor]) -> "Residence[PackedLinear]":
        return module.as_stored()


class _LinearOnGpu(OnGpu[PackedLinear]):
    def run(self, module: PackedLinear, *inputs: Tensor) -> Tensor:
        return ops.linear_gpu(inputs[0], self.pack, module.bias)
