"""Workers without a cluster: tasks travel as bytes, as to another process, and what they do goes wrong on demand."""

import pickle
import threading
from collections.abc import Callable

from trilobite.quantize.calibrate.protocols import Record
from trilobite.quantize.run.executor import Job, Task, do_task


class FakeWorkers:
    """So many at a time; `before` and `after` are called with the number of each task around it."""

    def __init__(
        self,
        count: int,
        before: Callable[[int], None] = lambda _: None,
        after: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.count, self.before, self.after = count, before, after
        self.lock = threading.Lock()
        self.tasks: list[list[str]] = []
        self.entered = self.busy = self.most = 0

    def __enter__(self) -> "FakeWorkers":
        self.entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        assert not self.busy or self.tasks  # threads may still be at work after a failure

    def slots(self) -> int:
        return self.count

    def do(self, job: Job, task: Task) -> list[Record]:
        with self.lock:
            number = len(self.tasks)
            self.tasks.append([line.matrix.name for line in task.lines])
            self.busy += 1
            self.most = max(self.most, self.busy)
        try:
            self.before(number)
            job, task = pickle.loads(pickle.dumps((job, task)))
            job.check()
            records: list[Record] = pickle.loads(pickle.dumps(do_task(job, task)))
            self.after(number)
            return records
        finally:
            with self.lock:
                self.busy -= 1
