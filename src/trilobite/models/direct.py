"""Linear layers whose weight the code of a model takes into its own hands: they have to have one, and stay in 16 bit."""

import inspect
import re
import sys

from torch import nn

TAKEN = re.compile(r"\bself\.(\w+)\.weight\b")
ASKED = re.compile(r"isinstance\(self\.(\w+)\.weight")
"""The code asks first whether there is one."""
TOLERANT = ("dt_proj", "out_proj")
"""Taken in training on a GPU only, or after asking whether the model is quantized."""


def taken_directly(model: nn.Module) -> set[str]:
    """Names (the last part) of layers of which the files of a model's classes read `self.name.weight`."""
    names: set[str] = set()
    for file in {
        type(m).__module__ for m in model.modules() if type(m).__module__.startswith("transformers.")
    }:
        source = inspect.getsource(sys.modules[file])
        names |= set(TAKEN.findall(source)) - set(ASKED.findall(source))
    return names - set(TOLERANT)
