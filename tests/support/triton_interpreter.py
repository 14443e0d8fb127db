"""Triton's interpreter for tests: kernels run on CPU tensors, in numpy.

TRITON_INTERPRET has to be set before Triton is imported (conftest does). The interpreter of Triton 3.9 keeps bfloat16 as
bits and multiplies those; `install` gives it a product of numbers. It rounds to bfloat16 towards zero, which costs half
a bit.
"""

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Mend `tl.dot` of bfloat16; once is enough."""
    original = interpreter.InterpreterBuilder.create_dot
    if hasattr(original, "mended"):
        return

    def create_dot(self, a, b, d, *rest):  # type: ignore[no-untyped-def]
        return original(self, _widen(a), _widen(b), d, *rest)

    create_dot.mended = True  # type: ignore[attr-defined]
    interpreter.InterpreterBuilder.create_dot = create_dot


def _widen(handle):  # type: ignore[no-untyped-def]
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


def available() -> bool:
    """Whether kernels are interpreted in this process."""
    return bool(triton.knobs.runtime.interpret)
