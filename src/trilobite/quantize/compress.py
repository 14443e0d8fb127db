"""The compress loop: read -> quantize -> write, few tensors in memory, several at a time, resumable."""

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import trilobite
from trilobite.checkpoint.packed import FORMAT_VERSION, PARTIAL, REPORT, PackedWriter, Unit
from trilobite.checkpoint.roles import Matrix, identify, read_matrix
from trilobite.checkpoint.source import DTYPES, Source, open_source
from trilobite.errors import CalibrationError, DestinationError, RecipeError, WeightError
from trilobite.formats.weight import PackedWeight, dequantize, with_real_signs
from trilobite.kernels import cpu_quantize
from trilobite.quantize.calibration import Calibration
from trilobite.quantize.finetune_store import TunedStore
from trilobite.quantize.gptq import METHODS as GPTQ_METHODS
from trilobite.quantize.gptq import gptq
from trilobite.quantize.hessian import relative_loss
from trilobite.quantize.ldlq import quantize_lattice
from trilobite.quantize.matrix import check_finite, quantize_measured
from trilobite.quantize.milo import Compensation, milo
from trilobite.quantize.plan import Plan, PlanLine, Progress, describe, make_plan, packed_weight
from trilobite.recipe import CALIBRATED_METHODS, Format, LatticeFormat, Recipe, needs_calibration

if TYPE_CHECKING:
    from trilobite.quantize.calibrated import Calibrator
    from trilobite.quantize.calibration_store import HessianStore
    from trilobite.quantize.finetune import Tuner

