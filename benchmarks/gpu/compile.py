"""Compile every shipped configuration of the GPU kernels, without a GPU: registers, spills, shared memory.

    python -m benchmarks.gpu.compile [--arch 80,89,90] [--quick] [--markdown docs/gpu.md]

The launches are recorded from calls of the operators on meta tensors (so these are the kernels that run, not a list
that somebody keeps), one call for every tile of the tables, format and type; then Triton compiles each for each
architecture with the assembler in its own wheel, and the machine code is taken apart. `instr/weight` counts, in the
loop over K, the instructions that a thread executes for each weight that it decodes. Exit status 1 if anything spills,
or takes more shared memory than consumer GPUs have. The last line is JSON.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import track
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.lib.markdown import insert, table
from trilobite.formats.lattice import LatticeRecord
from trilobite.formats.weight import PackedWeight, factor_shape, stored_shapes
from trilobite.kernels.gpu import tuning as triton_tuning
from trilobite.kernels.gpu.device import gate_up as triton_gate_up
from trilobite.kernels.gpu.device import hadamard as triton_hadamard
from trilobite.kernels.gpu.device import lattice as triton_lattice
from trilobite.kernels.gpu.device import product as triton_product
from trilobite.kernels.gpu.device import routing as triton_routing
from trilobite.kernels.gpu.experts import experts
from trilobite.kernels.gpu.launch import Launch, recording
from trilobite.kernels.gpu.layout.pack import coding
from trilobite.kernels.gpu.linear import linear
from trilobite.kernels.layer import Pack, PackColumn
from trilobite.measure.gpu import experts_layer
from trilobite.measure.shapes import DEEPSEEK, MIXTRAL, ExpertsShape
from trilobite.recipe import AnyFormat, LatticeFormat, parse_format

ELEPHANTS = ("int4-channel-sym", "int8-channel-sym")
"""The per-channel formats of the elephants paper."""
LATTICES = ("e8p-1", "e8p-2", "e8p-3", "e8p-4")
PRESETS = ("int3-g64", "int4-g64", "int8-g64", "int2-g64")
OTHERS = ("int3-g64-sym", "int3-g32", "int3-g128", "int2-g32", "int2-g16", "int3-channel", "int4-g32-sym")
TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
STDERR = Console(stderr=True)
CONSUMER_SHARED = 99 << 10
"""Bytes of shared memory that a program may have on sm_86 and sm_89."""
UNSPECIALIZED = "S"
"""The number of slots: kernels are not compiled anew for its multiples of 16, nor for one."""
GPT_OSS = ExpertsShape(name="gpt-oss-120b", experts=128, active=4, hidden=2880, intermediate=2880)
"""Many experts, biases, an activation of its own, and rows that are no multiple of 128."""
KERNELS = {
    k.fn.__name__: k
    for k in (
        triton_product.product,
        triton_gate_up.gate_up,
        triton_gate_up.activate,
        triton_lattice.lattice_product,
        triton_lattice.compensate,
        triton_hadamard.spin,
        triton_hadamard.spin_back,
        triton_product.reduce,
        triton_routing.route,
        triton_routing.combine,
    )
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kernel as the compiler gets it; hashable and picklable."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    warps: int
    stages: int
    registers: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one variant became on one architecture."""

    registers: int
    spilled: int
    shared: int
    per_weight: float


def meta_weight(n: int, k: int, fmt: AnyFormat, rank: int, kind: str) -> PackedWeight:
    """A packed weight without data, but for the record of a lattice format."""
    shapes = stored_shapes(fmt, n, k)
    if rank:
        shapes |= {"lra": factor_shape(kind, rank, n), "lrb": factor_shape(kind, rank, k)}
    dtypes = dict.fromkeys(("lra", "lrb"), torch.float16 if kind == "fp16" else torch.uint8)
    parts: dict[str, Any] = {
        name: torch.empty(shape, dtype=dtypes.get(name, torch.uint8), device="meta")
        for name, shape in shapes.items()
    }
    if isinstance(fmt, LatticeFormat):
        parts["lattice"] = LatticeRecord(format=fmt, scale=1.0, second=float(fmt.two_stages)).to_tensor()
    return PackedWeight(shape=(n, k), **parts)


def meta_pack(weights: list[PackedWeight], count: int) -> Pack:
    """`count` times these matrices in the GPU layout, without data."""
    return Pack(
        slab=torch.empty(1 << 20, dtype=torch.int32, device="meta"),
        table=torch.empty((count, len(weights), len(PackColumn)), dtype=torch.int64, device="meta"),
        codings=(tuple(coding(w) for w in weights),),
        shapes=[w.shape for w in weights],
    )


