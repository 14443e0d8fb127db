"""Quantizes matrices with llama.cpp's own code, and decodes them with its `gguf` package (pip install gguf)."""

import ctypes
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

BACKWARD = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What `llama-quantize` takes where a row is no multiple of 256; IQ4_NL for all others."""


class Ggml:
    """llama.cpp's library of weight types. path: libggml-base.so of a build with shared libraries."""

    def __init__(self, path: Path) -> None:
        """Raises OSError for what is no such library."""
        self.library: Any = ctypes.CDLL(str(path))
        self.library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
        quantize = self.library.ggml_quantize_chunk
        quantize.restype = ctypes.c_size_t
        quantize.argtypes = [ctypes.c_int, *2 * [ctypes.c_void_p], *3 * [ctypes.c_int64], ctypes.c_void_p]

    def needs_importance(self, name: str) -> bool:
        """Whether a type cannot be made without."""
        return bool(self.library.ggml_quantize_requires_imatrix(kind(name).value))

    def quantize(self, w: Tensor, name: str, importance: Tensor | None) -> tuple[Tensor, int]:
        """A matrix rounded to a type, decoded, and its bytes as stored.

        w: [N, K] float32    importance: [K] float32, of columns    returns [N, K] float32
        """
        n, k = w.shape
        block = gguf.GGML_QUANT_SIZES[kind(name)][0]
        if k % block:
            name = BACKWARD.get(name, "IQ4_NL")
        of, (block, size) = kind(name), gguf.GGML_QUANT_SIZES[kind(name)]
        values = np.ascontiguousarray(w.numpy(), np.float32)
        columns = None if importance is None else np.ascontiguousarray(importance.numpy(), np.float32)
        stored = np.zeros((n, k // block * size), np.uint8)
        self.library.ggml_quantize_init(of.value)
        weight = None if columns is None else columns.ctypes.data
        written = self.library.ggml_quantize_chunk(
            of.value, values.ctypes.data, stored.ctypes.data, 0, n, k, weight
        )
        assert written == stored.nbytes
        return torch.from_numpy(gguf.quants.dequantize(stored, of).astype(np.float32)), stored.nbytes


def kind(name: str) -> gguf.GGMLQuantizationType:
    """A type by llama.cpp's name."""
    return gguf.GGMLQuantizationType[name]
