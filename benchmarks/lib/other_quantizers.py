"""Rounds matrices with the package of others; runs in an environment that has it, and needs nothing of ours.

    python benchmarks/lib/other_quantizers.py NAME BITS GROUP IN.safetensors OUT.safetensors [HESSIANS.safetensors]

NAME: hqq, sinq; and with Hessians asinq, gptqmodel. HESSIANS has E[x x^T] of the inputs under the names of the matrices,
[K, K] float32: these packages take inputs, and get K of them whose mean is that, turned at random. OUT has the decoded
matrices under their names, [N, K] float32, and beside them a JSON file with the bytes of each as the package stores it.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def hqq(w: Tensor, bits: int, group: int) -> tuple[Tensor, int]:
    """As HQQLinear does it without a GPU: scales, zero points in fp16. Returns what is decoded, its stored bytes."""
    from hqq.core.quantize import Quantizer  # type: ignore[import-not-found, unused-ignore]

    codes, meta = Quantizer.quantize(w, nbits=bits, group_size=group, axis=1, device="cpu")
    for name in ("scale", "zero"):
        meta[name] = meta[name].half()
    meta["compute_dtype"] = torch.float32
    return Quantizer.dequantize(codes, meta), nbytes((codes, meta["scale"], meta["zero"]))


def sinq(w: Tensor, bits: int, group: int, x: Tensor | None = None) -> tuple[Tensor, int]:
    """As its configuration `sinq` does it, or `asinq` with inputs x, with its 8-bit scales and zero points."""
    from sinq.quantizer import Quantizer  # type: ignore[import-not-found, unused-ignore]

    with patch.object(torch, "std", std):
        codes, meta = Quantizer.quantize(
            w,
            None if x is None else x[None],
            nbits=bits,
            group_size=group,
            round_zero=bits == 4,
            axis=1,
            compute_dtype=torch.float32,
            device="cpu",
            tiling_mode="1D",
            method="sinq_quantAux" if x is None else "sinq_awq_l1_quantAux",
        )
    stored = codes, meta["scale"], meta["zero"], meta["scale2"]
    return Quantizer.dequantize(codes, meta), nbytes(stored)


def std(x: Tensor, dim: int) -> Tensor:
    """In two passes: torch's one pass takes five times as long on a CPU, and is nearly all that A-SINQ does."""
    return ((x - x.mean(dim, keepdim=True)).square().sum(dim) / (x.shape[dim] - 1)).sqrt()


def gptqmodel(w: Tensor, bits: int, group: int, x: Tensor) -> tuple[Tensor, int]:
    """As its configuration says by default; packed codes and zero points, scales in fp16, the groups of columns."""
    from gptqmodel.quantization import GPTQ, QuantizeConfig  # type: ignore[import-not-found, unused-ignore]

    n, k = w.shape
    layer = torch.nn.Linear(k, n, bias=False)
    layer.weight.data = w.clone()
    task = GPTQ(layer, QuantizeConfig(bits=bits, group_size=group))
    task.quantizer.configure(perchannel=True)
    task.add_batch(x[None], None)
    with torch.no_grad():
        decoded, scale, *_ = task.quantize()
    return decoded, (w.numel() * bits + scale.numel() * (16 + bits)) // 8 + 4 * k


def nbytes(stored: Any) -> int:
    """Of tensors, numbers of floating point in 16 bit."""
    if isinstance(stored, Tensor):
        return stored.numel() * (2 if stored.is_floating_point() else stored.element_size())
    return sum(map(nbytes, stored)) if isinstance(stored, tuple | list) else 0


def inputs(h: Tensor) -> Tensor:
    """[K, K] fp32, whose rows x have the mean h of x x^T."""
    k = len(h)
    values, vectors = torch.linalg.eigh(h.double())
    turn, _ = torch.linalg.qr(torch.randn(k, k, generator=torch.Generator().manual_seed(0)).double())
    return (k**0.5 * turn @ (vectors * values.clamp_min(0).sqrt()).T).float()


def main() -> None:
    """Read, round, write."""
    name, bits, group, source, target, *hessians = sys.argv[1:]
    method: Any = {"hqq": hqq, "sinq": sinq, "asinq": sinq, "gptqmodel": gptqmodel}[name]
    known = load_file(hessians[0]) if hessians else {}
    decoded, sizes = {}, {}
    for matrix, w in load_file(source).items():
        given = (inputs(known[matrix]),) if hessians else ()
        out, sizes[matrix] = method(w.float(), int(bits), int(group), *given)
        decoded[matrix] = out.float().reshape(w.shape).contiguous()
    save_file(decoded, target)
    Path(target).with_suffix(".json").write_text(json.dumps(sizes))


if __name__ == "__main__":
    main()
