"""`linear` and `experts` as `torch.library` operators, and the choice of backend; what runs a model asks here only.

`torch.ops.trilobite.linear` and `torch.ops.trilobite.experts` have fake implementations, so `torch.compile`
traces through them, and gradients (`gradient.py`). They take weights as stored: the CPU engine runs these, and on a GPU
the reference. `linear_gpu` and `experts_gpu` take what `repack` makes of them, the GPU layout.
`bind_linear` and `bind_experts` make calls that go past the operators, for modules that run one weight on the CPU again
and again. `attend`, where it `attends`, is the CPU engine's attention; `convolve_state`, `delta_state` and `scan_state`,
which change a state in place, are the CPU's alone (`cpu/states.py`).
"""

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.formats.weight import PackedWeight, check, check_unscaled
from trilobite.kernels import gradient, reference
from trilobite.kernels.cpu import dense, engine
from trilobite.kernels.cpu import states as states
from trilobite.kernels.cpu import step as step
from trilobite.kernels.cpu.attention import attend as attend
from trilobite.kernels.cpu.attention import attends as attends
from trilobite.kernels.cpu.attention import reads_prompts as reads_prompts
from trilobite.kernels.cpu.bound import Binding as Binding
from trilobite.kernels.cpu.bound import BoundExperts as BoundExperts
from trilobite.kernels.cpu.bound import BoundLinear as BoundLinear
from trilobite.kernels.cpu.bound import Sums as Sums
from trilobite.kernels.cpu.dense import multiplies as multiplies
from trilobite.kernels.cpu.native import StepCache as StepCache
from trilobite.kernels.cpu.native import StepNode as StepNode
from trilobite.kernels.expert_table import check_routing
from trilobite.kernels.layer import (
    EXACT,
    Codings,
    CpuSettings,
    ExpertsLayer,
    Pack,
    codings_of,
    spec_of,
)
from trilobite.recipe import LatticeFormat

if TYPE_CHECKING:
    from trilobite.kernels.gpu.parts import Parts

TRITON = (3, 6)
"""The oldest that compiles the GPU kernels."""
FLAT = 6
"""Arguments into which operators take a layer apart, the GPU layout's spec aside."""
_lib = torch.library.Library("trilobite", "DEF")
_lib.define(
    "linear(Tensor x, Tensor packed, Tensor? scale, Tensor? lra, Tensor? lrb, Tensor? bias, int rows, "
    "str activations='exact', int threads=0) -> Tensor"
)
_lib.define(
    "lattice_linear(Tensor x, Tensor packed, Tensor lattice, Tensor signs_in, Tensor signs_out, Tensor? lra, "
    "Tensor? lrb, Tensor? bias, int rows, str activations='exact', int threads=0) -> Tensor"
)
_lib.define(
    "experts(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor slab, Tensor table, "
    "Tensor? gate_up_bias, Tensor? down_bias, int intermediate, str activation, "
    "str activations='exact', int threads=0) -> Tensor"
)
_lib.define("dense_linear(Tensor x, Tensor w, Tensor? bias=None) -> Tensor")
_lib.define("dense_heads(Tensor x, Tensor w) -> Tensor")
_lib.define("convolve_state(Tensor x, Tensor(a!) state, Tensor w, Tensor? bias, bool silu) -> Tensor")
_QKV = "Tensor q, Tensor k, Tensor v"
_lib.define(f"delta_state({_QKV}, Tensor decay, Tensor beta, Tensor(a!) state, bool normed) -> Tensor")
_XBC = "Tensor x, Tensor b, Tensor c"
_lib.define(f"scan_state({_XBC}, Tensor step, Tensor decay, Tensor? skip, Tensor(a!) state) -> Tensor")
_lib.define("linear_gpu(Tensor x, Tensor slab, Tensor table, Tensor? bias, int[] spec, int rows) -> Tensor")
_lib.define(
    "experts_gpu(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor slab, Tensor table, "
    "Tensor? gate_up_bias, Tensor? down_bias, int intermediate, str activation, int[] spec) -> Tensor"
)


