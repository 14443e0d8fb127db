"""The CPU engine: checks tensors, then hands their addresses to the native library (csrc/).

Everything that could make native code read or write out of bounds is checked before an address leaves:
element types, shapes, devices and contiguity here, the offsets of an expert table in the library, for the
experts in use.

Two modes of arithmetic. *exact* (the default) sums in fp32 and keeps activations to 22 bits of the largest
value in every 32 or 64 columns (three 8-bit digits; nothing at all is lost of a bfloat16 value down to 2**-14
of it), or, for more tokens on machines with AMX, as sums of bfloat16 numbers: one for bfloat16 inputs, two
for float16 inputs and for results of the activation function, three for float32. *int8* keeps one digit; it
is chosen explicitly, by `set_activations` or `activations`.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from trilobite.errors import ArchitectureError, ShapeError
from trilobite.formats.affine import packed_shape, scale_shape, tile_bytes
from trilobite.formats.bitpack import BITS, BLOCK, ROWS
from trilobite.formats.incoherence import factors, hadamard_matrix
from trilobite.formats.weight import LR_GROUP, PackedWeight, factor_shape
from trilobite.kernels import native
from trilobite.kernels.expert_table import Column, check_routing, has_lattice
from trilobite.recipe import CODEBOOKS, COMPENSATORS, TRANSFORMS, Format, LatticeFormat

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
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
}
"""Gate activations of the library; others run in the reference."""
DIGITS = {"exact": 3, "int8": 1}
TIERS = ("scalar", "neon", "avx2", "avx512", "avx512_vnni", "amx")

_lib, _reason = native.load()
_digits = DIGITS["exact"]


def available() -> bool:
    """Whether the native library is loaded."""
    return _lib is not None


def library() -> ctypes.CDLL:
    """The native library; raises ImportError with the reason when there is none."""
    if _lib is None:
        raise ImportError(f"the CPU engine is not available: {_reason}")
    return _lib


def info() -> dict[str, Any]:
    """What `trilobite doctor` prints: available, tier, threads, activations, reason."""
    cap = os.environ.get("TRILOBITE_ISA")
    known = cap is None or cap in TIERS
    return {
        "available": available(),
        "tier": _lib.trilobite_tier().decode() if _lib else "reference",
        "threads": _threads(),
        "activations": activation_mode(),
        "reason": _reason
        if known
        else f"{_reason}; TRILOBITE_ISA={cap} is none of {', '.join(TIERS)}: ignored",
    }


def set_activations(mode: str) -> None:
    """Choose how activations enter the products, for the whole process: "exact" or "int8"."""
    global _digits
    if mode not in DIGITS:
        raise ValueError(f"activations {mode!r}: expected one of {', '.join(DIGITS)}")
    _digits = DIGITS[mode]


def activation_mode() -> str:
    """The mode in force: "exact" or "int8"."""
    return next(name for name, digits in DIGITS.items() if digits == _digits)


@contextmanager
def activations(mode: str) -> Iterator[None]:
    """`set_activations` for the length of a with block."""
    before = activation_mode()
    set_activations(mode)
    try:
        yield
    finally:
        set_activations(before)


def set_tier(name: str | None) -> str:
    """Cap the instruction set (for tests; users set TRILOBITE_ISA); returns the tier that is now in use."""
    if library().trilobite_set_tier(None if name is None else name.encode()):
        raise ValueError(f"tier {name!r}: expected one of {', '.join(TIERS)}")
    return str(library().trilobite_tier().decode())


def set_threads(count: int | None) -> None:
    """Threads of the engine, whatever torch uses; None (the default): as many as torch.

    Affinity, the cgroup's quota and TRILOBITE_THREADS stay the upper limit.
    """
    global _wanted_threads
    if count is not None and count < 1:
        raise ValueError(f"{count} threads; expected at least 1")
    _wanted_threads = count


def measure_read_bandwidth(data: Tensor | None = None, repeats: int = 5, threads: int | None = None) -> float:
    """Median GB/s at which the pool reads `data` (default: 512 MiB of fresh memory) once."""
    data = torch.ones(512 << 20, dtype=torch.uint8) if data is None else data
    threads = threads or _threads()
    seconds = sorted(
        library().trilobite_read_seconds(data.data_ptr(), data.nbytes, threads) for _ in range(repeats)
    )
    return float(data.nbytes / seconds[len(seconds) // 2] / 1e9)


def measure_peak(mode: str = "int8", threads: int | None = None) -> float:
    """GMAC/s of the tier's arithmetic for many tokens in a mode: bfloat16 or byte products, as it uses them."""
    return float(library().trilobite_peak_macs(DIGITS[mode], threads or _threads()) / 1e9)


