"""torch's default dtype is anybody's to change, in any thread: native code must not take it for float32."""

import pytest
import torch

from trilobite.formats.weight import dequantize
from trilobite.quantize.methods.registry import quantize
from trilobite.recipe import Format


@pytest.mark.parametrize("method", ["rtn", "search", "hqq"])
@pytest.mark.parametrize("text", ["int3-g64", "int8-g64-sym", "int3-g64-dq"])
def test_the_default_dtype_changes_nothing(text: str, method: str) -> None:
    w = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))
    expected = quantize(w, Format.parse(text), method).packed
    try:
        torch.set_default_dtype(torch.bfloat16)
        found = quantize(w, Format.parse(text), method)
        assert torch.equal(found.packed, expected)
        assert dequantize(found).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