def _linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor | None,
    lra: Tensor | None,
    lrb: Tensor | None,
    bias: Tensor | None,
    rows: int,
    *_settings: Any,
) -> Tensor:
    w = PackedWeight(shape=(rows, x.shape[-1]), packed=packed, scale=scale, lra=lra, lrb=lrb)
    check(w)
    return reference.linear(x, w, bias)


def _lattice_linear(
    x: Tensor,
    packed: Tensor,
    lattice: Tensor,
    signs_in: Tensor,
    signs_out: Tensor,
    lra: Tensor | None,
    lrb: Tensor | None,
    bias: Tensor | None,
    rows: int,
    *settings: Any,
) -> Tensor:
    w = PackedWeight(
        shape=(rows, x.shape[-1]),
        packed=packed,
        lattice=lattice,
        signs_in=signs_in,
        signs_out=signs_out,
        lra=lra,
        lrb=lrb,
    )
    check(w)
    if x.is_cpu and _runs(w):
        return engine.lattice_linear(x, w, bias, _settings(*settings))
    return reference.linear(x, w, bias)


def _runs(w: PackedWeight) -> bool:
    """Whether the CPU engine multiplies this lattice matrix."""
    fmt = w.format
    return isinstance(fmt, LatticeFormat) and engine.runs(fmt, *w.shape)


def _settings(activations: str = "exact", threads: int = 0) -> CpuSettings:
    """The operators' last arguments, which PyTorch leaves out where they are the default."""
    return CpuSettings(activations, threads or None)


def _layer(x: Tensor, slab: Tensor, table: Tensor, *rest: Any) -> ExpertsLayer:
    """What `_flat` takes apart. rest: biases, intermediate size, activation, and the spec of the GPU layout."""
    gate_up_bias, down_bias, intermediate, activation, *spec = rest
    return ExpertsLayer(
        slab=slab,
        table=table,
        hidden=x.shape[-1],
        intermediate=intermediate,
        activation=activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        codings=codings_of(tuple(spec[0]), 3) if spec else (),
    )


def _flat(layer: ExpertsLayer) -> tuple[Any, ...]:
    """A layer as operators take it."""
    biases = layer.gate_up_bias, layer.down_bias
    return layer.slab, layer.table, *biases, layer.intermediate, layer.activation


def _experts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *flat: Any) -> Tensor:
    check_routing(x, top_k_index, top_k_weights)
    return reference.experts(x, top_k_index, top_k_weights, _layer(x, *flat[:FLAT]))


def _experts_cpu(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *flat: Any) -> Tensor:
    layer = _layer(x, *flat[:FLAT])
    if not engine.runs_experts(layer):
        return _experts(x, top_k_index, top_k_weights, *flat)
    return engine.experts(x, top_k_index, top_k_weights, layer, _settings(*flat[FLAT:]))


def _linear_gpu(
    x: Tensor, slab: Tensor, table: Tensor, bias: Tensor | None, spec: Sequence[int], rows: int
) -> Tensor:
    from trilobite.kernels.gpu import linear  # imports Triton, which takes a while and is not always there

    codings, shapes = codings_of(tuple(spec), 1), ((rows, x.shape[-1]),)
    return linear.linear(x, Pack(slab=slab, table=table, codings=codings, shapes=shapes), bias)


def _experts_gpu(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *flat: Any) -> Tensor:
    from trilobite.kernels.gpu import experts

    return experts.experts(x, top_k_index, top_k_weights, _layer(x, *flat))


def _fake_linear(name: str) -> Callable[..., Tensor]:
    """The result of a linear operator, whose schema says where the number of rows stands."""
    schema = getattr(torch.ops.trilobite, name).default._schema
    at = [a.name for a in schema.arguments].index("rows") - 1
    return lambda x, *others: x.new_empty((*x.shape[:-1], others[at]))


def _fake_experts(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


for _name, _run, _fake in (
    ("linear", _linear, _fake_linear("linear")),
    ("lattice_linear", _lattice_linear, _fake_linear("lattice_linear")),
    ("experts", _experts, _fake_experts),
    ("linear_gpu", _linear_gpu, _fake_linear("linear_gpu")),
    ("experts_gpu", _experts_gpu, _fake_experts),
):
    _lib.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"trilobite::{_name}", _fake, lib=_lib)