def tokens_of(arch: str) -> list[int]:
    """One number of rows for every combination of tiles that occurs, and a single one: it takes forms of its own."""
    names = triton_tuning.general(f"sm_{arch}")
    tiles = [t for op in triton_tuning.OPERATIONS for t in triton_tuning.tiles_of(op, names)[0]]
    return sorted({1, *(min(t.tokens, 1024) for t in tiles)})


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer of a model in some format, without data: its operators on so many tokens."""

    layer: ExpertsShape
    format: AnyFormat
    rank: int
    kind: str
    dtype: torch.dtype

    def linear(self, rows: int) -> None:
        """An expert's down projection as a linear layer."""
        n, k = self.layer.hidden, self.layer.intermediate
        w = meta_weight(n, k, self.format, self.rank, self.kind)
        linear(self._empty(rows, k), meta_pack([w], 1), None)

    def experts(self, tokens: int) -> None:
        e, h, i = self.layer.experts, self.layer.hidden, self.layer.intermediate
        up, down = (meta_weight(*s, self.format, self.rank, self.kind) for s in ((i, h), (h, i)))
        layer = experts_layer(meta_pack([up, up, down], e))
        if self.layer == GPT_OSS:
            gate_up, down_bias = self._empty(e, 2 * i), self._empty(e, h)
            layer = replace(layer, activation="gpt_oss", gate_up_bias=gate_up, down_bias=down_bias)
        index = torch.empty((tokens, self.layer.active), dtype=torch.int64, device="meta")
        experts(self._empty(tokens, h), index, self._empty(tokens, self.layer.active), layer)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")