LineDone = Callable[[PlanLine, Mapping[str, Any], bool], None]
"""(line, its record, whether this run made it): called for every tensor, from the main thread."""
RANKS = "ranks.json"
SLACK = 400 * 2**20
"""Memory for matrices in work beyond twice the largest one; the rest of the promised gigabyte is Python and torch."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run, as opposed to what to make: none of this changes a byte of the result.

    jobs: matrices in work at a time (0 = one per core)    device: cpu, cuda or auto
    on_note: receives lines for the user to read
    """

    jobs: int = 0
    device: str = "auto"
    on_plan: Callable[[Plan], None] | None = None
    on_line: LineDone | None = None
    progress: Progress | None = None
    on_note: Callable[[str], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was made. records: by tensor name: error, seconds (0 for kept tensors)    seconds: of this run."""

    plan: Plan
    records: Mapping[str, Mapping[str, Any]]
    seconds: float
    fresh: int


def prepare(
    source: Source,
    recipe: Recipe,
    *,
    frequency: Mapping[int, Sequence[int]] | None = None,
    known_ranks: Mapping[str, int] | None = None,
    keep_unmatched: bool = False,
    tuned: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Identify every tensor and resolve the recipe: what `trilobite plan` prints.

    tuned: leave room for fine-tuned sign vectors
    Raises ArchitectureError, RecipeError or ShapeError; nothing is written.
    """
    method = source.config.get("quantization_config", {}).get("quant_method")
    if method == "trilobite":
        raise RecipeError(
            f"{source.path}: already packed by Trilobite; compress the original checkpoint instead"
        )
    matrices = identify(source, extra_rules=recipe.roles, keep_unmatched=keep_unmatched)
    return make_plan(
        source,
        matrices,
        recipe,
        frequency=frequency,
        known_ranks=known_ranks,
        tuned=tuned,
        progress=progress,
    )


def compress(
    src: str,
    dst: Path,
    recipe: Recipe,
    *,
    frequency: Mapping[int, Sequence[int]] | None = None,
    keep_unmatched: bool = False,
    calibration: Calibration | None = None,
    options: Options | None = None,
) -> Result:
    """Compress the checkpoint `src` (folder or hub id) into the folder `dst`.

    calibration: what recipes with a calibrated method (gptq) measure activations on; others take none.
    Killed at any moment, the same call continues and ends with the same bytes. Raises TrilobiteError subclasses;
    KeyboardInterrupt leaves a resumable state.
    """
    options = options or Options()
    device = pick_device(options.device)
    started = time.monotonic()
    source = open_source(src)
    calibrator = _open_calibration(source, recipe, calibration)
    identity: dict[str, Any] = {
        "source": source.fingerprint(),
        "recipe": recipe.to_dict(),
        "frequency": _digest(frequency),
        "version": f"trilobite {trilobite.__version__}, format {FORMAT_VERSION}, torch {torch.__version__}, "
        f"kernels {cpu_quantize.tier()}",
    }
    if calibrator:
        identity["calibration"] = calibrator.identity
    if (dst / "config.json").exists():
        _check_finished(dst, identity)
    plan = prepare(
        source,
        recipe,
        frequency=frequency,
        known_ranks=_known_ranks(dst, identity),
        keep_unmatched=keep_unmatched,
        tuned=calibration is not None and bool(calibration.finetune),
        progress=options.progress,
    )
    if options.on_plan:
        options.on_plan(plan)
    units = {line.matrix.name: _unit(line) for line in plan.lines}
    if (dst / "config.json").exists():
        shutil.rmtree(dst / PARTIAL, ignore_errors=True)  # an earlier run was killed while it cleaned up
        return Result(plan=plan, records={}, seconds=time.monotonic() - started, fresh=0)
    if calibrator:  # before anything is written: not every model can be run block by block
        matrices = identify(source, extra_rules=recipe.roles, keep_unmatched=keep_unmatched)
        calibrator.build(source, matrices, device)
    with PackedWriter(dst, list(units.values()), identity) as writer:
        ranks = {line.matrix.name: line.rank for line in plan.lines if line.rank}
        writer.note(RANKS, json.dumps(ranks))
        todo = [line for line in plan.lines if line.matrix.name not in writer.done]
        if options.on_line:
            for line in plan.lines:
                if line.matrix.name in writer.done:
                    options.on_line(line, writer.done[line.matrix.name], False)
        _run(source, plan, [x for x in todo if not _calibrated(x)], writer, units, options, device)
        tuned = TunedStore(writer.work, writer.note)
        if calibrator:
            receiver = _Receiver(source, plan, writer, units, options, device, tuned)
            _run_calibrated([x for x in todo if _calibrated(x)], receiver, calibrator)
            writer.rewrite(tuned)
        writer.finish(
            config=packed_config(source, recipe.name),
            report=_report(
                Path(src).name if Path(src).exists() else src, plan, identity, writer.done, tuned.records
            ),
            companions=source.companions(),
        )
    return Result(plan=plan, records=writer.done, seconds=time.monotonic() - started, fresh=len(todo))


def _digest(frequency: Mapping[int, Sequence[int]] | None) -> str:
    if frequency is None:
        return ""
    rows = [[layer, list(counts)] for layer, counts in sorted(frequency.items())]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _check_finished(dst: Path, identity: Mapping[str, Any]) -> None:
    try:
        found = json.loads((dst / REPORT).read_bytes())["identity"]
    except (OSError, ValueError, KeyError):
        found = {}
    differs = [key for key in identity if found.get(key) != identity[key]]
    if differs:
        raise DestinationError(
            f"{dst}: holds a checkpoint that differs in its {' and '.join(differs)}; choose another destination"
        )


def _known_ranks(dst: Path, identity: Mapping[str, Any]) -> dict[str, int] | None:
    """The ranks that an interrupted run with this identity found: a kurtosis policy need not read all weights again."""
    try:
        found = json.loads((dst / PARTIAL / "identity.json").read_bytes())
        ranks = json.loads((dst / PARTIAL / RANKS).read_bytes())
    except (OSError, ValueError):
        return None
    return ranks if found == identity and isinstance(ranks, dict) else None


def _unit(line: PlanLine) -> Unit:
    m = line.matrix
    block = f"{m.layer}.experts" if m.expert is not None else m.name
    return Unit(
        name=m.name, tensors=tuple((t.name, t.dtype, t.shape, t.nbytes) for t in line.stored), block=block
    )


def _run(
    source: Source,
    plan: Plan,
    todo: Sequence[PlanLine],
    writer: PackedWriter,
    units: Mapping[str, Unit],
    options: Options,
    device: torch.device,
    hessians: "HessianStore | None" = None,
) -> None:
    """Work through the lines with several threads, as many at a time as the memory bound allows."""
    jobs = _jobs(options, device)
    budget = _budget(plan)
    failed = threading.Event()

    def work(line: PlanLine) -> tuple[PlanLine, dict[str, Any]]:
        if failed.is_set():
            raise _CancelledError
        started = time.monotonic()
        known = None if hessians is None else hessians.get(line.matrix.name, line.matrix.shape[1])
        tensors, record = _process(source, line, plan.recipe, device, known)
        record["seconds"] = round(time.monotonic() - started, 3)
        writer.write(units[line.matrix.name], tensors, record)
        return line, record

    running: dict[Future[tuple[PlanLine, dict[str, Any]]], int] = {}
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="quantize")
    waiting = list(reversed(todo))
    with _single_threaded_torch(jobs):
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    cost = _memory(waiting[-1], source)
                    if running and sum(running.values()) + cost > budget:
                        break
                    running[pool.submit(work, waiting.pop())] = cost
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    del running[future]
                    line, record = future.result()
                    if options.on_line:
                        options.on_line(line, record, True)
        except BaseException:
            failed.set()
            raise
        finally:
            # Threads in the middle of a matrix end with it; what they were making is made again by the next run.
            pool.shutdown(wait=not failed.is_set(), cancel_futures=True)


