"""Ray's workers: who dies and what then, addresses that are none, and one real run with a kill."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.architectures import build_checkpoint
from support.runs import digests

pytest.importorskip("ray", reason="Ray is not installed: pip install 'trilobite[ray]'")

from ray import exceptions
from ray.exceptions import NodeDiedError, OutOfMemoryError, WorkerCrashedError

from trilobite.checkpoint.places import Mark
from trilobite.checkpoint.roles import identify
from trilobite.checkpoint.source import open_source
from trilobite.errors import ResourceError, SettingError
from trilobite.integrations import ray as integration
from trilobite.integrations.ray import DEATHS, RayWorkers
from trilobite.quantize.plan.plan import PlanLine
from trilobite.quantize.run.compress import compress, prepare
from trilobite.quantize.run.executor import Job, Task
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe

MILO = replace(load_recipe("milo-s1"), rank="dense-4+sparse-2", iterations=2, cap=False)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "mixtral"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16)
    return path


class Stub(RayWorkers):
    """No cluster: each task's next answer is taken from a list, an error or a result."""

    def __init__(self, answers: list[Any], note: Callable[[str], None] = lambda _: None) -> None:
        super().__init__("local", 2, note)
        self.answers = iter(answers)
        self.beside: list[int] = []

    def _send(self, job: Job, task: Task) -> Any:
        return next(self.answers)

    def _answer(self, sent: Any) -> tuple[str, str, list[Any]]:
        if isinstance(sent, BaseException):
            raise sent
        self.beside.append(self._turns._running)
        return sent() if callable(sent) else ("abcdef01", "host", sent)


@pytest.fixture
def job(mixtral: Path) -> Job:
    source = open_source(str(mixtral))
    return Job(source=source, recipe=MILO, mark=Mark(Path("/nowhere"), ""), code="")


@pytest.fixture
def line(mixtral: Path) -> PlanLine:
    return prepare(open_source(str(mixtral)), MILO).lines[0]


def task(line: PlanLine) -> Task:
    return Task(lines=[line], places=[], known=None, memory=0)


def test_a_task_is_done_again_when_its_worker_or_node_dies(job: Job, line: PlanLine) -> None:
    notes: list[str] = []
    workers = Stub([WorkerCrashedError(), NodeDiedError("gone"), [{"error": 1.0}]], notes.append)
    assert workers.do(job, task(line)) == [{"error": 1.0}]
    assert [note.split(";")[1].strip() for note in notes] == ["done again (1)", "done again (2)"]
    assert [(n.name, n.tensors) for n in workers.nodes.values()] == [("host abcdef", 1)]


def test_a_task_out_of_memory_is_done_again_alone(job: Job, line: PlanLine) -> None:
    """It waits for the one beside it, and the one after it waits for it."""
    beside, goes_on, lone = threading.Event(), threading.Event(), threading.Event()

    def long() -> tuple[str, str, list[Any]]:
        beside.set()
        goes_on.wait(60)
        return "node", "host", ["long"]

    def alone() -> tuple[str, str, list[Any]]:
        lone.set()
        assert workers._turns._running == 0
        return "node", "host", ["alone"]

    workers = Stub([long, OutOfMemoryError("full"), alone])
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(workers.do(job, task(line)))) for _ in range(2)]
    threads[0].start()
    beside.wait(60)
    threads[1].start()
    assert not lone.wait(0.2)
    goes_on.set()
    for thread in threads:
        thread.join(60)
    assert found == [["long"], ["alone"]]


def test_a_task_that_kills_every_worker_ends_the_run(job: Job, line: PlanLine) -> None:
    name = line.matrix.name.replace(".", r"\.")
    with pytest.raises(ResourceError, match=f"{name}: {DEATHS} workers died over it.*continues"):
        Stub([WorkerCrashedError()] * DEATHS).do(job, task(line))