def record(
    arch: str, fmt: AnyFormat, rank: int, kind: str, dtype: torch.dtype, layer: ExpertsShape = MIXTRAL
) -> Iterator[Variant]:
    """The launches of both operators at every size that the tables of an architecture distinguish."""
    found: dict[Variant, None] = {}
    shape = Shape(layer=layer, format=fmt, rank=rank, kind=kind, dtype=dtype)
    with (
        triton_tuning.pretending(triton_tuning.general(f"sm_{arch}")),
        recording(lambda call: found.setdefault(variant(call)), capability=divmod(int(arch), 10)),
    ):
        for each in tokens_of(arch):
            shape.linear(each)
            shape.experts(max(1, each * layer.experts // layer.active) if each > 1 else 1)
    yield from found


def variant(call: Launch) -> Variant:
    """What Triton's launcher would make of the arguments: types, alignment, integers that are one."""
    signature, constants, aligned = {}, dict(call.constants), []
    for name, value in call.arguments.items():
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            aligned.append(name)
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and name != UNSPECIALIZED:
            constants[name] = 1
        else:
            signature[name] = "i32"
            if value % 16 == 0 and name != UNSPECIALIZED:
                aligned.append(name)
    names = KERNELS[call.kernel.fn.__name__].arg_names
    return Variant(
        kernel=call.kernel.fn.__name__,
        signature=tuple((n, signature.get(n, "constexpr")) for n in names),
        constants=tuple((n, constants[n]) for n in names if n in constants),
        aligned=tuple(n for n in names if n in aligned),
        warps=call.warps,
        stages=call.stages,
        registers=call.registers,
    )


def compile_one(v: Variant, arch: str) -> Report:
    """Compile a variant for sm_<arch> and take its machine code apart."""
    kernel = KERNELS[v.kernel]
    position = {name: i for i, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature=dict(v.signature),
        constexprs={(position[n],): c for n, c in v.constants},
        attrs={(position[n],): [["tt.divisibility", 16]] for n in v.aligned},
    )
    options = {"num_warps": v.warps, "num_stages": v.stages, "enable_fp_fusion": True}
    if v.registers:
        options["maxnreg"] = v.registers
    made = triton.compile(source, target=GPUTarget("cuda", int(arch), 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _run(tools / "cuobjdump", "-res-usage", file.name)
        code = _run(tools / "nvdisasm", file.name)
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    spilled = used["STACK"] + used["LOCAL"] + len(re.findall(r"\b(?:STL|LDL)\b", code))
    return Report(
        registers=used["REG"], spilled=spilled, shared=made.metadata.shared, per_weight=_per_weight(v, code)
    )


def _run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _per_weight(v: Variant, code: str) -> float:
    """Instructions of the longest loop that no other loop contains, by the weights that a thread decodes in it."""
    constants = dict(v.constants)
    if v.kernel not in ("product", "gate_up", "lattice_product") or constants.get("RANK_BITS"):
        return 0.0  # with a compensator, the longest loop is another one
    label: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[int] = []
    for line in code.splitlines():
        if found := re.match(r"\s*(\.L_x_\d+):", line):
            label[found[1]] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(found[1])
            target = re.search(r"\bBRA\b.*\((\.L_x_\d+)\)", found[1])
            if target and target[1] in label:
                loops.append(len(instructions) - label[target[1]])
    matrices = 2 if v.kernel == "gate_up" and constants["GATED"] else 1
    weights = matrices * constants["BLOCK_N"] * 128 * constants["KS"] / (32 * v.warps)
    return max(loops, default=0) / weights


def _compile(job: tuple[Variant, str]) -> tuple[Variant, str, Report]:
    return *job, compile_one(*job)


def rows_of(done: list[tuple[Variant, str, Report]]) -> list[tuple[str, ...]]:
    """One line for every kernel, tile and architecture: the worst over formats and types."""
    worst: dict[tuple[Any, ...], list[Report]] = {}
    for v, arch, report in done:
        c = dict(v.constants)
        if "BLOCK_N" not in c:
            key = (v.kernel, "", "", arch)
        else:
            name = "rank" if c.get("RANKED") else v.kernel
            key = (
                name,
                c.get("FORM", "factored"),
                f"{c['BLOCK_N']} x {c['BLOCK_M']} x {c.get('KS', 1)}, {v.warps} warps, {v.stages} stages",
                arch,
            )
        worst.setdefault(key, []).append(report)
    rows: list[tuple[str, ...]] = []
    for (kernel, form, tile, arch), reports in sorted(
        worst.items(), key=lambda item: [str(k) for k in item[0]]
    ):
        weights = sorted(r.per_weight for r in reports if r.per_weight) or [0.0]
        rows.append(
            (
                kernel,
                form,
                tile,
                f"sm_{arch}",
                str(len(reports)),
                str(max(r.registers for r in reports)),
                str(sum(r.spilled > 0 for r in reports)),
                str(max(r.shared for r in reports)),
                f"{weights[0]:.1f} … {weights[-1]:.1f}" if weights[-1] else "",
            )
        )
    return rows


Compilation = tuple[str, int, str, torch.dtype, ExpertsShape]


def cases(quick: bool, everything: bool) -> list[Compilation]:
    """(format, rank, compensator, type, layer) to compile for: formats on Mixtral's layer, two of them on others too."""
    plain = [("int3-g64", 0, "int3", torch.bfloat16)]
    if not quick:
        plain += _formats(everything)
    layers = () if quick else (DEEPSEEK, GPT_OSS)
    found = [(*case, MIXTRAL) for case in plain]
    found += [(fmt, 0, "int3", torch.bfloat16, layer) for layer in layers for fmt in ("int3-g64", "e8p-2")]
    return list(dict.fromkeys(found))


def _formats(everything: bool) -> list[tuple[str, int, str, torch.dtype]]:
    found: list[tuple[str, int, str, torch.dtype]] = []
    found.append(("int3-g64", 32, "int3", torch.bfloat16))
    found += [(fmt, 0, "int3", torch.bfloat16) for fmt in (*ELEPHANTS, *LATTICES)]
    if everything:
        for dtype in (torch.bfloat16, torch.float16):
            found += [(fmt, 0, "int3", dtype) for fmt in (*PRESETS, *ELEPHANTS, *OTHERS, *LATTICES)]
            found += [
                (fmt, 32, kind, dtype) for fmt in (*PRESETS, "e8p-2") for kind in ("int3", "int8", "fp16")
            ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="80,89,90")
    parser.add_argument("--quick", action="store_true", help="INT3 g64 in bf16 only")
    parser.add_argument(
        "--all", action="store_true", help="all presets' and other formats, fp16, every compensator: hours"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    jobs: dict[tuple[Variant, str], None] = {}
    for arch in arguments.arch.split(","):
        for name, rank, kind, dtype, layer in cases(arguments.quick, arguments.all):
            variants = record(arch, parse_format(name), rank, kind, dtype, layer)
            jobs |= dict.fromkeys((v, arch) for v in variants)
    print(f"{len(jobs)} variants", flush=True)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        done = [*track(pool.map(_compile, jobs, chunksize=4), "Compiling", total=len(jobs), console=STDERR)]
    header = (
        "kernel",
        "form",
        "tile (rows x slots x chunks)",
        "arch",
        "variants",
        "registers",
        "spilling",
        "shared bytes",
        "instr/weight",
    )
    text = table(header, rows_of(done))
    print(text)
    if arguments.markdown:
        insert(arguments.markdown, "gpu-compile", text)
    spilling = [(v.kernel, dict(v.constants), arch) for v, arch, r in done if r.spilled]
    large = [
        (v.kernel, dict(v.constants), a)
        for v, a, r in done
        if a.startswith("8") and r.shared > CONSUMER_SHARED
    ]
    print(json.dumps({"variants": len(done), "spilling": len(spilling), "too large": len(large)}))
    if spilling:
        sys.exit(f"error: {len(spilling)} of {len(done)} variants spill registers; first: {spilling[0]}")
    if large:
        sys.exit(f"error: {len(large)} variants take more than {CONSUMER_SHARED} bytes; first: {large[0]}")


if __name__ == "__main__":
    main()
