"""The CPU engine: checks tensors, then hands their addresses to the native library (csrc/).

Everything that could make native code read or write out of bounds is checked before an address leaves:
element types, shapes, devices and contiguity here and in `cpu/matrix.py`, the offsets of an expert table in the
library, for the experts in use.

Two modes of arithmetic. *exact* (the default) sums in fp32 and keeps activations to 22 bits of the largest
value in every 32 or 64 columns (three 8-bit digits; nothing at all is lost of a bfloat16 value down to 2**-14
of it), or, for more tokens on machines with AMX, as sums of bfloat16 numbers: one for bfloat16 inputs, two
for float16 inputs and for results of the activation function, three for float32. *int8* keeps one digit; it
is chosen explicitly, when a model is loaded (`CpuSettings`).
"""

import ctypes
import os
from typing import Any

import torch
from torch import Tensor

from trilobite.errors import ArchitectureError, ShapeError
from trilobite.formats.bitpack import BLOCK
from trilobite.formats.incoherence import factors
from trilobite.formats.weight import PackedWeight
from trilobite.huge_pages import ones
from trilobite.kernels.activation import split
from trilobite.kernels.cpu import native
from trilobite.kernels.cpu.matrix import dense, dtype_code, lattice_matrix, matrix, rotation
from trilobite.kernels.expert_table import Column, check_routing, has_gates, has_lattice
from trilobite.kernels.layer import EXACT, CpuSettings, ExpertsLayer
from trilobite.recipe import CODEBOOKS, TRANSFORMS, LatticeFormat

ACTIVATIONS = {
    "silu": 0,
    "swish": 0,
    "gelu": 1,
    "gelu_new": 2,
    "gelu_pytorch_tanh": 2,
    "gelu_fast": 2,
    "relu": 3,
    "sigmoid": 4,
    "quick_gelu": 5,
    "relu2": 6,
    "tanh": 7,
    "linear": 8,
    "gpt_oss": 9,
    "clamped_silu": 10,
    "silu_clamped": 11,
    "softcapped": 12,
}
"""Forms of activations of the library; others run in the reference."""
DIGITS = {"exact": 3, "int8": 1}
TIERS = (
    "scalar",
    "neon",
    "neon_i8mm",
    "avx2",
    "avx_vnni",
    "avx512",
    "avx512_vnni",
    "avx512_gfni",
    "avx512_bf16",
    "amx",
)
"""Instruction sets, worst first; those of other processors are passed over."""

_lib, _reason = native.load()


def available() -> bool:
    """Whether the native library is loaded."""
    return _lib is not None


def library() -> ctypes.CDLL:
    """The native library; raises ImportError with the reason when there is none."""
    if _lib is None:
        raise ImportError(f"the CPU engine is not available: {_reason}")
    return _lib


def info() -> dict[str, Any]:
    """What `trilobite doctor` prints: available, tier, why not the next better one, threads, reason."""
    cap = os.environ.get("TRILOBITE_ISA")
    known = cap is None or cap in TIERS
    return {
        "available": available(),
        "tier": _lib.trilobite_tier().decode() if _lib else "reference",
        "better_tier": (_lib.trilobite_better_tier().decode() if _lib else "") or "none",
        "threads": team(None),
        "reason": _reason
        if known
        else f"{_reason}; TRILOBITE_ISA={cap} is none of {', '.join(TIERS)}: ignored",
    }


def set_tier(name: str | None) -> str:
    """Cap the instruction set (for tests; users set TRILOBITE_ISA); returns the tier that is now in use."""
    if library().trilobite_set_tier(None if name is None else name.encode()):
        raise ValueError(f"tier {name!r}: expected one of {', '.join(TIERS)}")
    return str(library().trilobite_tier().decode())