_max_threads = int(_lib.trilobite_max_threads()) if _lib else torch.get_num_threads()
_wanted_threads: int | None = None


def _threads() -> int:
    return min(_wanted_threads or torch.get_num_threads(), _max_threads)


def _raise() -> None:
    raise ShapeError(library().trilobite_error().decode())


def _dtype(t: Tensor, name: str) -> int:
    code = DTYPES.get(t.dtype)
    if code is None:
        raise ShapeError(f"{name} is {t.dtype}; the operators take float32, float16 and bfloat16")
    return code


def _dense(t: Tensor, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """`t` on the CPU and contiguous."""
    if not t.is_cpu:
        raise ShapeError(f"{name} is on {t.device}, the other tensors are on the CPU; move all to one device")
    if dtype is not None and t.dtype != dtype:
        raise ShapeError(f"{name} is {t.dtype}, expected {dtype}")
    return t if t.is_contiguous() else t.contiguous()


@lru_cache(maxsize=1024)
def _format(
    packed: tuple[int, ...], rows: int, k: int, scale: tuple[int, ...] | None
) -> tuple[int, int, int, int]:
    """Shapes of the stored tensors -> (bits, group, symmetric, double quant). Raises ShapeError."""
    if len(packed) != 3 or packed[1] == 0 or k % packed[1] or rows < 1:
        raise ShapeError(
            f"linear: packed tensor of shape {list(packed)} does not belong to a [{rows}, {k}] matrix"
        )
    group, double = k // packed[1], scale is not None
    formats = (
        Format(bits=b, group=group, symmetric=s, double_quant=double) for b in BITS for s in (False, True)
    )
    fmt = next((f for f in formats if group % BLOCK == 0 and tile_bytes(f, k) == packed[2]), None)
    if fmt is None:
        raise ShapeError(
            f"linear: tiles of {packed[2]} bytes for groups of {group} columns belong to no known format"
        )
    expected = packed_shape(fmt, rows, k)
    if packed != expected:
        raise ShapeError(
            f"linear: packed codes are {list(packed)}, a [{rows}, {k}] matrix needs {list(expected)}"
        )
    if scale is not None and scale != scale_shape(fmt, rows, k):
        raise ShapeError(f"linear: second-level scales are {list(scale)}, not {scale_shape(fmt, rows, k)}")
    return fmt.bits, group, int(fmt.symmetric), int(double)


@lru_cache(maxsize=1024)
def _rank_bits(lra: tuple[int, ...], lrb: tuple[int, ...], half: bool, n: int, k: int) -> int:
    """Shapes of the compensator factors -> bits. Raises ShapeError."""
    kinds = ("fp16",) if half else ("int3", "int8")
    for kind in kinds:
        if lra == factor_shape(kind, lra[0], n) and lrb == factor_shape(kind, lra[0], k):
            return COMPENSATORS[kind]
    raise ShapeError(
        f"linear: compensator factors {list(lra)} and {list(lrb)} do not fit a [{n}, {k}] matrix "
        f"(groups of {LR_GROUP} values of int3 or int8, or fp16)"
    )


def _factors(
    lra: Tensor | None, lrb: Tensor | None, n: int, k: int
) -> tuple[Tensor | None, Tensor | None, int]:
    if lra is None or lrb is None:
        if lra is not lrb:
            raise ShapeError("linear: one compensator factor is missing; both or none belong to a matrix")
        return None, None, 0
    half = lra.dtype == torch.float16
    dtype = torch.float16 if half else torch.uint8
    lra, lrb = _dense(lra, "lra", dtype), _dense(lrb, "lrb", dtype)
    return lra, lrb, _rank_bits(tuple(lra.shape), tuple(lrb.shape), half, n, k)


def matrix(
    packed: Tensor, scale: Tensor | None, lra: Tensor | None, lrb: Tensor | None, shape: tuple[int, int]
) -> tuple[native.Matrix, tuple[Tensor | None, ...]]:
    """A stored matrix [N, K] as the library takes it, and the tensors that its addresses belong to.

    Raises ShapeError when the parts do not fit each other or the shape.
    """
    rows, k = shape
    packed = _dense(packed, "linear: packed", torch.uint8)
    scale_size = None
    if scale is not None:
        scale = _dense(scale, "linear: scale", torch.uint8)
        scale_size = tuple(scale.shape)
    bits, group, symmetric, double = _format(tuple(packed.shape), rows, k, scale_size)
    lra, lrb, rank_bits = _factors(lra, lrb, rows, k)
    rank = 0 if lra is None else lra.shape[0]
    parts = (packed, scale, lra, lrb)
    addresses = (None if t is None else t.data_ptr() for t in parts)
    return native.Matrix(*addresses, rows, k, rank, rank_bits, bits, group, symmetric, double), parts


def linear_bias(bias: Tensor | None, rows: int) -> tuple[Tensor | None, int]:
    """A bias [rows] ready for the library, and the number of its element type. Raises ShapeError."""
    if bias is None:
        return None, 0
    bias, dtype = _dense(bias, "linear: bias"), _dtype(bias, "linear: bias")
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
) -> Tensor:
    """`torch.ops.trilobite.linear` on the CPU. x: [..., K]    returns: [..., rows] in x.dtype."""
    w, _parts = matrix(packed, scale, lra, lrb, (rows, x.shape[-1]))
    bias, bias_dtype = linear_bias(bias, rows)
    return run_linear(x, ctypes.addressof(w), rows, None if bias is None else bias.data_ptr(), bias_dtype)


