"""Workers on a Ray cluster: processes on any of its nodes, all of which see the same storage.

Ray finds a free core, sends the task there and says when a process or a node has died. What then becomes of a task is
decided here: it is done again, and alone when it ran out of memory. That is safe at any moment: whoever does a task
writes the same bytes to the same places.

A task that Ray believes to be lost may still be at work on a node that cannot be reached; it writes those bytes, too.
"""

import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from types import TracebackType
from typing import Any

import torch

from trilobite.errors import (
    MissingExtraError,
    ResourceError,
    SettingError,
    TrilobiteError,
    exhausted,
    one_line,
)
from trilobite.quantize.calibrate.protocols import Record
from trilobite.quantize.run.executor import MOST_TASKS, Job, Task, do_task
from trilobite.quantize.run.options import usable_cores

LOCAL, AUTO = "local", "auto"
DEATHS = 8
"""Workers that may die over one task before the run ends: then it is the task that kills them."""
PATIENCE = 10.0
"""Seconds between looks at a cluster that does not answer a task."""
GLANCE = 0.5
"""Seconds between a waiting thread's looks whether the run has been left."""
FRESH = 2.0
"""Seconds for which the number of cores is believed."""
AHEAD = 4
"""For so many cores one task more is sent than there are cores, so that a worker that ends finds the next one there."""
REACH = 5.0
"""Seconds in which a cluster has to answer at all."""
FRAME, SETTINGS = 9, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, SETTINGS, 0, 0, 0, 0, 0))
"""What a client of HTTP/2 says first, with an empty frame of settings; a server answers with one (RFC 9113 §3.4)."""
LEAST_MEMORY = 2**28
"""Tasks ask for memory in powers of two from here on: few kinds of tasks, so that Ray uses its workers again."""


@dataclass
class NodeRate:
    """What a node has done: tensors, weights, and when it began with the first and ended with the last."""

    name: str
    began: float
    ended: float = 0.0
    tensors: int = 0
    weights: int = 0

    @property
    def rate(self) -> float:
        """Weights per second, while it was there."""
        return self.weights / max(self.ended - self.began, 1e-9)


