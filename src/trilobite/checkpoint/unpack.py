"""Weights that come quantized: fp8 with block scales (DeepSeek-V3, MiniMax-M2) and MXFP4 (gpt-oss), to bf16.

bf16 is what these models' own code dequantizes to, so errors are measured against the model that people run.
"""

from typing import Any

import torch
from torch import Tensor

from trilobite.checkpoint.source import Source
from trilobite.errors import CheckpointError

UNPACKABLE = ("fp8", "mxfp4")
"""quant_method of the originals that we read."""

FP8 = ("F8_E4M3", "F8_E5M2")

MX_GROUP = 32
"""Values that share one MXFP4 scale."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of a 4-bit float; the highest of the four bits is the sign."""


def quantization_of(source: Source, *methods: str) -> dict[str, Any]:
    """How config.json says that the weights are quantized, {} for 16 bit. Raises CheckpointError for another method."""
    found = source.config.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, dict) else None
    if found is None or method in methods:
        return found or {}
    if not isinstance(method, str):
        raise CheckpointError(
            f"{source.path / 'config.json'}: quantization_config has no quant_method; expected the name of a method: "
            "correct it, or copy it again"
        )
    raise CheckpointError(
        f"{source}: already quantized with {method!r}; expected 16-bit, fp8 or mxfp4 weights: take the original "
        "checkpoint"
    )


def dequantize_blocks(w: Tensor, scale: Tensor, block: tuple[int, int], name: str) -> Tensor:
    """fp8 codes times the scale of their block; the last blocks may be partial.

    w: [..., N, K] fp8    scale: [..., ceil(N/b0), ceil(K/b1)], or one number    [..., N, K] bf16
    """
    rows, columns = block
    N, K = w.shape[-2:]
    if scale.numel() == 1:
        return (w.float() * scale.float().reshape(())).bfloat16()
    expected = (*w.shape[:-2], -(-N // rows), -(-K // columns))
    if tuple(scale.shape) != expected:
        raise CheckpointError(
            f"{name}: scales of shape {list(scale.shape)}; expected {list(expected)} for a weight of "
            f"{list(w.shape)} in blocks of {list(block)}: check weight_block_size in config.json"
        )
    scale = scale.float().repeat_interleave(rows, -2)[..., :N, :].repeat_interleave(columns, -1)[..., :K]
    return (w.float() * scale).bfloat16()


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Two E2M1 values a byte, the low four bits first, times 2^(scale - 127) per 32 values.

    blocks: [..., N, K/32, 16] uint8    scales: [..., N, K/32] uint8 (the bits of E8M0)    [..., N, K] bf16
    """
    exponent = scales.contiguous().view(torch.uint8).int() - 127
    values = torch.tensor((*E2M1, *(-v for v in E2M1)), dtype=torch.float32)
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    w = torch.ldexp(values[nibbles.int()], exponent.unsqueeze(-1))
    return w.flatten(-2).bfloat16()


def check_scales(source: Source) -> None:
    """Raise CheckpointError for an fp8 weight without its scales."""
    for name in source.tensors:
        scale_of(source, name)


def scale_of(source: Source, name: str) -> str | None:
    """The tensor that holds the scales of this one, or None when it has none. Raises CheckpointError for fp8 without."""
    if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in source.tensors:
        return f"{name.removesuffix('_blocks')}_scales"
    if source.tensors[name].dtype not in FP8 or len(source.tensors[name].shape) < 2:
        return None
    if f"{name}_scale_inv" not in source.tensors:
        raise CheckpointError(
            f"{source}: {name} is fp8 without {name}_scale_inv; expected block scales beside every fp8 "
            "weight: copy the checkpoint again, or compress its 16-bit original"
        )
    return f"{name}_scale_inv"