torch.library.register_fake(
    "trilobite::dense_linear", lambda x, w, bias=None: x.new_empty((*x.shape[:-1], len(w))), lib=_lib
)
torch.library.register_fake(
    "trilobite::dense_heads", lambda x, w: x.new_empty((*x.shape[:2], w.shape[1])), lib=_lib
)
if engine.available():
    _lib.impl("dense_linear", dense.dense_linear, "CPU")
    _lib.impl("dense_heads", dense.dense_heads, "CPU")
    for _state in (states.convolve_state, states.delta_state, states.scan_state):
        _lib.impl(_state.__name__, _state, "CPU")
    _lib.impl("linear", engine.linear, "CPU")
    _lib.impl("experts", _experts_cpu, "CPU")


def _call(operator: Any, *arguments: Any) -> Tensor:
    """Past autograd where no gradient is asked for: its Python wrapper takes twice the time of the rest of a call."""
    if torch.compiler.is_compiling() or needs_gradient(*arguments):
        return operator(*arguments)  # type: ignore[no-any-return]
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)  # type: ignore[no-any-return]


def needs_gradient(*arguments: Any) -> bool:
    """Whether a backward pass may come back to one of the tensors."""
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments)


def linear(x: Tensor, w: PackedWeight, bias: Tensor | None = None, settings: CpuSettings = EXACT) -> Tensor:
    """y = x (dequant(W) + U V)^T + bias.

    x: [..., K] bf16 | fp16 | fp32    w: [N, K]    bias: [N] or None    returns: [..., N] in x.dtype
    Raises ShapeError when shapes do not fit.
    """
    if x.shape[-1] != w.shape[1]:
        raise ShapeError(f"linear: x has K={x.shape[-1]}, the weight has K={w.shape[1]}")
    check_unscaled(w)
    if w.lattice is not None:
        parts = w.packed, w.lattice, w.signs_in, w.signs_out, w.lra, w.lrb
        return _call(torch.ops.trilobite.lattice_linear, x, *parts, bias, w.shape[0], *_plain(settings))
    stored = w.packed, w.scale, w.lra, w.lrb
    return _call(torch.ops.trilobite.linear, x, *stored, bias, w.shape[0], *_plain(settings))


def _plain(settings: CpuSettings) -> tuple[str, int]:
    """Settings as operators take them."""
    return settings.activations, settings.threads or 0


def experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: ExpertsLayer, settings: CpuSettings = EXACT
) -> Tensor:
    """All routed experts of one MoE layer, as stored or in the GPU layout; arguments as in `reference.experts`.

    returns: [T, H] in x.dtype. Raises ShapeError when shapes do not fit, ArchitectureError or DeviceError.
    """
    if x.shape[-1] != layer.hidden:
        raise ShapeError(f"experts: x is {list(x.shape)}, the experts have H={layer.hidden}")
    inputs = x, top_k_index, top_k_weights
    if layer.codings:
        return _call(torch.ops.trilobite.experts_gpu, *inputs, *_flat(layer), spec_of(layer.codings))
    return _call(torch.ops.trilobite.experts, *inputs, *_flat(layer), *_plain(settings))


def dense_linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """`cpu/dense.py`, where it `multiplies`: y = x W^T + bias for a dense W of few rows and few tokens.

    x: [..., K]    w: [N, K]    bias: [N] or None    returns: [..., N]; all of one dtype. Raises ShapeError.
    """
    return _call(torch.ops.trilobite.dense_linear, x, w, bias)


def dense_heads(x: Tensor, w: Tensor) -> Tensor:
    """`cpu/dense.py`: y[h] = x[h] W[h]^T for a few tokens on the CPU, where the native library is.

    x: [heads, T, K]    w: [heads, N, K], contiguous    returns: [heads, T, N]; all of one dtype. Raises ShapeError.
    """
    return _call(torch.ops.trilobite.dense_heads, x, w)


def bind_linear(w: PackedWeight, bias: Tensor | None, settings: CpuSettings = EXACT) -> BoundLinear | None:
    """A call x -> `linear(x, w, bias)` that checks the weight once, or None where no backend has one.

    Raises ShapeError when the parts do not fit.
    """
    if not engine.available() or not w.packed.is_cpu:
        return None
    if w.lattice is not None:
        check(w)
        if not _runs(w):
            return None
    return BoundLinear(check_unscaled(w), bias, settings)


