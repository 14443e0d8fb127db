"""Triton's interpreter for tests: kernels run on CPU tensors, in numpy.

TRITON_INTERPRET has to be set before Triton is imported (conftest does). `install` mends the interpreter of Triton 3.9.
It keeps bfloat16 as bits and multiplies those; now it multiplies numbers, and rounds to bfloat16 towards zero, which
costs half a bit. And two thirds of its time were for nothing: it replaced the functions of the language at each call of
a function by another, now once a launch; and it looked whether whole numbers overflow, but told nobody.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Mend it; once is enough."""
    if hasattr(interpreter.InterpreterBuilder.create_dot, "mended"):
        return
    interpreter.InterpreterBuilder.create_dot = _numbers_multiplied(interpreter.InterpreterBuilder.create_dot)
    interpreter._patch_lang = _Replaced(interpreter._patch_lang)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _numbers_multiplied(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self, a, b, d, *rest):  # type: ignore[no-untyped-def]
        return original(self, _widen(a), _widen(b), d, *rest)

    create_dot.mended = True  # type: ignore[attr-defined]
    return create_dot


def _widen(handle):  # type: ignore[no-untyped-def]
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


@cache
def _language(fn: Callable[..., Any]) -> frozenset[str]:
    """Names of the language's modules that a function sees."""
    return frozenset(
        m.__name__ for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core)
    )


class _Replaced:
    """`_patch_lang`, for the modules of the language that a launch has not met yet."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._met: frozenset[str] | None = None  # outside of a launch

    def __call__(self, fn: Callable[..., Any]) -> Any:
        language = _language(fn)
        if self._met is not None:  # a function that a kernel calls: nobody restores anything
            if not language <= self._met:
                self._original(fn)
                self._met |= language
            return None
        scope = self._original(fn)
        self._met, restore = language, scope.restore

        def end() -> None:
            restore()
            self._met = None

        scope.restore = end
        return scope


def available() -> bool:
    """Whether kernels are interpreted in this process."""
    return bool(triton.knobs.runtime.interpret)
