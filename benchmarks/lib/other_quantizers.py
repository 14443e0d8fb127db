"""Rounds matrices with HQQ's or SINQ's own package; runs in an environment that has them, and needs nothing of ours.

    python benchmarks/lib/other_quantizers.py hqq|sinq BITS GROUP IN.safetensors OUT.safetensors

OUT has the decoded matrices under their names, [N, K] float32, and beside them a JSON file with the bytes of each as the
package stores it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def hqq(w: Tensor, bits: int, group: int) -> tuple[Tensor, Any]:
    """As HQQLinear does it without a GPU: scales and zero points in fp16. Returns what is decoded, what is stored."""
    from hqq.core.quantize import Quantizer  # type: ignore[import-not-found, unused-ignore]

    codes, meta = Quantizer.quantize(w, nbits=bits, group_size=group, axis=1, device="cpu")
    for name in ("scale", "zero"):
        meta[name] = meta[name].half()
    meta["compute_dtype"] = torch.float32
    return Quantizer.dequantize(codes, meta), (codes, meta["scale"], meta["zero"])


def sinq(w: Tensor, bits: int, group: int) -> tuple[Tensor, Any]:
    """As its configuration `sinq` does it, with its 8-bit scales and zero points."""
    from sinq.quantizer import Quantizer  # type: ignore[import-not-found, unused-ignore]

    codes, meta = Quantizer.quantize(
        w,
        None,
        nbits=bits,
        group_size=group,
        round_zero=bits == 4,
        axis=1,
        compute_dtype=torch.float32,
        device="cpu",
        tiling_mode="1D",
        method="sinq_quantAux",
    )
    return Quantizer.dequantize(codes, meta), (codes, meta["scale"], meta["zero"], meta["scale2"])


def nbytes(stored: Any) -> int:
    """Of tensors, numbers of floating point in 16 bit."""
    if isinstance(stored, Tensor):
        return stored.numel() * (2 if stored.is_floating_point() else stored.element_size())
    return sum(map(nbytes, stored)) if isinstance(stored, tuple | list) else 0


def main() -> None:
    """Read, round, write."""
    name, bits, group, source, target = sys.argv[1:]
    method = {"hqq": hqq, "sinq": sinq}[name]
    decoded, sizes = {}, {}
    for matrix, w in load_file(source).items():
        out, stored = method(w.float(), int(bits), int(group))
        decoded[matrix], sizes[matrix] = out.float().reshape(w.shape).contiguous(), nbytes(stored)
    save_file(decoded, target)
    Path(target).with_suffix(".json").write_text(json.dumps(sizes))


if __name__ == "__main__":
    main()