def measure_read_bandwidth(data: Tensor | None = None, repeats: int = 5, threads: int | None = None) -> float:
    """Median GB/s at which the pool reads `data` (default: 512 MiB of fresh memory) once."""
    data = ones(512 << 20) if data is None else data
    threads = threads or team(None)
    seconds = sorted(
        library().trilobite_read_seconds(data.data_ptr(), data.nbytes, threads) for _ in range(repeats)
    )
    return float(data.nbytes / seconds[len(seconds) // 2] / 1e9)


def measure_peak(mode: str = "int8", threads: int | None = None, repeats: int = 5) -> float:
    """GMAC/s of the tier's arithmetic for many tokens in a mode: products as it uses them, the best of some runs."""
    threads = threads or team(None)
    return max(float(library().trilobite_peak_macs(DIGITS[mode], threads) / 1e9) for _ in range(repeats))


_max_threads = int(_lib.trilobite_max_threads()) if _lib else torch.get_num_threads()


def team(threads: int | None) -> int:
    """How many threads a call gets that asks for so many; None: as many as torch has now."""
    return min(threads or torch.get_num_threads(), _max_threads)


def linear_bias(bias: Tensor | None, rows: int) -> tuple[Tensor | None, int]:
    """A bias [rows] ready for the library, and the number of its element type. Raises ShapeError."""
    if bias is None:
        return None, 0
    bias, dtype = dense(bias, "linear: bias"), dtype_code(bias, "linear: bias")
    if bias.shape != (rows,):
        raise ShapeError(f"linear: bias is {list(bias.shape)}, expected [{rows}]")
    return bias, dtype


def linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor | None,
    lra: Tensor | None,
    lrb: Tensor | None,
    bias: Tensor | None,
    rows: int,
    activations: str = "exact",
    threads: int = 0,
) -> Tensor:
    """`torch.ops.trilobite.linear` on the CPU. x: [..., K]    returns: [..., rows] in x.dtype."""
    w, _parts = matrix(packed, scale, lra, lrb, (rows, x.shape[-1]))
    bias, bias_dtype = linear_bias(bias, rows)
    address = None if bias is None else bias.data_ptr()
    return run_linear(x, ctypes.addressof(w), rows, address, bias_dtype, DIGITS[activations], threads)


def run_linear(
    x: Tensor, w: int, rows: int, bias: int | None, bias_dtype: int, digits: int, threads: int | None
) -> Tensor:
    """Multiply by a matrix that is checked already. w: address of its `native.MatrixArgs`    bias: address, or None."""
    dtype = dtype_code(x, "linear: x")
    x = dense(x, "linear: x")
    y = x.new_empty((*x.shape[:-1], rows))
    assert _lib is not None
    tokens = x.numel() // x.shape[-1]
    _lib.trilobite_linear(
        x.data_ptr(), dtype, tokens, w, bias, bias_dtype, y.data_ptr(), digits, team(threads)
    )
    return y


def rotate(x: Tensor, signs: Tensor, *, adjoint: bool = False) -> Tensor:
    """T x along the last dimension, or T^T x: `incoherence.Spin` of a Hadamard transform, on one thread.

    x: [..., n] fp32    signs: as stored, uint8 [ceil(n/8)], or [2n] when tuned
    Raises ShapeError where there is no Hadamard matrix of order n, and for another number of signs.
    """
    n = x.shape[-1]
    if signs.numel() not in (-(-n // 8), 2 * n):
        raise ShapeError(f"rotate: {signs.numel()} bytes of signs for vectors of {n} values")
    y = dense(x, "rotate: x", torch.float32).clone()
    signs, tuned = dense(signs, "rotate: signs", torch.uint8), int(signs.numel() == 2 * n)
    library().trilobite_rotate(
        rotation(n), signs.data_ptr(), tuned, int(adjoint), y.data_ptr(), x.numel() // n
    )
    return y


def runs(fmt: LatticeFormat, n: int, k: int) -> bool:
    """Whether the library multiplies [n, k] matrices of a lattice format; the reference does it otherwise."""
    few = all(sum(m & (m - 1) > 0 for m in factors(side) or ()) <= native.CORES for side in (n, k))
    return available() and fmt.codebook == "e8p" and fmt.transform == "hadamard" and k % BLOCK == 0 and few


def runs_experts(layer: ExpertsLayer) -> bool:
    """Whether the library runs a layer: it has the activation, and `runs` holds for all matrices in a lattice format."""
    if split(layer.activation)[0] not in ACTIVATIONS:
        return False
    if not has_lattice(layer.table):
        return True
    rows = layer.table[layer.table[..., Column.LATTICE] >= 0]
    kinds = {(c, t) for c, t in rows[:, [Column.CODEBOOK, Column.TRANSFORM]].tolist()}
    formats = (LatticeFormat(codebook=CODEBOOKS[c], bits=2, transform=TRANSFORMS[t]) for c, t in kinds)
    shape = layer.intermediate, layer.hidden
    return all(runs(fmt, n, k) for fmt in formats for n, k in (shape, shape[::-1]))


def lattice_linear(x: Tensor, w: PackedWeight, bias: Tensor | None, settings: CpuSettings = EXACT) -> Tensor:
    """`torch.ops.trilobite.lattice_linear` on the CPU, for a weight that fits its shape and that `runs` accepts.

    x: [..., K]    bias: [N] or None    returns: [..., N] in x.dtype
    """
    stored, _parts = lattice_matrix(w)
    bias, bias_dtype = linear_bias(bias, w.shape[0])
    address = None if bias is None else bias.data_ptr()
    chosen = DIGITS[settings.activations], settings.threads
    return run_linear(x, ctypes.addressof(stored), w.shape[0], address, bias_dtype, *chosen)


def _bias(bias: Tensor | None, shape: tuple[int, int], name: str) -> Tensor | None:
    if bias is None:
        return None
    if bias.shape != shape:
        raise ShapeError(f"experts: {name} is {list(bias.shape)}, expected {list(shape)}")
    return dense(bias, f"experts: {name}")


def experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: ExpertsLayer, settings: CpuSettings = EXACT
) -> Tensor:
    """`torch.ops.trilobite.experts` on the CPU; arguments as in `reference.experts`.

    returns: [T, H] in x.dtype
    """
    args, _parts = experts_args(layer, settings)
    return run_experts(x, top_k_index, top_k_weights, args, settings.threads)


def experts_args(
    layer: ExpertsLayer, settings: CpuSettings
) -> tuple[native.ExpertsArgs, tuple[Tensor | None, ...]]:
    """All that a call of `experts` says of the layer, and the tensors that its addresses belong to.

    Raises ShapeError or ArchitectureError.
    """
    form, numbers = split(layer.activation)
    if form not in ACTIVATIONS:
        raise ArchitectureError(
            f"activation {layer.activation!r} is not one of the CPU engine: {', '.join(ACTIVATIONS)}"
        )
    table, hidden, intermediate = layer.table, layer.hidden, layer.intermediate
    if table.dim() != 3 or table.shape[1:] != (3, len(Column)) or table.dtype != torch.int64:
        raise ShapeError(
            f"experts: table is {list(table.shape)} {table.dtype}, expected [E, 3, {len(Column)}] int64"
        )
    count = table.shape[0]
    slab, table = dense(layer.slab, "experts: slab", torch.uint8), dense(table, "experts: table")
    gated = has_gates(table)
    gate_up_bias = _bias(layer.gate_up_bias, (count, (1 + gated) * intermediate), "gate_up_bias")
    down_bias = _bias(layer.down_bias, (count, hidden), "down_bias")
    if gate_up_bias is not None and down_bias is not None and gate_up_bias.dtype != down_bias.dtype:
        gate_up_bias, down_bias = gate_up_bias.float(), down_bias.float()
    some_bias = gate_up_bias if gate_up_bias is not None else down_bias
    args = native.ExpertsArgs(
        slab=slab.data_ptr(),
        table=table.data_ptr(),
        gate_up_bias=None if gate_up_bias is None else gate_up_bias.data_ptr(),
        down_bias=None if down_bias is None else down_bias.data_ptr(),
        bias_dtype=0 if some_bias is None else dtype_code(some_bias, "experts: bias"),
        experts=count,
        hidden=hidden,
        intermediate=intermediate,
        slab_bytes=slab.numel(),
        activation=ACTIVATIONS[form],
        numbers=(*numbers, 0.0, 0.0)[:2],
        gated=int(gated),
        digits=DIGITS[settings.activations],
    )
    if has_lattice(table):
        args.rotate_hidden, args.rotate_intermediate = rotation(hidden), rotation(intermediate)
    return args, (slab, table, gate_up_bias, down_bias)


def experts_call(
    checked: native.ExpertsArgs, x: Tensor, index: Tensor, weights: Tensor, y: Tensor
) -> native.ExpertsArgs:
    """A checked layer on these tensors: dense, y like x, their routing checked too. Raises ShapeError."""
    if x.shape[1] != checked.hidden:
        raise ShapeError(f"experts: x is {list(x.shape)}, the experts have H={checked.hidden}")
    args = native.ExpertsArgs.from_buffer_copy(checked)
    args.x, args.index, args.weights = x.data_ptr(), index.data_ptr(), weights.data_ptr()
    args.y, args.dtype = y.data_ptr(), dtype_code(x, "experts: x")
    args.weights_dtype = dtype_code(weights, "experts: top_k_weights")
    args.index_bytes, (args.tokens, args.active) = index.element_size(), index.shape
    return args


def run_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    checked: native.ExpertsArgs,
    threads: int | None,
    sums: Tensor | None = None,
) -> Tensor:
    """Run a layer that is checked already. `checked` stays as it is: several threads may use it at a time.

    sums: [T, H] fp32, what calls with earlier experts added up, zeros at first; this call adds to it and returns the
    total. Calls in ascending order of experts give the bits of one call with all of them; not for lattice formats
    """
    check_routing(x, top_k_index, top_k_weights)
    if sums is not None and (
        sums.shape != x.shape or not sums.is_contiguous() or sums.dtype != torch.float32
    ):
        raise ShapeError(
            f"experts: sums are {list(sums.shape)} {sums.dtype}, expected {list(x.shape)} float32"
        )
    x, index = dense(x, "experts: x"), dense(top_k_index, "experts: top_k_index")
    weights = dense(top_k_weights, "experts: top_k_weights")
    y = torch.empty_like(x)
    args = experts_call(checked, x, index, weights, y)
    if index.numel() == 0:
        return y.zero_()
    args.threads, args.sums = team(threads), None if sums is None else sums.data_ptr()
    assert _lib is not None
    _lib.trilobite_experts(ctypes.addressof(args))
    return y
