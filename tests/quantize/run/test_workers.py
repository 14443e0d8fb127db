"""Packing with workers: bytes as of one machine, runs that fail and go on, nodes that do not fit."""

import errno
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import HIDDEN, INTERMEDIATE, build_checkpoint
from support.calibrating import CONTEXT, SAMPLES, add_tokenizer, calibration, words
from support.runs import PlugPulled, digests, looks_complete
from support.workers import FakeWorkers

from trilobite.checkpoint import places
from trilobite.checkpoint.checksums import CHECKSUMS
from trilobite.checkpoint.packed import PARTIAL
from trilobite.errors import DestinationError, DeviceError, SettingError, WeightError
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.quantize.run import executor
from trilobite.quantize.run.compress import Result, compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import Recipe, load_recipe

MILO = replace(load_recipe("milo-s1"), rank="dense-4+sparse-2", iterations=2, cap=False)
SCALED = replace(load_recipe("rtn3"), columns="sinkhorn")
GPTQ = load_recipe("gptq3")
WEIGHED = replace(load_recipe("search3"), importance="text")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "mixtral"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16)
    add_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(words(SAMPLES * CONTEXT))
    return path


def pack(
    source: Path,
    dst: Path,
    recipe: Recipe = MILO,
    workers: FakeWorkers | None = None,
    ground: Calibration | None = None,
) -> Result:
    options = Options(jobs=1, device="auto" if workers else "cpu", workers=workers)
    return compress(str(source), dst, recipe, calibration=ground, options=options)


@pytest.fixture(scope="module")
def finished(mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one machine makes with MILO."""
    dst = tmp_path_factory.mktemp("finished") / "packed"
    pack(mixtral, dst)
    return digests(dst)


@pytest.mark.parametrize("count", [1, 3])
def test_as_on_one_machine(
    count: int, mixtral: Path, finished: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from another folder, the paths of which mean nothing to a worker."""
    monkeypatch.chdir(mixtral.parent)
    workers = FakeWorkers(count)
    result = pack(Path(mixtral.name), tmp_path / "dst", MILO, workers)
    assert digests(tmp_path / "dst") == finished
    assert workers.entered == 1
    assert workers.most == count
    names = [name for task in workers.tasks for name in task]
    assert sorted(names) == sorted(result.records)
    assert count < len(workers.tasks) < len(names)  # some tasks are of several lines


def test_the_largest_first(mixtral: Path, tmp_path: Path) -> None:
    """So that no worker is at one when the others have nothing left."""
    workers = FakeWorkers(1)
    result = pack(mixtral, tmp_path / "dst", load_recipe("rtn3"), workers)
    sizes = {line.matrix.name: torch.Size(line.matrix.shape).numel() for line in result.plan.lines}
    order = [sizes[name] for task in workers.tasks for name in task]
    assert order == sorted(order, reverse=True)
    assert order[0] > order[-1]


def test_tasks_of_what_takes_long_are_smaller(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expert = 2 * HIDDEN * INTERMEDIATE
    monkeypatch.setattr(executor, "PORTION", 4 * expert)
    most = []
    for recipe in (load_recipe("rtn3"), MILO):
        workers = FakeWorkers(1)
        pack(mixtral, tmp_path / recipe.name, recipe, workers)
        most.append(max(sum(".experts." in name for name in task) for task in workers.tasks))
    assert most == [4, 1]


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (SCALED, None),
        (GPTQ, {}),
        (GPTQ, {"propagate": "original", "save": "hessians"}),
        (WEIGHED, {}),
    ],
    ids=["columns", "quantized", "hessians", "importance"],
)
def test_as_on_one_machine_with_what_is_shared(
    recipe: Recipe, settings: dict[str, Any] | None, mixtral: Path, text: Path, tmp_path: Path
) -> None:
    """Column scales that every worker finds, Hessians that are sent, blocks that are read back."""
    made = []
    for name, workers in (("here", None), ("there", FakeWorkers(3))):
        ground = None
        if settings is not None:
            paths = {"save": tmp_path / f"{settings['save']}-{name}"} if "save" in settings else {}
            ground = calibration(text, **{**settings, **paths})
        pack(mixtral, tmp_path / name, recipe, workers, ground)
        made.append(digests(tmp_path / name))
    assert made[0] == made[1]


def test_a_driver_that_dies_is_continued(mixtral: Path, finished: dict[str, str], tmp_path: Path) -> None:
    """The journal knows what workers finished; who starts again does the rest, and locally if he likes."""

    def die(number: int) -> None:
        if number == 2:
            raise PlugPulled

    with pytest.raises(PlugPulled):
        pack(mixtral, tmp_path / "dst", MILO, FakeWorkers(1, before=die))
    assert not looks_complete(tmp_path / "dst")
    again = FakeWorkers(2)
    result = pack(mixtral, tmp_path / "dst", MILO, again)
    assert 0 < result.fresh < len(result.records)
    assert sum(map(len, again.tasks)) == result.fresh
    assert digests(tmp_path / "dst") == finished