def bind_experts(layer: ExpertsLayer, settings: CpuSettings = EXACT) -> BoundExperts | None:
    """A call (x, top_k_index, top_k_weights) -> `experts(..., layer)`, or None where no backend has one.

    Raises ShapeError when the parts do not fit.
    """
    if not engine.available() or not layer.slab.is_cpu or not engine.runs_experts(layer):
        return None
    return BoundExperts(layer, settings)


def start_threads() -> int:
    """Let the CPU engine start its threads now, on the cores of the calling thread; how many a call gets."""
    if not engine.available():
        return 0
    engine.measure_read_bandwidth(torch.zeros(4096, dtype=torch.uint8), repeats=1)
    return engine.team(None)


def missing_triton() -> str | None:
    """Why the GPU kernels cannot be compiled, and the remedy; None where Triton is there and new enough."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'trilobite[gpu]'"
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < TRITON:
        needed = ".".join(map(str, TRITON))
        return (
            f"Triton {triton.__version__} is too old, the kernels need {needed}: install torch 2.11 or newer"
        )
    return None


def gpu_layout(weights: Iterable[PackedWeight]) -> bool:
    """Whether these weights shall be repacked: they are on a CUDA device with a Triton that computes their formats.

    Of lattice formats it computes E8P with Hadamard transforms; others stay as they are, for the reference. Raises
    DeviceError when the GPU is too old for the kernels.
    """
    present = iter(weights)  # thousands, of which most callers need the first alone
    first = next(present)
    device = first.packed.device
    if device.type != "cuda" or missing_triton():
        return False
    from trilobite.kernels.gpu.launch import check_device
    from trilobite.kernels.gpu.layout import pack

    check_device(device)
    return all(pack.computes(w.format) for w in (first, *present) if w.lattice is not None)


def repack(rows: Sequence[Sequence[PackedWeight | None]]) -> Pack:
    """Packed weights in the GPU layout: (gate, up, down) of every expert, or the one matrix of a linear layer.

    Raises ShapeError for a format that the GPU kernels do not compute, DeviceError when memory does not suffice.
    """
    from trilobite.kernels.gpu import rotated
    from trilobite.kernels.gpu.layout import pack

    made = pack.repack(rows)
    rotated.upload(w for row in rows for w in row if w is not None)
    return made


def restore(packed: Pack) -> list[list[PackedWeight | None]]:
    """The weights as stored, bit for bit (but for double quantization): inverse of `repack`."""
    from trilobite.kernels.gpu.layout import pack

    return pack.restore(packed)


def arrange(rows: Sequence[Sequence[PackedWeight | None]]) -> tuple[Tensor, Codings, int]:
    """Where `repack` puts what: table [E, P, 10] int64, codings, 32-bit words. Raises ShapeError."""
    from trilobite.kernels.gpu.layout import pack

    return pack.arrange(rows)


def fill(slab: Tensor, table: Tensor, row: Sequence[PackedWeight | None]) -> None:
    """Write one expert in the GPU layout. slab: [words] int32    table: [P, 10] int64 on the CPU, the expert's row."""
    from trilobite.kernels.gpu.layout import pack

    pack.fill(slab, table, row)


def experts_in_parts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: ExpertsLayer) -> "Parts":
    """A call of `experts` in the GPU layout in several, where not all experts are there at a time.

    Raises ShapeError, ArchitectureError or DeviceError.
    """
    from trilobite.kernels.gpu.parts import Parts

    return Parts(x, top_k_index, top_k_weights, layer)


def linear_gpu(x: Tensor, w: Pack, bias: Tensor | None = None) -> Tensor:
    """`linear` on one weight in the GPU layout. Raises ShapeError or DeviceError."""
    ((n, k),) = w.shapes
    if x.shape[-1] != k:
        raise ShapeError(f"linear: x has K={x.shape[-1]}, the weight has K={k}")
    return _call(torch.ops.trilobite.linear_gpu, x, w.slab, w.table, bias, spec_of(w.codings), n)


gradient.register(_lib, restore)
