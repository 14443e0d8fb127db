"""Makes transformers know our quantizer and models as soon as it is imported, without importing it.

A finder on `sys.meta_path` waits for the import of transformers and registers right after it. What registers must not
need a module of ours that imports transformers itself: that one may be what is being imported just now.
"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # as in trilobite/__init__.py
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from trilobite.integrations.transformers import TrilobiteQuantizer

PLUGINS = (
    "trilobite.integrations.config",
    "trilobite.models.deepseek",
    "trilobite.models.nllb_moe",
    "trilobite.models.switch_transformers",
)
"""Modules that register something when they are imported."""


def register_with_transformers() -> None:
    """Register now where transformers is imported already, else as soon as it is."""
    if "transformers" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Waiting())


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
    """Lets the other finders find transformers, and registers when it has been executed; then it is gone."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "transformers":
            return None
        others = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
        spec = next(filter(None, others), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _register()

        setattr(spec.loader, "exec_module", execute_and_register)  # noqa: B010 - a method of this one object
        return spec
