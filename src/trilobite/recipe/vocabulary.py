"""The words of a recipe: roles of tensors, formats of weights and compensators, methods that find codes."""

import re
from dataclasses import dataclass, replace
from enum import Enum

from trilobite.errors import RecipeError


class Role(str, Enum):
    """What a tensor is. *Dense* roles work on every token, `expert` (routed experts) is *sparse*."""

    ATTENTION = "attention"
    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    DENSE_MLP = "dense_mlp"
    ROUTER = "router"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    OTHER = "other"


def parse_role(text: str) -> Role:
    """A role by its name; raises RecipeError with the list."""
    try:
        return Role(text)
    except ValueError:
        raise RecipeError(f"role {text!r}: expected one of {', '.join(r.value for r in Role)}") from None


DENSE_ROLES = (Role.ATTENTION, Role.SHARED_EXPERT, Role.DENSE_MLP)
BODY_ROLES = (*DENSE_ROLES, Role.EXPERT)
METHODS = ("rtn", "search", "hqq", "hqq-paper", "gptq", "gptq-order", "ldlq")
CALIBRATED_METHODS = ("gptq", "gptq-order", "ldlq")
"""Methods that need the Hessian of a layer's inputs, so a calibration text."""
LATTICE_METHODS = ("rtn", "search", "ldlq")
"""Methods that find the codes of a lattice format; the affine formats take all but ldlq."""
COLUMNS = ("none", "sinkhorn")
"""How column scales are found."""
IMPORTANCES = ("none", "weights", "builtin", "self", "text")
"""Where `search` learns what enters each column, to weigh errors by: nowhere, from the weights that make it, on a text
of ours, on one that the model writes itself, on one's own.
"""
ITERATIONS, PUBLISHED_ITERATIONS = 10, 20
"""Caps of MiLo's alternation: with strides (quantize/methods/milo.py), and as printed."""
COMPENSATORS = {"int3": 3, "int8": 8, "fp16": 16}
"""Compensator formats and their bits."""


def is_group(group: int, bits: int) -> bool:
    """Whether codes come in groups of so many columns: multiples of 32, or 16 (no whole number of 3-bit planes)."""
    return group % 32 == 0 or (group == 16 and bits != 3)


@dataclass(frozen=True, kw_only=True)
class Format:
    """What stored codes mean: `int3-g64`, `int4-channel-sym`, `int2-g32-dq`, `int3-g16-super`.

    bits: 2, 3, 4 or 8    group: columns that share a scale, 0 = a whole row (per channel)
    symmetric: no offset    double_quant: scales and offsets are themselves 8-bit
    super_scales: scales and offsets have 4 bits, under a scale for 256 columns of a row; neither of the other two
    """

    bits: int
    group: int
    symmetric: bool = False
    double_quant: bool = False
    super_scales: bool = False

    @classmethod
    def parse(cls, text: str) -> "Format":
        """Read a format's name; raises RecipeError with the grammar."""
        if m := re.fullmatch(r"int([234])-g(16|32)-super", text):
            return cls(bits=int(m[1]), group=int(m[2]), super_scales=True)
        m = re.fullmatch(r"int([2348])-(?:g([1-9][0-9]*)|channel)(-sym)?(-dq)?", text)
        group = int(m[2] or 0) if m else -1
        if not m or not is_group(group, int(m[1])):
            raise RecipeError(
                f"format {text!r}: expected int{{2,3,4,8}}-{{g32,g64,g128,channel}}[-sym][-dq], for example int3-g64, "
                "where g16 goes with 2, 4 and 8 bits; or int{2,3,4}-{g16,g32}-super"
            )
        return cls(bits=int(m[1]), group=group, symmetric=bool(m[3]), double_quant=bool(m[4]))

    def __str__(self) -> str:
        """The name that `parse` reads."""
        size = f"g{self.group}" if self.group else "channel"
        flags = {"sym": self.symmetric, "dq": self.double_quant, "super": self.super_scales}
        return "-".join([f"int{self.bits}", size, *(name for name, is_set in flags.items() if is_set)])

    def with_bits(self, bits: int) -> "Format":
        """The same format in so many bits, with groups or scales of another kind where these bits do not have them."""
        if self.super_scales and bits < 8:
            return replace(self, bits=bits)
        group = self.group if is_group(self.group, bits) else 32
        return replace(self, bits=bits, group=group, super_scales=False)

    def group_size(self, k: int) -> int:
        """Columns per group in a matrix of K = k columns."""
        return self.group or k


CODEBOOKS = ("e8p", "grid")
"""E8P, the 2-bit lattice codebook of QuIP#, its residual forms for 3 and 4 bits, and the 1-bit codebook of the former of
these; the half-integer scalar grid."""
TRANSFORMS = ("hadamard", "fourier")
LATTICE_GRAMMAR = "{e8p-{1,2,3,4},grid-{2,3,4}}[-fourier]"


@dataclass(frozen=True, kw_only=True)
class LatticeFormat:
    """What stored codes mean after incoherence processing (QuIP#): `e8p-2`, `e8p-3-fourier`, `grid-4`.

    codebook: `e8p` or `grid`    bits: 2, 3 or 4, of e8p also 1    transform: the random rotation of both sides of the
    matrix
    """

    codebook: str
    bits: int
    transform: str = "hadamard"

    @classmethod
    def parse(cls, text: str) -> "LatticeFormat":
        """Read a format's name; raises RecipeError with the grammar."""
        m = re.fullmatch(r"(e8p|grid(?!-1))-([1234])(-fourier)?", text)
        if not m:
            raise RecipeError(f"format {text!r}: expected {LATTICE_GRAMMAR}, for example e8p-2")
        return cls(codebook=m[1], bits=int(m[2]), transform="fourier" if m[3] else "hadamard")

    @property
    def two_stages(self) -> bool:
        """Whether a second codeword stands for what the first leaves."""
        return self.codebook == "e8p" and self.bits > 2

    def __str__(self) -> str:
        """The name that `parse` reads."""
        return f"{self.codebook}-{self.bits}{'-fourier' if self.transform == 'fourier' else ''}"


AnyFormat = Format | LatticeFormat


def parse_format(text: str) -> AnyFormat:
    """Read the name of a format of either kind; raises RecipeError with the grammar."""
    if text.startswith(CODEBOOKS):
        return LatticeFormat.parse(text)
    try:
        return Format.parse(text)
    except RecipeError as e:
        raise RecipeError(f"{e}, or {LATTICE_GRAMMAR}") from None


def check_method(fmt: AnyFormat, method: str) -> None:
    """Raise RecipeError when the method cannot find codes of the format."""
    lattice = isinstance(fmt, LatticeFormat)
    known = LATTICE_METHODS if lattice else [m for m in METHODS if m != "ldlq"]
    if method not in known:
        raise RecipeError(f"method {method!r} does not quantize to {fmt}; expected one of {', '.join(known)}")
