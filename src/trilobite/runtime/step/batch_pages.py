"""Where a server's batch keeps keys and values."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BatchPages:
    """Where a server's batch keeps keys and values, for attention of its own.

    of: arguments of a server's forward, a layer of the cache -> those of `Rows.lie_in`; None where it has none
    aside: for the while, the model attends as elsewhere
    """

    of: Callable[[dict[str, Any], int], tuple[Tensor, Tensor, Tensor, Tensor] | None]
    aside: Callable[[], AbstractContextManager[None]]