class RayWorkers:
    """Workers of a Ray cluster, or of this machine alone (quantize/run/executor.py: Workers)."""

    def __init__(self, address: str, count: int = 0, note: Callable[[str], None] = lambda _: None) -> None:
        """Starts nothing yet.

        address: HOST:PORT of a cluster's head, `auto` for the one that this machine belongs to, `local` for none
        count: tasks in work at a time, 0 = one a core    note: takes lines for the user to read
        Raises MissingExtraError without Ray, SettingError for an address that is none.
        """
        if address not in (LOCAL, AUTO) and not re.fullmatch(r"(\[[\da-fA-F:]+\]|[^:/\s]+):\d+", address):
            raise SettingError(
                f"ray {address!r}: expected local, auto, or HOST:PORT of a cluster's head (`ray start --head` tells)"
            )
        if address == LOCAL or _is_loopback(address):
            # Ray's own word for one machine: it then listens and calls on the loopback interface alone.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # A thread that asks Ray for something after the run has left would join a cluster anew, and wait for ever.
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
        try:
            import ray
        except ImportError as e:
            raise MissingExtraError("--ray needs Ray: pip install 'trilobite[ray]'") from e
        self._ray: Any = ray
        self._address, self._count, self._note = address, count, note
        self._turns = _Turns()
        self._lock = threading.Lock()
        self._cores, self._asked = 1, -math.inf
        self._largest = 0.0
        self._waiting = self._left = False
        self._head = address
        self._job: Job | None = None
        self._shared: Any = None
        self.nodes: dict[str, NodeRate] = {}

    def __enter__(self) -> "RayWorkers":
        """Start a cluster on this machine, or join one. Raises ResourceError where there is none."""
        address = self._address
        if address not in (LOCAL, AUTO) and not _answers(address):
            raise ResourceError(
                f"ray {address}: nobody answers there; check the address, or start a cluster: `ray start --head`"
            )
        if address not in (LOCAL, AUTO) and not _speaks(address):
            raise ResourceError(
                f"ray {address}: what answers there is no cluster's head; give the address that `ray start --head` tells"
            )
        options: dict[str, Any] = {"address": address}
        if address == LOCAL:
            options |= {"num_cpus": self._count or usable_cores(), "include_dashboard": False}
        with _own_signals():
            try:
                found = self._ray.init(log_to_driver=False, logging_level="error", **options)
            except Exception as e:  # Ray raises bare ones, too
                raise ResourceError(
                    f"ray {address}: no cluster can be joined ({one_line(e)}); start one with `ray start`, or choose "
                    "--ray local"
                ) from e
        self._head = str(found.address_info["gcs_address"])
        if url := getattr(found, "dashboard_url", ""):
            self._note(f"Ray's dashboard: http://{url}")
        # Retried here, not by Ray: it would do so side by side with what took the memory.
        self._remote = self._ray.remote(max_retries=0, num_cpus=1)(_work)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the cluster; tasks that are still in work end, and so does a cluster of our own."""
        self._left = True
        self._turns.wait_for_all(REACH)  # a thread that is inside of Ray meanwhile would never come out
        self._shared = self._job = None
        self._ray.shutdown()

    def slots(self) -> int:
        """One a core that the cluster has now, and a few that wait for one.

        Or what was asked for, on a cluster of others: some grow on demand, and a limit is one.
        """
        with self._lock:
            if time.monotonic() - self._asked > FRESH:
                nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
                self._cores = int(sum(node.get("CPU", 0) for node in nodes))
                self._largest = max((node.get("memory", 0) for node in nodes if node.get("CPU")), default=0)
                self._asked = time.monotonic()
            ahead = -(-self._cores // AHEAD)
            own = self._address == LOCAL or not self._count
            return max(1, min(self._cores + ahead if own else self._count, MOST_TASKS))

    def do(self, job: Job, task: Task) -> list[Record]:
        """Let a worker do a task, and others after it when it dies."""
        name, alone = task.lines[0].matrix.name, False
        for death in range(1, DEATHS + 1):
            try:
                with self._turns.alone() if alone else self._turns.together():
                    began = time.monotonic()
                    node, host, records = self._answer(self._send(job, task))
                self._count_in(node, NodeRate(f"{host} {node[:6]}", began), task)
                return records
            except (MemoryError, self._ray.exceptions.OutOfMemoryError) as e:
                what, alone = f"ran out of memory over {name} ({one_line(e)[:60]})", True
            except (
                self._ray.exceptions.WorkerCrashedError,
                self._ray.exceptions.NodeDiedError,
                self._ray.exceptions.ObjectLostError,
                self._ray.exceptions.TaskCancelledError,
                self._ray.exceptions.LocalRayletDiedError,
            ) as e:
                what = f"died over {name} ({type(e).__name__})"
            self._check_here()
            self._note(f"a worker {what}; {'done again, alone' if alone else 'done again'} ({death})")
        raise ResourceError(
            f"{name}: {DEATHS} workers died over it, the last one {what}; give the run nodes with more memory, or look "
            "into Ray's logs (/tmp/ray/session_latest/logs); the same command continues"
        )

    def _check_here(self) -> None:
        """Raise ResourceError once the cluster has been left."""
        if self._left:
            raise ResourceError("ray: the run has ended")

    def _send(self, job: Job, task: Task) -> Any:
        self._check_here()
        with self._lock:
            if self._job is not job:
                self._job, self._shared = job, self._ray.put(job)
        hessian = None if task.known is None else task.known[0].numpy()
        note = {} if task.known is None else task.known[1]
        memory = LEAST_MEMORY
        while memory < task.memory:
            memory *= 2
        remote = self._remote.options(memory=int(min(memory, self._largest or memory)))
        return remote.remote([self._shared], replace(task, known=None), hessian, note)

    def _answer(self, sent: Any) -> tuple[str, str, list[Record]]:
        """What a task returns, or raises."""
        looked = time.monotonic()
        while not self._ray.wait([sent], timeout=GLANCE)[0]:
            self._check_here()
            if time.monotonic() - looked < PATIENCE:
                continue
            looked = time.monotonic()
            if not _answers(self._head):  # Ray would abort this process a minute later
                raise ResourceError(
                    f"ray {self._head}: the cluster's head is gone; nothing is lost: run the same command again, on a "
                    "cluster or without one"
                )
            self.slots()
            if not self._cores and not self._waiting:
                self._note("no node of the cluster has a core for us; waiting for one")
            self._waiting = not self._cores
        self._check_here()
        try:
            return self._ray.get(sent)  # type: ignore[no-any-return]
        except self._ray.exceptions.RayTaskError as e:
            if isinstance(e.cause, TrilobiteError | MemoryError):
                raise e.cause from None
            raise

    def _count_in(self, node: str, new: NodeRate, task: Task) -> None:
        with self._lock:
            rate = self.nodes.setdefault(node, new)
            rate.tensors += len(task.lines)
            rate.weights += sum(torch.Size(line.matrix.shape).numel() for line in task.lines)
            rate.ended = time.monotonic()


class _Turns:
    """Tasks side by side, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running, self._lone = 0, False

    def wait_for_all(self, seconds: float) -> None:
        """Until nobody is at work, but no longer than that."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running and not self._lone, seconds)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Beside others, once nobody is or wants to be alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lone)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Once all others have ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lone)
            self._lone = True
            self._changed.wait_for(lambda: not self._running)
        try:
            yield
        finally:
            with self._changed:
                self._lone = False
                self._changed.notify_all()


def _work(shared: list[Any], task: Task, hessian: Any, note: Any) -> tuple[str, str, list[Record]]:
    """What runs on a node: returns its id, its name and the records. hessian: numpy, shared with other processes."""
    import ray

    # Ray's memory may not be written to.
    known = None if hessian is None else (torch.from_numpy(hessian.copy()), note)
    try:
        records = do_task(_opened(shared[0]), replace(task, known=known))
    except ResourceError as e:
        raise MemoryError(one_line(e)) from None
    except (RuntimeError, OSError) as e:  # torch, or a mapping
        if exhausted(e):
            raise MemoryError(one_line(e)) from None
        raise
    return ray.get_runtime_context().get_node_id(), socket.gethostname(), records


@lru_cache(maxsize=1)
def _opened(shared: Any) -> Job:
    """The job, received and checked once in every worker."""
    import ray

    job: Job = ray.get(shared)
    job.check()
    return job


def _is_loopback(address: str) -> bool:
    return address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")


def _answers(address: str) -> bool:
    """Whether anybody listens at HOST:PORT. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH).close()
    except (OSError, OverflowError):
        return False
    return True


def _speaks(address: str) -> bool:
    """Whether who listens at HOST:PORT speaks HTTP/2, as a head does. Ray itself would warn twenty times."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), REACH) as link:
            link.settimeout(REACH)
            link.sendall(PREFACE)
            first = link.makefile("rb").read(FRAME)
    except (OSError, OverflowError):
        return False
    return len(first) == FRAME and first[3] == SETTINGS


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep our answer to Ctrl-C and SIGTERM, which Ray replaces when it starts."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        with suppress(ValueError):  # not the main thread: Ray has replaced nothing
            for number, answer in kept.items():
                signal.signal(number, answer)
