"""Finds and loads the shared object of csrc/ and declares its C interface (csrc/trilobite.h)."""

import ctypes
import logging
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from ctypes import Structure, c_char_p, c_double, c_float, c_int, c_int64, c_void_p
from pathlib import Path

from trilobite.errors import ResourceError, ShapeError

log = logging.getLogger(__name__)
NAME = "libtrilobite.so"
VARIABLE = "TRILOBITE_LIBRARY"
"""Environment variable: path of another build of the library, for example one with sanitizers."""


CORES = 4
"""TRILOBITE_CORES."""


class Rotation(Structure):
    """`trilobite_rotation`."""

    _fields_ = (("n", c_int64), ("count", c_int64), ("order", c_int64 * CORES), ("core", c_void_p * CORES))


class MatrixArgs(Structure):
    """`trilobite_matrix`."""

    _fields_ = (
        *((name, c_void_p) for name in ("packed", "scale", "lra", "lrb")),
        *(
            (name, c_int64)
            for name in ("n", "k", "rank", "rank_bits", "bits", "group", "symmetric", "metadata")
        ),
        *((name, c_void_p) for name in ("lattice", "signs_in", "signs_out")),
        ("tuned", c_int64),
        *((name, c_void_p) for name in ("rotate_in", "rotate_out")),
    )


class ExpertsArgs(Structure):
    """`trilobite_experts_args`."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("x", "index", "weights", "slab", "table", "gate_up_bias", "down_bias", "y")
        ),
        *(
            (name, c_int64)
            for name in ("dtype", "weights_dtype", "bias_dtype", "index_bytes", "tokens", "active")
        ),
        *(
            (name, c_int64)
            for name in ("experts", "hidden", "intermediate", "slab_bytes", "activation", "digits")
        ),
        ("threads", c_int64),
        ("gated", c_int64),
        *((name, c_void_p) for name in ("rotate_hidden", "rotate_intermediate", "sums")),
        ("numbers", c_float * 2),
    )


class AttentionArgs(Structure):
    """`trilobite_attention_args`."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "y", "rows", "starts", "ends", "sinks", "bias")),
        *((name, c_int64) for name in ("dtype", "texts", "heads", "kv_heads", "width", "limit")),
        *((name, c_int64) for name in ("row_stride", "head_stride", "distances", "threads")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


class DenseArgs(Structure):
    """`trilobite_dense_args`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "w", "bias", "y")),
        *((name, c_int64) for name in ("dtype", "heads", "tokens", "n", "k", "threads")),
    )


class ConvolutionArgs(Structure):
    """`trilobite_convolution_args`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "w", "bias", "state", "y")),
        *((name, c_int64) for name in ("dtype", "channels", "taps", "silu", "threads")),
    )


class DeltaArgs(Structure):
    """`trilobite_delta_args`."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "decay", "beta", "state", "y")),
        *((name, c_int64) for name in ("dtype", "tokens", "heads", "key_heads", "width", "value_width")),
        *((name, c_int64) for name in ("wide_decay", "normed", "threads")),
    )


class ScanArgs(Structure):
    """`trilobite_scan_args`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "b", "c", "step", "decay", "skip", "state", "y")),
        *((name, c_int64) for name in ("dtype", "tokens", "heads", "groups", "width", "size", "threads")),
    )


DIMENSIONS = 4
"""TRILOBITE_DIMENSIONS."""


class Operand(Structure):
    """`trilobite_operand`."""

    _fields_ = (
        ("data", c_void_p),
        ("bytes", c_int64),
        ("dtype", c_int64),
        ("stride", c_int64 * DIMENSIONS),
    )


class StepCache(Structure):
    """`trilobite_step_cache`."""

    _fields_ = (
        *((name, c_void_p) for name in ("k", "v", "rows")),
        *(
            (name, c_int64)
            for name in ("first", "end", "capacity", "limit", "row_stride", "head_stride", "bytes")
        ),
    )


class StepNode(Structure):
    """`trilobite_step_node`. arguments: what `call` points to, where that is nobody else's."""

    arguments: Structure | None = None

    _fields_ = (
        ("kind", c_int64),
        ("shape", c_int64 * DIMENSIONS),
        *((name, Operand) for name in ("out", "a", "b", "c")),
        *((name, c_int64) for name in ("lanes", "digits", "threads")),
        ("number", c_float),
        ("call", c_void_p),
    )


def _candidates() -> Iterator[Path]:
    if os.environ.get(VARIABLE):
        yield Path(os.environ[VARIABLE])
        return
    yield Path(__file__).parent / NAME
    # An editable install keeps the Python files in the source tree and the library in site-packages.
    for folder in (sysconfig.get_path("platlib"), *site.getsitepackages(), *sys.path):
        yield Path(folder) / "trilobite" / "kernels" / "cpu" / NAME


ABI = 19
"""Number of the interface that this file declares; TRILOBITE_ABI in csrc/trilobite.h."""


EXHAUSTED = -2
"""TRILOBITE_EXHAUSTED."""
CHECKED = (
    "linear",
    "rotate",
    "experts",
    "attention",
    "dense",
    "convolve",
    "delta",
    "scan",
    "step_check",
    "step",
    "quantize",
    "feed_back",
    "descend",
    "nearest_points",
    "read_seconds",
    "peak_macs",
)
"""Functions that return less than 0 after a failure."""


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    if lib.trilobite_abi() != ABI:
        raise OSError(
            f"it has interface {lib.trilobite_abi()}, this package {ABI}: install the package again"
        )
    signatures = {
        "linear": (
            c_int,
            [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64],
        ),
        "rotate": (c_int, [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64]),
        "experts": (c_int, [c_void_p]),
        "attention": (c_int, [c_void_p]),
        "dense": (c_int, [c_void_p]),
        "convolve": (c_int, [c_void_p]),
        "delta": (c_int, [c_void_p]),
        "scan": (c_int, [c_void_p]),
        "step_check": (c_int, [c_void_p, c_int64]),
        "step": (c_int, [c_void_p, c_int64, c_int64]),
        "quantize": (c_int, [c_void_p]),
        "feed_back": (c_int, [c_void_p]),
        "descend": (c_int, [c_void_p]),
        "nearest_points": (c_int, [c_void_p, c_int64, c_int64, c_double, c_void_p, c_void_p]),
        "error": (c_char_p, []),
        "tier": (c_char_p, []),
        "better_tier": (c_char_p, []),
        "set_tier": (c_int, [c_char_p]),
        "max_threads": (c_int64, []),
        "read_seconds": (c_double, [c_void_p, c_int64, c_int64]),
        "peak_macs": (c_double, [c_int64, c_int64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, f"trilobite_{name}")
        function.restype, function.argtypes = result, arguments

    def check(code: float, function: object, arguments: object) -> float:
        """Raise what a failed call left for this thread: ShapeError, or ResourceError for memory and threads."""
        if code < 0:
            raise (ResourceError if code == EXHAUSTED else ShapeError)(lib.trilobite_error().decode())
        return code

    for name in CHECKED:
        getattr(lib, f"trilobite_{name}").errcheck = check
    return lib


def load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and the reason why not, which is logged where there is one that does not suit."""
    tried = [p for p in dict.fromkeys(_candidates()) if p.is_file()]
    if not tried:
        return None, f"{NAME} is not installed (no C++ compiler at install time?)"
    try:
        return _declare(ctypes.CDLL(str(tried[0]))), f"loaded {tried[0]}"
    except (OSError, AttributeError) as e:
        why = f"{tried[0]} does not load: {e}"
        log.warning("packed models run without the CPU engine, many times slower: %s", why)
        return None, why