def _open_calibration(source: Source, recipe: Recipe, calibration: Calibration | None) -> "Calibrator | None":
    if calibration is None and not needs_calibration(recipe):
        return None
    # Brings transformers along, which other recipes need not wait for.
    from trilobite.quantize.calibrated import open_calibration

    return open_calibration(source, recipe, calibration)


def _calibrated(line: PlanLine) -> bool:
    return line.format is not None and line.method in CALIBRATED_METHODS


@dataclass(frozen=True)
class _Receiver:
    """Receives Hessians and turns them into packed matrices on disk; reads them back for the next block."""

    source: Source
    plan: Plan
    writer: PackedWriter
    units: Mapping[str, Unit]
    options: Options
    device: torch.device
    tuned: TunedStore

    def handle(
        self, lines: Sequence[PlanLine], hessian: Tensor, note: Mapping[str, Any]
    ) -> list[tuple[PlanLine, dict[str, Any]]]:
        """Quantize and write the lines that share a Hessian."""
        found = []
        for line in lines:
            started = time.monotonic()
            tensors, record = _process(self.source, line, self.plan.recipe, self.device, (hessian, note))
            record["seconds"] = round(time.monotonic() - started, 3)
            self.writer.write(self.units[line.matrix.name], tensors, record)
            found.append((line, record))
        return found

    def done(self, line: PlanLine, record: Mapping[str, Any]) -> None:
        """Tell who looks on."""
        if self.options.on_line:
            self.options.on_line(line, record, True)

    def finished(self) -> list[PlanLine]:
        """The quantized lines that are on disk."""
        return [x for x in self.plan.lines if x.format is not None and x.matrix.name in self.writer.done]

    def decoded(self, line: PlanLine) -> Tensor:
        """A matrix as the packed model will compute with it, [N, K] fp32."""
        return dequantize(packed_weight(line, self.stored(line), self.device))

    def stored(self, line: PlanLine) -> list[Tensor]:
        """The tensors of a finished line, tuned where they are."""
        found = self.writer.read(self.units[line.matrix.name])
        return [self.tuned.get(t.name, data) for t, data in zip(line.stored, found, strict=True)]


