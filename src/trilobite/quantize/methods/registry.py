"""Every method by its name in recipes; what a new one has to be added to."""

from functools import partial

from torch import Tensor

from trilobite.formats.weight import PackedWeight
from trilobite.quantize.methods.gptq import gptq
from trilobite.quantize.methods.milo import milo
from trilobite.quantize.methods.quantized import Method
from trilobite.recipe import AnyFormat

METHODS: dict[str, Method] = {
    **{name: partial(milo, method=name) for name in ("rtn", "search", "hqq", "hqq-paper", "ldlq")},
    "gptq": gptq,
    "gptq-order": partial(gptq, ordered=True),
}
"""MiLo's alternation is around the methods that find codes without one of their own; with rank 0 it is the method."""


def quantize(w: Tensor, fmt: AnyFormat, method: str) -> PackedWeight:
    """Quantize a matrix without data and without a compensator.

    w: [N, K] any float dtype    returns: packed weight of the same shape
    """
    return METHODS[method](w, fmt).weight
