"""Quantizes matrices with llama.cpp's or ik_llama.cpp's own code, decodes them with the same library, multiplies."""

import ctypes as c
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ2_XXS": 16,
    "IQ2_XS": 17,
    "IQ3_XXS": 18,
    "IQ4_NL": 20,
    "IQ3_S": 21,
    "IQ2_S": 22,
    "IQ4_XS": 23,
}
IK_TYPES = {
    "IQ2_K": 137,
    "IQ3_K": 138,
    "IQ4_K": 139,
    "IQ4_KS": 144,
    "IQ2_KS": 145,
    "IQ4_KSS": 146,
    "IQ2_KT": 153,
    "IQ3_KT": 154,
    "IQ3_KS": 156,
    "IQ2_KL": 157,
}
"""Their numbers in `enum ggml_type` of ggml.h."""
BACKWARD = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "IQ4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""What `llama-quantize` takes where blocks do not divide a row; IQ4_NL for all others."""
_CONVERT = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_int64)


class _Traits(c.Structure):
    """The head of llama.cpp's `struct ggml_type_traits`."""

    _fields_ = (
        ("name", c.c_char_p),
        ("block", c.c_int64),
        ("interleave", c.c_int64),
        ("size", c.c_size_t),
        ("quantized", c.c_bool),
        ("decode", c.c_void_p),
    )


class _IkTraits(c.Structure):
    """The same of ik_llama.cpp, which returns all of it by value."""

    _fields_ = (
        *_Traits._fields_,
        ("encode", c.c_void_p),
        ("others", c.c_void_p * 3),
        ("activations", c.c_int),
        ("rest", c.c_void_p * 5),
    )


class _Arena(c.Structure):
    """`struct ggml_init_params`."""

    _fields_ = (("size", c.c_size_t), ("memory", c.c_void_p), ("no_alloc", c.c_bool))


class Ggml:
    """A library of weight types. path: libggml-base.so of llama.cpp, or libggml.so of ik_llama.cpp."""

    def __init__(self, path: Path) -> None:
        """Raises OSError for what is no such library."""
        self.library: Any = c.CDLL(str(path))
        self.library.ggml_init.argtypes, self.library.ggml_init.restype = [_Arena], c.c_void_p
        self.library.ggml_init(_Arena(1 << 20, None, False))  # makes its tables of fp16
        self.ik = hasattr(self.library, "ggml_internal_get_type_traits")
        self.types = TYPES | IK_TYPES if self.ik else TYPES
        if self.ik:
            self.library.ggml_internal_get_type_traits.restype = _IkTraits
        else:
            self.library.ggml_get_type_traits.restype = c.POINTER(_Traits)
        self.library.ggml_quantize_requires_imatrix.restype = c.c_bool
        self.library.ggml_row_size.restype = c.c_size_t
        self.library.ggml_row_size.argtypes = [c.c_int, c.c_int64]
        if self.ik:
            matrix = (c.c_int, c.c_void_p, c.c_long)
            multiply = self.library.iqk_mul_mat
            multiply.restype = c.c_bool
            multiply.argtypes = [*3 * [c.c_long], *matrix, *matrix, c.c_void_p, c.c_long, *2 * [c.c_int]]
        quantize = self.library.ggml_quantize_chunk
        quantize.restype = c.c_size_t
        quantize.argtypes = [c.c_int, *2 * [c.c_void_p], *3 * [c.c_int64], c.c_void_p]

    def traits(self, name: str) -> Any:
        """What the library says of a type."""
        of = self.types[name]
        if self.ik:
            return self.library.ggml_internal_get_type_traits(of)
        return self.library.ggml_get_type_traits(of)[0]

    def needs_importance(self, name: str) -> bool:
        """Whether a type cannot be made without."""
        return bool(self.library.ggml_quantize_requires_imatrix(self.types[name]))

    def fitting(self, name: str, k: int) -> str:
        """The type itself, or what stands for it in rows of k columns."""
        return BACKWARD.get(name, "IQ4_NL") if k % self.traits(name).block else name

    def quantize(self, w: Tensor, name: str, importance: Tensor | None) -> tuple[Tensor, int]:
        """A matrix rounded to a type, decoded, and its bytes as stored.

        w: [N, K] float32    importance: [K] float32, of columns    returns [N, K] float32
        """
        n, k = w.shape
        name = self.fitting(name, k)
        stored = self._stored(w, name, importance)
        row = len(stored) // n
        decode, out = (
            _CONVERT(self.traits(name).decode),
            torch.empty_like(w, memory_format=torch.contiguous_format),
        )
        for i in range(n):  # some types have a head in each row
            decode(stored.data_ptr() + i * row, out.data_ptr() + 4 * i * k, k)
        assert bool(torch.isfinite(out).all()), name
        return out, n * row

    def _stored(self, w: Tensor, name: str, importance: Tensor | None) -> Tensor:
        """The bytes of a matrix in a type, row by row; some more are behind them, which kernels may read."""
        (n, k), of = w.shape, self.types[name]
        size = n * self.library.ggml_row_size(of, k)
        w = w.contiguous()
        columns = None if importance is None else importance.float().contiguous()
        stored = torch.zeros(size + 64, dtype=torch.uint8)
        self.library.ggml_quantize_init(of)
        weight = None if columns is None else columns.data_ptr()
        written = self.library.ggml_quantize_chunk(of, w.data_ptr(), stored.data_ptr(), 0, n, k, weight)
        assert written == size, (name, written, size)
        return stored[:size]

    def product(self, w: Tensor, name: str, times: int) -> tuple[Callable[[], Tensor], int]:
        """A call that multiplies a matrix with one vector by the kernels of ik_llama.cpp (iqk), and its bytes.

        w: [N, K] float32, which stands `times` times below itself    returns: calls give [times * N] float32, W 1
        """
        (n, k), of = w.shape, self.types[name]
        stored = torch.cat(
            (self._stored(w, name, torch.ones(k)).repeat(times), torch.zeros(64, dtype=torch.uint8))
        )
        row = self.library.ggml_row_size(of, k)
        kind = self.traits(name).activations
        to = self.library.ggml_internal_get_type_traits(kind)
        x, y = torch.ones(k), torch.empty(times * n)
        encoded = torch.zeros(self.library.ggml_row_size(kind, k) + 64, dtype=torch.uint8)
        encode = _CONVERT(to.encode)

        def call() -> Tensor:
            encode(x.data_ptr(), encoded.data_ptr(), k)
            matrices = (of, stored.data_ptr(), row, kind, encoded.data_ptr(), len(encoded))
            assert self.library.iqk_mul_mat(times * n, 1, k, *matrices, y.data_ptr(), times * n, 0, 1), name
            return y

        return call, times * n * row