def _run_calibrated(todo: Sequence[PlanLine], receiver: _Receiver, calibrator: "Calibrator") -> None:
    """Work through the lines that need Hessians."""
    from trilobite.quantize.calibrated import Run

    r = receiver
    jobs = _jobs(r.options, r.device)
    run = Run(jobs=jobs, workspace=r.writer.work, progress=r.options.progress, on_note=r.options.on_note)
    tuner = _tuner(r, calibrator.calibration)
    if calibrator.store is not None:
        with _single_threaded_torch(jobs):
            calibrator.collect([line for line in r.plan.lines if _calibrated(line)], run)
        _run(r.source, r.plan, todo, r.writer, r.units, r.options, r.device, calibrator.store)
        todo = []
    if todo or tuner:
        with _single_threaded_torch(jobs):
            calibrator.distribute(todo, run, r.handle, r.done, (r.finished, r.decoded), tuner)


def _tuner(receiver: _Receiver, calibration: Calibration) -> "Tuner | None":
    """What trains the quantized blocks, where that is asked for."""
    if not calibration.finetune:
        return None
    from trilobite.quantize.finetune import Tuner

    r = receiver
    return Tuner(
        mode=calibration.finetune,
        lines=r.plan.lines,
        read=r.stored,
        store=r.tuned,
        seed=calibration.seed,
        memory=calibration.memory,
        progress=r.options.progress,
        on_note=r.options.on_note,
    )


def _jobs(options: Options, device: torch.device) -> int:
    return options.jobs or (1 if device.type == "cuda" else os.cpu_count() or 1)


class _CancelledError(Exception):
    """Another matrix failed, or the user interrupted."""


@contextmanager
def _single_threaded_torch(jobs: int) -> Iterator[None]:
    """One thread for each matrix in work, so that results do not depend on how many cores share a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _process(
    source: Source,
    line: PlanLine,
    recipe: Recipe,
    device: torch.device,
    known: tuple[Tensor, Mapping[str, Any]] | None = None,
) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors to store for one plan line, in order, and what the report says of them.

    known: the Hessian of its inputs [K, K] fp32 and what the report says of it
    """
    w = read_matrix(source, line.matrix)
    if line.format is None:
        stored = w.to(DTYPES[line.stored[0].dtype])
        if stored.is_floating_point() and stored.numel():
            _named(line, lambda: check_finite(stored.float() if stored.element_size() == 1 else stored))
        return [stored], {}
    w = w.to(device)
    hessian, note = (None, {}) if known is None else (known[0].to(device), known[1])
    packed, record = _named(line, lambda: quantize_line(w, line, recipe, hessian))
    packed = with_real_signs(packed) if line.tuned else packed
    return [t.cpu() for t in packed.tensors().values()], {**record, **note}


def quantize_line(
    w: Tensor, line: PlanLine, recipe: Recipe, hessian: Tensor | None = None
) -> tuple[PackedWeight, dict[str, Any]]:
    """Quantize one matrix as its plan line says; also returns what the report notes about the way there.

    w: [N, K] any float dtype    hessian: [K, K] fp32, E[x x^T] of its inputs, for the methods that use one
    Raises WeightError for NaN, infinite or out-of-range weights, CalibrationError for a useless Hessian.
    """
    assert line.format is not None
    lattice = isinstance(line.format, LatticeFormat)
    seed = _seed(_without_expert(line.matrix) if lattice else line.matrix.name)
    input_seed = _seed(input_name(line.matrix))
    compensation = Compensation(
        rank=line.rank,
        compensator=recipe.compensator,
        iterations=recipe.iterations,
        seed=seed,
        input_seed=input_seed,
    )
    record: dict[str, Any] = {}
    if line.method in GPTQ_METHODS:
        assert hessian is not None, f"{line.matrix.name}: {line.method} without a Hessian"
        assert isinstance(line.format, Format)
        against = gptq(w, line.format, line.method, hessian, compensation if line.rank else None)
        packed, error = against.weight, against.error
    elif line.rank:
        result = milo(w, line.format, line.method, compensation, hessian)
        packed, error = result.weight, result.error
        record["iterations"] = len(result.errors)
    elif isinstance(line.format, LatticeFormat):
        packed, error = quantize_lattice(
            w, line.format, method=line.method, hessian=hessian, seed=seed, input_seed=input_seed
        )
    else:
        packed, error = quantize_measured(w, line.format, line.method)
    record["error"] = float(f"{error:.6g}")
    if hessian is not None:
        record["proxy"] = float(f"{relative_loss(w, dequantize(packed), hessian):.6g}")
    return packed, record


