"""An index of keys, by which a layer chooses what rows of its cache a token looks at (DeepSeek-V3.2, GLM-5, MiniMax-M3).

While a text is no longer than what is chosen of it, everything is, and a step only has to keep the keys for later.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, dtype
from transformers import PreTrainedConfig

from trilobite.runtime.step.rows import Rows
from trilobite.runtime.step.unsuited import NotNow

INDICES = {
    "DynamicIndexedLayer": ("update_indexer", "indexer_keys"),
    "MiniMaxM3VLSparseCacheLayer": ("update_index", "idx_keys"),
}
"""By kind of a cache's layer (not all releases have the first, one model has the second): its method that takes the keys
of new tokens, and its field that has all of them, [B, S, width] or [B, 1, S, width]."""


def index_of(layer: Any) -> tuple[str, str] | None:
    """Method and field of a layer that has an index."""
    return INDICES.get(type(layer).__name__)


def chosen_rows(config: PreTrainedConfig, layers: Sequence[Any]) -> float:
    """Up to how many rows all are chosen: 0 where the configuration does not say, infinity without an index."""
    if not any(map(index_of, layers)):
        return math.inf
    text = config.get_text_config()
    rows, blocks = (getattr(text, name, None) for name in ("index_topk", "index_topk_blocks"))
    return float(rows or (blocks or 0) * getattr(text, "index_block_size", 0))


class Index:
    """The keys of one layer's index, in memory with room for more: to `Rows`, a layer whose values are nothing."""

    is_sliding = False

    def __init__(self, field: str, width: int, kind: dtype, texts: int) -> None:
        """Empty. field: of the layer that it follows    kind: of the keys."""
        self.field = field
        self.rows = Rows(1, width, 0, kind, texts=texts, joined=True)
        self.held: Tensor | None = None
        self.keys: Tensor
        self.values: Tensor

    def follow(self, layer: Any) -> None:
        """Hold what the layer's index holds, and have room for one more row."""
        held = getattr(layer, self.field)
        if held is None:
            raise NotNow("its cache holds no keys of an index")
        if held is not self.held:
            self.keys = held if held.dim() == 4 else held[:, None]
            self.values = self.keys[..., :0]
        self.held = held
        self.rows.follow(self)

    def advance(self, layer: Any) -> None:
        """Show the layer the row that was written."""
        four = self.held is not None and self.held.dim() == 4
        self.rows.advance(self)
        self.held = self.keys if four else self.keys[:, 0]
        setattr(layer, self.field, self.held)
