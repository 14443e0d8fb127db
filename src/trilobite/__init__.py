"""Makes Mixture-of-Experts language models small enough for the machine you have, and runs them there.

Importing this package costs next to nothing: the names below are looked up when they are first used. The quantizer and
the model classes that transformers lacks are registered as soon as transformers is imported, before or after this
package, so that `AutoModelForCausalLM.from_pretrained("mixtral-3bit")` works.
"""

from __future__ import annotations

from trilobite.integrations.register import register_with_transformers

TYPE_CHECKING = False  # typing takes long to import, and the command answers no signal before
if TYPE_CHECKING:
    from typing import Any

    from trilobite.errors import TrilobiteError
    from trilobite.integrations.config import TrilobiteConfig
    from trilobite.quantize.run.compress import compress
    from trilobite.recipe import load_recipe
    from trilobite.runtime.load import load

__version__ = "0.1.0"
__all__ = ["TrilobiteConfig", "TrilobiteError", "__version__", "compress", "load", "load_recipe"]

_HOMES = {
    "TrilobiteConfig": "trilobite.integrations.config",
    "TrilobiteError": "trilobite.errors",
    "compress": "trilobite.quantize.run.compress",
    "load": "trilobite.runtime.load",
    "load_recipe": "trilobite.recipe",
}


def __getattr__(name: str) -> Any:
    """The public names, looked up when they are first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


register_with_transformers()