def _without_expert(m: Matrix) -> str:
    """A matrix's name without the number of its expert."""
    return re.sub(r"\.experts\.\w*?\d+\.", ".experts.", m.name)


def input_name(m: Matrix) -> str:
    """What matrices with the same input have in common: the path of the module around them, without the expert.

    So q, k and v rotate their input alike, gate and up too, and these of all experts of a layer: the input is rotated
    once for all. Down projections share the name, too, and need nothing of it.
    """
    return _without_expert(m).removesuffix(".weight").rpartition(".")[0]


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def _named(line: PlanLine, call: Callable[[], Any]) -> Any:
    """Run `call`; an error about the weights says whose they are."""
    try:
        return call()
    except (WeightError, CalibrationError) as e:
        raise type(e)(f"{line.matrix.name}: {e}") from None


def _memory(line: PlanLine, source: Source) -> int:
    """Bytes that a line in work holds: the mapped source, the working copy of MiLo, the result, the bands."""
    numel = torch.Size(line.matrix.shape).numel()
    mapped = numel * max(1, DTYPES[source.tensors[line.matrix.source].dtype].itemsize)
    n, k = line.matrix.shape if len(line.matrix.shape) == 2 else (numel, 1)
    low_rank = 4 * numel + 16 * (line.rank + 32) * (n + k) if line.rank else 0
    if isinstance(line.format, LatticeFormat):
        low_rank += 12 * numel  # the whole matrix is rotated; its codes are 64-bit while they are found
    converted = 4 * numel if line.matrix.view.scale or line.matrix.view.transposed else 0
    # H and four copies to factor it; weights, codes, errors.
    against = 20 * k * k + 12 * numel if _calibrated(line) else 0
    return mapped + low_rank + converted + against + line.nbytes + 32 * 2**20


def _budget(plan: Plan) -> int:
    largest = max(torch.Size(line.matrix.shape).numel() for line in plan.lines)
    return 2 * 4 * largest + SLACK


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a GPU. Raises RecipeError when cuda is asked for and absent."""
    if name not in ("auto", "cpu", "cuda"):
        raise RecipeError(f"device {name!r}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise RecipeError(
            "device cuda: torch sees no GPU here; use --device cpu, or install a CUDA build of torch"
        )
    cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


def packed_config(source: Source, recipe: str) -> dict[str, Any]:
    """config.json of the packed checkpoint: the original's, with our quantization_config in place of any other."""
    config = {k: v for k, v in source.config.items() if k not in ("quantization_config", "auto_map")}
    config["quantization_config"] = {
        "quant_method": "trilobite",
        "format_version": FORMAT_VERSION,
        "recipe": recipe,
    }
    return config


def _report(
    source: str,
    plan: Plan,
    identity: Mapping[str, Any],
    done: Mapping[str, Mapping[str, Any]],
    tuned: Mapping[str, Mapping[str, Any]],
) -> str:
    """trilobite.json: the plan as executed. Without clocks or paths, so that equal runs give equal bytes."""
    head = {
        "format_version": FORMAT_VERSION,
        "identity": dict(identity),
        "source": source,
        "rank": plan.rank,
    }
    if tuned:
        head["finetune"] = {part: dict(record) for part, record in sorted(tuned.items())}
    rows = []
    for line in plan.lines:
        record = {k: v for k, v in done[line.matrix.name].items() if k not in ("name", "seconds")}
        rows.append(json.dumps(describe(line, plan.recipe.compensator) | record))
    return json.dumps(head, indent=2)[:-2] + ',\n  "tensors": [\n    ' + ",\n    ".join(rows) + "\n  ]\n}\n"
