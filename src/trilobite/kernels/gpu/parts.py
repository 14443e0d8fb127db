"""One call of `experts` in several, where not all of its experts are there at a time."""

import torch
from torch import Tensor

from trilobite.kernels.gpu.experts import Launches, check, passes
from trilobite.kernels.gpu.launch import aligned
from trilobite.kernels.layer import ExpertsLayer


class Parts:
    """Each `add` computes some of the experts, `result` sums them up in the order, and with the bits, of one call."""

    def __init__(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: ExpertsLayer) -> None:
        """Arguments as in `experts`. Raises ShapeError, ArchitectureError or DeviceError."""
        check(x, top_k_index, top_k_weights, layer)
        self.x, self.weights = x, top_k_weights
        self.experts = layer.table.shape[0]
        self._launches = Launches(layer)
        self._passes = passes(top_k_index)
        self._products: list[Tensor | None] = [None] * len(self._passes)
        self._done = torch.full_like(top_k_index, self.experts)

    def add(self, index: Tensor) -> None:
        """Compute the experts of `index` [T, A]: those of the call that are there now, E for all others."""
        for i, part in enumerate(self._passes):
            now = index[part].contiguous()
            made = self._launches.products(aligned(self.x[part]), now)
            before = self._products[i]
            if before is not None:
                mine = ((now >= 0) & (now < self.experts)).flatten()[:, None]
                made = torch.where(mine, made, before)
            self._products[i] = made
        self._done = torch.where((index >= 0) & (index < self.experts), index, self._done)

    def result(self, others: Tensor | None = None) -> Tensor:
        """[T, H] in x.dtype. others: [T, H] fp32, the sum over experts that were computed elsewhere."""
        dtype = self.x.dtype if others is None else torch.float32
        y = torch.zeros(self.x.shape, dtype=dtype, device=self.x.device)
        for part, made in zip(self._passes, self._products, strict=True):
            if made is not None:
                self._launches.add_up(made, self._done[part].contiguous(), self.weights[part], y[part])
        return y if others is None else (y + others).to(self.x.dtype)