def run_linear(x: Tensor, w: int, rows: int, bias: int | None, bias_dtype: int) -> Tensor:
    """Multiply by a matrix that is checked already. w: address of its `native.Matrix`    bias: address, or None."""
    dtype = _dtype(x, "linear: x")
    x = _dense(x, "linear: x")
    y = x.new_empty((*x.shape[:-1], rows))
    assert _lib is not None
    tokens = x.numel() // x.shape[-1]
    if _lib.trilobite_linear(
        x.data_ptr(), dtype, tokens, w, bias, bias_dtype, y.data_ptr(), _digits, _threads()
    ):
        _raise()
    return y


class _Rotation:
    """The Hadamard matrix of order n, as the library takes it; keeps the memory of its cores alive."""

    def __init__(self, n: int) -> None:
        """Raises ShapeError where no Hadamard matrix is known."""
        orders = factors(n)
        if orders is None:
            raise ShapeError(f"no Hadamard matrix of order {n} is known here; use the fourier transform")
        cores = [m for m in orders if m & (m - 1)]
        self._cores = [hadamard_matrix(m).float().contiguous() for m in cores]
        order = (ctypes.c_int64 * native.CORES)(*cores)
        core = (ctypes.c_void_p * native.CORES)(*(h.data_ptr() for h in self._cores))
        self._structure = native.Rotation(n, len(cores), order, core)
        self.address = ctypes.addressof(self._structure)


@cache  # their addresses are given away
def _rotation(n: int) -> _Rotation:
    return _Rotation(n)


