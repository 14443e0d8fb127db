"""Makes transformers know our quantizer and models as soon as it is imported, without importing it.

A finder on `sys.meta_path` waits for the import of transformers, and of those of its models that we change, and
registers right after it. What registers must not need a module of ours that imports transformers itself: that one may
be what is being imported just now.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module

TYPE_CHECKING = False  # as in trilobite/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from trilobite.integrations.transformers import TrilobiteQuantizer

PLUGINS = (
    "trilobite.integrations.config",
    "trilobite.models.deepseek",
)
"""Modules that register something when they are imported."""
CHANGED = {
    f"transformers.models.{name}.modeling_{name}": f"trilobite.models.{name}"
    for name in ("dbrx", "jetmoe", "llama4", "longcat_flash", "nllb_moe", "switch_transformers")
}
"""Modules of transformers, and those that put layers of ours into them."""


def register_with_transformers() -> None:
    """Register now where transformers is imported already, else as soon as it is."""
    waiting: dict[str, Callable[[], object]] = {
        name: partial(import_module, plugin) for name, plugin in CHANGED.items()
    }
    waiting["transformers"] = _register
    for name in [name for name in waiting if name in sys.modules]:
        waiting.pop(name)()
    sys.meta_path.insert(0, _Waiting(waiting))


def _register() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    for plugin in PLUGINS:
        import_module(plugin)
    AUTO_QUANTIZER_MAPPING["trilobite"] = _quantizer


def _quantizer(*args: Any, **kwargs: Any) -> TrilobiteQuantizer:
    """The quantizer, with transformers' own arguments; its module is imported with the first model."""
    from trilobite.integrations.transformers import TrilobiteQuantizer

    return TrilobiteQuantizer(*args, **kwargs)


class _Waiting:
    """Lets the other finders find some modules, and does something when one has been executed, once."""

    def __init__(self, after: dict[str, Callable[[], object]]) -> None:
        """after: what to do, by module."""
        self.after = after

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.after:
            return None
        others = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
        spec = next(filter(None, others), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if do := self.after.pop(name, None):
                do()

        setattr(spec.loader, "exec_module", execute_and_register)  # noqa: B010 - a method of this one object
        return spec