def test_a_task_done_twice(mixtral: Path, finished: dict[str, str], tmp_path: Path) -> None:
    """A worker that was believed dead writes once more, after the one that took its place."""
    late: list[Any] = []

    class Zombies(FakeWorkers):
        def do(self, job: executor.Job, task: executor.Task) -> Any:
            late.append((job, task))
            if len(late) > 3:
                executor.do_task(*late[len(late) // 2])
            return super().do(job, task)

    pack(mixtral, tmp_path / "dst", MILO, Zombies(2))
    assert digests(tmp_path / "dst") == finished


def test_storage_that_is_full(
    mixtral: Path, finished: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = places.write_at, 0

    def write_at(handle: int, data: memoryview, offset: int) -> None:
        nonlocal written
        written += 1
        if written > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle, data, offset)

    monkeypatch.setattr(places, "write_at", write_at)
    with pytest.raises(DestinationError, match="the disk is full; nothing is lost"):
        pack(mixtral, tmp_path / "dst", MILO, FakeWorkers(2))
    monkeypatch.setattr(places, "write_at", real)
    pack(mixtral, tmp_path / "dst", MILO, FakeWorkers(2))
    assert digests(tmp_path / "dst") == finished


@pytest.fixture
def task(mixtral: Path, tmp_path: Path) -> tuple[executor.Job, executor.Task]:
    """One of several lines, for an unfinished run."""
    found: list[Any] = []

    class Taken(FakeWorkers):
        def do(self, job: executor.Job, task: executor.Task) -> Any:
            if len(task.lines) > 2:
                found.append((job, task))
                raise PlugPulled
            return super().do(job, task)

    with pytest.raises(PlugPulled):
        pack(mixtral, tmp_path / "dst", load_recipe("rtn3"), Taken(1))
    job, task = found[0]
    return job, task


def test_a_line_is_stored_while_the_next_one_is_quantized(
    task: tuple[executor.Job, executor.Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the last one before the worker says that it is done."""
    lines, spots = task[1].lines, task[1].places
    begun = [threading.Event() for _ in lines]
    begins, stored = iter(begun), list[places.Place]()

    def pack_line(*arguments: Any) -> Any:
        next(begins).set()
        return real_pack(*arguments)

    def store(place: places.Place, tensors: Sequence[torch.Tensor]) -> dict[str, str]:
        for following in begun[len(stored) + 1 :][:1]:
            assert following.wait(20), "nothing is quantized meanwhile"
        sums = real_store(place, tensors)
        stored.append(place)
        return sums

    real_pack, real_store = executor.pack_line, places.Place.store
    monkeypatch.setattr(executor, "pack_line", pack_line)
    monkeypatch.setattr(places.Place, "store", store)
    records = executor.do_task(*task)
    assert stored == list(spots)
    monkeypatch.undo()
    for record, line, place in zip(records, lines, spots, strict=True):
        tensors, _ = executor.pack_line(task[0].source, line, task[0].recipe, torch.device("cpu"), None)
        assert [t.tolist() for t in place.read()] == [t.tolist() for t in tensors]
        assert record[CHECKSUMS] == place.store(tensors)


@pytest.mark.parametrize("number", [0, 1, -1])
def test_what_cannot_be_stored_is_the_end_of_the_task(
    number: int, task: tuple[executor.Job, executor.Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    def store(place: places.Place, tensors: Sequence[torch.Tensor]) -> dict[str, str]:
        if place is task[1].places[number]:
            raise DestinationError("the disk is full")
        return {}

    monkeypatch.setattr(places.Place, "store", store)
    with pytest.raises(DestinationError, match="the disk is full"):
        executor.do_task(*task)


def test_nothing_is_being_stored_once_a_task_has_failed(
    task: tuple[executor.Job, executor.Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that ran out of memory is done again alone."""
    stored = []

    def pack_line(*arguments: Any) -> Any:
        if begun.is_set():
            goes_on.set()
            raise MemoryError
        begun.set()
        return real_pack(*arguments)

    def store(place: places.Place, tensors: Sequence[torch.Tensor]) -> dict[str, str]:
        assert goes_on.wait(20)
        time.sleep(0.2)
        stored.append(place)
        return {}

    begun, goes_on, real_pack = threading.Event(), threading.Event(), executor.pack_line
    monkeypatch.setattr(executor, "pack_line", pack_line)
    monkeypatch.setattr(places.Place, "store", store)
    with pytest.raises(MemoryError):
        executor.do_task(*task)
    assert stored == [task[1].places[0]]


def test_weights_that_cannot_be_packed_are_named(mixtral: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(mixtral, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    tensors[name][0, 0] = torch.nan
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=name):
        pack(copy, tmp_path / "dst", MILO, FakeWorkers(2))


def test_storage_that_is_not_shared(mixtral: Path, tmp_path: Path) -> None:
    """The same path is another folder on the worker's machine, or none."""

    def elsewhere(_: int) -> None:
        (tmp_path / "dst" / PARTIAL / places.MARK).write_text("another run")

    with pytest.raises(DestinationError, match="storage that all nodes share"):
        pack(mixtral, tmp_path / "dst", MILO, FakeWorkers(1, before=elsewhere))


def test_nodes_that_round_otherwise(mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(_: int) -> None:
        monkeypatch.setattr(executor, "code_version", lambda _: "trilobite 0, kernels scalar")

    with pytest.raises(DeviceError, match=r"kernels scalar.*nodes of one kind"):
        pack(mixtral, tmp_path / "dst", MILO, FakeWorkers(1, before=other))


def test_workers_have_no_gpu(mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="workers pack on CPUs"):
        compress(str(mixtral), tmp_path / "dst", MILO, options=Options(device="cuda", workers=FakeWorkers(1)))