def rotate(x: Tensor, signs: Tensor, *, adjoint: bool = False) -> Tensor:
    """T x along the last dimension, or T^T x: `incoherence.Spin` of a Hadamard transform, on one thread.

    x: [..., n] fp32    signs: as stored, uint8 [ceil(n/8)], or [2n] when tuned
    Raises ShapeError where there is no Hadamard matrix of order n, and for another number of signs.
    """
    n = x.shape[-1]
    if signs.numel() not in (-(-n // 8), 2 * n):
        raise ShapeError(f"rotate: {signs.numel()} bytes of signs for vectors of {n} values")
    y = _dense(x, "rotate: x", torch.float32).clone()
    signs, tuned = _dense(signs, "rotate: signs", torch.uint8), int(signs.numel() == 2 * n)
    rotation = _rotation(n)
    if library().trilobite_rotate(
        rotation.address, signs.data_ptr(), tuned, int(adjoint), y.data_ptr(), x.numel() // n
    ):
        _raise()
    return y


def runs(fmt: LatticeFormat, n: int, k: int) -> bool:
    """Whether the library multiplies [n, k] matrices of a lattice format; the reference does it otherwise."""
    few = all(sum(m & (m - 1) > 0 for m in factors(side) or ()) <= native.CORES for side in (n, k))
    return available() and fmt.codebook == "e8p" and fmt.transform == "hadamard" and k % BLOCK == 0 and few


def runs_experts(table: Tensor, hidden: int, intermediate: int) -> bool:
    """Whether `runs` holds for all matrices of a table that are in a lattice format. table: [E, 3, 16] int64."""
    rows = table[table[..., Column.LATTICE] >= 0]
    kinds = {(c, t) for c, t in rows[:, [Column.CODEBOOK, Column.TRANSFORM]].tolist()}
    formats = (LatticeFormat(codebook=CODEBOOKS[c], bits=2, transform=TRANSFORMS[t]) for c, t in kinds)
    sides = ((hidden, intermediate), (intermediate, hidden))
    return all(runs(fmt, n, k) for fmt in formats for n, k in sides)


def lattice_matrix(w: PackedWeight) -> tuple[native.Matrix, tuple[Tensor | None, ...]]:
    """A stored lattice matrix as the library takes it, and the tensors that its addresses belong to.

    w: fits its shape, and `runs` accepts its format.
    """
    (n, k), dense = w.shape, []
    for name, t in (
        ("packed", w.packed),
        ("lattice", w.lattice),
        ("signs_in", w.signs_in),
        ("signs_out", w.signs_out),
    ):
        assert t is not None
        dense.append(_dense(t, f"linear: {name}", torch.uint8))
    packed, record, signs_in, signs_out = dense
    lra, lrb, rank_bits = _factors(w.lra, w.lrb, n, k)
    found = native.Matrix(
        packed=packed.data_ptr(),
        lra=None if lra is None else lra.data_ptr(),
        lrb=None if lrb is None else lrb.data_ptr(),
        n=n,
        k=k,
        rank=w.rank,
        rank_bits=rank_bits,
        bits=packed.shape[2] // ROWS,
        lattice=record.data_ptr(),
        signs_in=signs_in.data_ptr(),
        signs_out=signs_out.data_ptr(),
        tuned=int(signs_in.numel() == 2 * k),
        rotate_in=_rotation(k).address,
        rotate_out=_rotation(n).address,
    )
    return found, (*dense, lra, lrb)


def lattice_linear(x: Tensor, w: PackedWeight, bias: Tensor | None) -> Tensor:
    """`torch.ops.trilobite.lattice_linear` on the CPU, for a weight that fits its shape and that `runs` accepts.

    x: [..., K]    bias: [N] or None    returns: [..., N] in x.dtype
    """
    found, _parts = lattice_matrix(w)
    bias, bias_dtype = linear_bias(bias, w.shape[0])
    address = None if bias is None else bias.data_ptr()
    return run_linear(x, ctypes.addressof(found), w.shape[0], address, bias_dtype)


def _bias(bias: Tensor | None, shape: tuple[int, int], name: str) -> Tensor | None:
    if bias is None:
        return None
    if bias.shape != shape:
        raise ShapeError(f"experts: {name} is {list(bias.shape)}, expected {list(shape)}")
    return _dense(bias, f"experts: {name}")


def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    slab: Tensor,
    table: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    intermediate: int,
    activation: str,
) -> Tensor:
    """`torch.ops.trilobite.experts` on the CPU; arguments as in `reference.experts`.

    returns: [T, H] in x.dtype
    """
    layer, _parts = experts_layer(
        slab, table, gate_up_bias, down_bias, (x.shape[-1], intermediate), activation
    )
    return run_experts(x, top_k_index, top_k_weights, layer)


def experts_layer(
    slab: Tensor,
    table: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    sizes: tuple[int, int],
    activation: str,
) -> tuple[native.ExpertsArgs, tuple[Tensor | None, ...]]:
    """All that a call of `experts` says of the layer, and the tensors that its addresses belong to.

    sizes: (H, I)    Raises ShapeError or ArchitectureError.
    """
    if activation not in ACTIVATIONS:
        raise ArchitectureError(
            f"activation {activation!r} is not one of the CPU engine: {', '.join(ACTIVATIONS)}"
        )
    if table.dim() != 3 or table.shape[1:] != (3, len(Column)) or table.dtype != torch.int64:
        raise ShapeError(
            f"experts: table is {list(table.shape)} {table.dtype}, expected [E, 3, {len(Column)}] int64"
        )
    (hidden, intermediate), count = sizes, table.shape[0]
    slab, table = _dense(slab, "experts: slab", torch.uint8), _dense(table, "experts: table")
    gate_up_bias = _bias(gate_up_bias, (count, 2 * intermediate), "gate_up_bias")
    down_bias = _bias(down_bias, (count, hidden), "down_bias")
    if gate_up_bias is not None and down_bias is not None and gate_up_bias.dtype != down_bias.dtype:
        gate_up_bias, down_bias = gate_up_bias.float(), down_bias.float()
    some_bias = gate_up_bias if gate_up_bias is not None else down_bias
    layer = native.ExpertsArgs(
        slab=slab.data_ptr(),
        table=table.data_ptr(),
        gate_up_bias=None if gate_up_bias is None else gate_up_bias.data_ptr(),
        down_bias=None if down_bias is None else down_bias.data_ptr(),
        bias_dtype=0 if some_bias is None else _dtype(some_bias, "experts: bias"),
        experts=count,
        hidden=hidden,
        intermediate=intermediate,
        slab_bytes=slab.numel(),
        activation=ACTIVATIONS[activation],
    )
    if has_lattice(table):
        layer.rotate_hidden, layer.rotate_intermediate = (_rotation(n).address for n in sizes)
    return layer, (slab, table, gate_up_bias, down_bias)


def run_experts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: native.ExpertsArgs) -> Tensor:
    """Run a layer that is checked already. `layer` stays as it is: several threads may use it at a time."""
    check_routing(x, top_k_index, top_k_weights)
    if x.shape[1] != layer.hidden:
        raise ShapeError(f"experts: x is {list(x.shape)}, the experts have H={layer.hidden}")
    dtype, weights_dtype = _dtype(x, "experts: x"), _dtype(top_k_weights, "experts: top_k_weights")
    x, index = _dense(x, "experts: x"), _dense(top_k_index, "experts: top_k_index")
    weights = _dense(top_k_weights, "experts: top_k_weights")
    if index.numel() == 0:
        return torch.zeros_like(x)
    y = torch.empty_like(x)
    args = native.ExpertsArgs.from_buffer_copy(layer)
    args.x, args.index, args.weights = x.data_ptr(), index.data_ptr(), weights.data_ptr()
    args.y, args.dtype, args.weights_dtype = y.data_ptr(), dtype, weights_dtype
    args.index_bytes, (args.tokens, args.active) = index.element_size(), index.shape
    args.digits, args.threads = _digits, _threads()
    assert _lib is not None
    if _lib.trilobite_experts(ctypes.addressof(args)):
        _raise()
    return y
