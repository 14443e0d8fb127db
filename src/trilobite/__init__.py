"""Makes Mixture-of-Experts language models small enough for the machine you have, and runs them there.

Importing this package registers the quantizer and the model classes that transformers lacks, so that
`AutoModelForCausalLM.from_pretrained("mixtral-3bit")` works. That costs the import of transformers
(seconds). The `trilobite` command registers when it loads a model: `--help` must not wait for torch.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trilobite.errors import TrilobiteError
from trilobite.recipe import load_recipe

if TYPE_CHECKING:
    from trilobite.integrations.transformers import TrilobiteConfig
    from trilobite.quantize.run.compress import compress
    from trilobite.runtime.load import load

__version__ = "0.1.0"
__all__ = ["TrilobiteConfig", "TrilobiteError", "__version__", "compress", "load", "load_recipe"]


def __getattr__(name: str) -> Any:
    """The public names that need torch and transformers, looked up when they are first used."""
    if name == "compress":
        from trilobite.quantize.run.compress import compress

        return compress
    if name == "TrilobiteConfig":
        return _register()
    if name == "load":
        _register()
        from trilobite.runtime.load import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


def _register() -> "type[TrilobiteConfig]":
    """Make transformers know our quantizer and models; does nothing the second time."""
    from trilobite.integrations.transformers import TrilobiteConfig
    from trilobite.models import deepseek

    deepseek.register()
    return TrilobiteConfig


def _is_command() -> bool:
    """Whether this process is the `trilobite` command (its script, or `python -m trilobite`)."""
    program = Path((getattr(sys, "argv", None) or [""])[0]).stem
    return program == "trilobite" or sys.orig_argv[1:3] == ["-m", "trilobite"]


if not _is_command():
    _register()