@pytest.mark.parametrize("address", ["", "nowhere", "ray://head:10001", "head", "head:port"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(SettingError, match="expected local, auto, or HOST:PORT"):
        RayWorkers(address)


def test_nobody_answers() -> None:
    with (
        pytest.raises(ResourceError, match=r"ray 127\.0\.0\.1:9: nobody answers there"),
        RayWorkers("127.0.0.1:9"),
    ):
        pass


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"+PONG"], ids=["http", "none", "redis"]
)
def test_what_answers_is_no_ray(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(2):  # somebody there, and what it speaks
                link, _ = server.accept()
                with link, suppress(OSError):  # who asked may have left
                    link.sendall(answer)
                    link.shutdown(socket.SHUT_WR)
                    link.recv(64)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with (
            pytest.raises(ResourceError, match=rf"ray {address}: what answers there is no cluster's head"),
            RayWorkers(address),
        ):
            pass
        thread.join()


@pytest.mark.parametrize(
    ("url", "told"),
    [("10.0.0.1:8265", ["Ray's dashboard: http://10.0.0.1:8265"]), ("", []), (None, [])],
    ids=["runs", "none", "unknown"],
)
def test_the_dashboard_is_told_if_it_runs(url: str | None, told: list[str]) -> None:
    notes: list[str] = []
    workers = RayWorkers("auto", note=notes.append)
    found = SimpleNamespace(address_info={"gcs_address": "10.0.0.1:6379"}, dashboard_url=url)
    workers._ray = SimpleNamespace(
        init=lambda **_: found, remote=lambda **_: lambda work: work, shutdown=lambda: None
    )
    with workers:
        assert notes == told


def test_a_run_that_leaves_waits_for_its_threads_to_come_out_of_ray(job: Job, line: PlanLine) -> None:
    """One that is inside when Ray ends would never come out; one that comes later would have Ray connect anew."""
    workers = RayWorkers("local")
    inside, order = threading.Event(), []

    def wait(sent: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        inside.set()
        sleep(timeout)
        order.append("out")
        return [], sent

    def work() -> None:
        with pytest.raises(ResourceError, match="has ended"):
            workers.do(job, task(line))

    workers._ray = SimpleNamespace(
        wait=wait, shutdown=lambda: order.append("shutdown"), exceptions=exceptions
    )
    workers._send = lambda job, task: "sent"  # type: ignore[method-assign]
    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    workers.__exit__(None, None, None)
    thread.join(10)
    assert order == ["out", "shutdown"]
    with pytest.raises(ResourceError, match="has ended"):
        RayWorkers._send(workers, job, task(line))


def test_ray_connects_for_nobody() -> None:
    command = "from trilobite.integrations.ray import RayWorkers; RayWorkers('local'); import ray; ray.put(1)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.returncode
    assert "ray.init" in done.stderr, done.stderr


def test_a_head_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would end the process by itself, in many lines."""
    monkeypatch.setattr(integration, "PATIENCE", 0.0)
    workers = RayWorkers("local")
    workers._ray, workers._head = SimpleNamespace(wait=lambda *_, **__: ([], [0])), "127.0.0.1:9"
    with pytest.raises(ResourceError, match="head is gone; nothing is lost: run the same command again"):
        workers._answer(None)


@pytest.mark.parametrize(
    ("address", "count", "cores", "slots"),
    [("local", 0, 1, 2), ("local", 2, 2, 3), ("auto", 0, 32, 40), ("auto", 7, 32, 7), ("auto", 0, 0, 1)],
)
def test_a_task_waits_for_who_ends_unless_there_is_a_limit(
    address: str, count: int, cores: int, slots: int
) -> None:
    workers = RayWorkers(address, count)
    nodes = [{"Alive": True, "Resources": {"CPU": cores}}, {"Alive": False, "Resources": {"CPU": 64}}]
    workers._ray = SimpleNamespace(nodes=lambda: nodes)
    assert workers.slots() == slots


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def busy_workers() -> Iterator[int]:
    """Processes of our own cluster, children of its raylet, that are doing a task."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::_work"):
                worker = int(folder.name)
                if parent(parent(worker)) == os.getpid():
                    yield worker


@pytest.mark.long
def test_a_run_of_which_a_worker_is_killed(mixtral: Path, tmp_path: Path) -> None:
    """A cluster on this machine; a worker that is killed with -9 in the middle of a task costs that task."""
    compress(str(mixtral), tmp_path / "here", MILO, options=Options(jobs=1, device="cpu"))
    killed, notes = [], []

    def kill(*_: object) -> None:
        for worker in busy_workers() if not killed else ():
            os.kill(worker, signal.SIGKILL)
            killed.append(worker)
            break

    before = signal.getsignal(signal.SIGTERM)
    workers = RayWorkers("local", 2, notes.append)
    compress(str(mixtral), tmp_path / "there", MILO, options=Options(on_line=kill, workers=workers))
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    assert killed
    assert any("done again" in note for note in notes)
    assert sum(node.tensors for node in workers.nodes.values()) == len(identify(open_source(str(mixtral))))
    assert signal.getsignal(signal.SIGTERM) is before
