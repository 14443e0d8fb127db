"""What commands print with: tables on standard output; progress, notes and errors on standard error."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from trilobite.quantize.plan.plan import Plan, PlanLine
    from trilobite.quantize.run.executor import Workers
    from trilobite.quantize.run.options import Options

WIDTH = 160
"""Of tables when the output is no terminal: nothing is cut off in a log."""
NARROWEST = 12
"""Columns of text may be folded to this; numbers are never folded."""
WIDE, TIME = 60, 11
"""Columns from which a bar is of full length; columns of the time that is left, and between columns."""
PATIENCE = 2.0
"""Seconds of loading before there is a bar."""
NOTE_SECONDS = 30.0
"""How often progress is noted where there is no terminal to draw a bar on."""


def note(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr, flush=True)


def print_json(data: Mapping[str, Any]) -> None:
    """One JSON object on standard output."""
    print(json.dumps(data, indent=2), flush=True)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", left: int = 1
) -> None:
    """A table on standard output; its first `left` columns are aligned to the left."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    if title:
        print(title)
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1), show_edge=False, show_header=any(columns))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else WIDTH
    console = Console(width=width, markup=False, highlight=False)
    numbers = sum(max(len(r[i]) for r in (columns, *rows)) + 1 for i in range(left, len(columns)))
    if numbers + left * NARROWEST > console.width:
        _print_entries(columns, rows)
    else:
        console.print(table)
    console.print()


def _print_entries(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """What a table says, where the terminal is too narrow for one: a line for every cell that is not empty."""
    for first, *cells in rows:
        print(first)
        for column, cell in zip(columns[1:], cells, strict=False):
            if cell:
                print(" ", *filter(None, (column, cell)))


def size(nbytes: float) -> str:
    """`1234567` -> `1.23 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def count(number: int) -> str:
    """`46702792704` -> `46.7 G`."""
    for factor, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= factor:
            return f"{number / factor:.1f}{unit}"
    return str(number)


def number(value: float | None, digits: int = 4) -> str:
    """A number, or nothing."""
    return "" if value is None else f"{value:.{digits}f}"


class Progress:
    """Bars on standard error where that is a terminal, else a plain line now and then. A context manager."""

    def __init__(self, *, prints: bool = False) -> None:
        """Draws nothing yet. prints: results meanwhile, and two cannot share a terminal."""
        from rich.console import Console
        from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        console = Console(stderr=True)
        self.draws = console.is_terminal and not (prints and sys.stdout.isatty())
        bar = 12 if console.width >= WIDE else 6
        self.room = console.width - bar - TIME
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=bar),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[more]}"),
            console=console,
            redirect_stdout=False,
            disable=not self.draws,
        )
        self.tasks: dict[str, TaskID] = {}
        self.noted = time.monotonic()

    def __enter__(self) -> "Progress":
        """Start drawing."""
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last state on the screen."""
        self.bars.stop()

    def show(self, what: str, done: float, total: float, more: str = "", *, restart: bool = False) -> None:
        """Move the bar called `what`. restart: the ETA counts from here (an earlier run did the rest)."""
        more = whole = more or f"{done:.0f}/{total:.0f}"
        while more and len(what) + len(more) > self.room:
            more = more.rpartition(", ")[0]
        if what not in self.tasks:
            self.tasks[what] = self.bars.add_task(what, total=total, more=more)
        if restart:
            self.bars.reset(self.tasks[what], completed=int(done), total=total, more=more)
        else:
            self.bars.update(self.tasks[what], completed=done, total=total, more=more)
        if not self.draws and time.monotonic() - self.noted > NOTE_SECONDS:
            self.noted = time.monotonic()
            note(f"{what}: {100 * done / max(total, 1):.0f} %, {whole}")

    def complete(self) -> None:
        """Fill every bar there is."""
        for task in self.bars.tasks:
            self.bars.update(task.id, completed=task.total)

    def step(self, what: str) -> Callable[[int, int], None]:
        """A callback (done, total) that moves the bar called `what`."""
        return lambda done, total: self.show(what, done, total)


class CompressProgress:
    """Follows a compress run: bars for the kurtosis pass, calibration and tensors, counts for Ctrl-C."""

    def __init__(self, progress: Progress, check: "Callable[[Plan], None] | None" = None) -> None:
        """progress: draws the bars    check: raises where a plan is not what was asked for."""
        self.progress, self.check = progress, check
        self.tensors = self.done = self.bytes = self.bytes_done = 0
        self.work = self.work_done = 0
        self.error = ""

    def options(
        self, jobs: int, device: str, workers: "Workers | None" = None, scratch: "Path | None" = None
    ) -> "Options":
        """How to run, with this object looking on."""
        from trilobite.quantize.run.options import Options
        from trilobite.quantize.watcher import Watcher

        return Options(
            jobs=jobs,
            device=device,
            on_plan=self.on_plan,
            on_line=self.on_line,
            watcher=Watcher(progress=self.progress.show, note=note),
            workers=workers,
            scratch=scratch,
        )

    def on_plan(self, plan: "Plan") -> None:
        """The size of the job; the pre-pass is over."""
        if self.check:
            self.check(plan)
        self.progress.complete()
        self.tensors = len(plan.lines)
        self.bytes = sum(line.nbytes for line in plan.lines)
        self.work = sum(_work(line) for line in plan.lines)

    def on_line(self, line: "PlanLine", record: Mapping[str, Any], fresh: bool) -> None:
        """One tensor is done, by this run (fresh) or by an earlier one."""
        self.done += 1
        self.bytes_done += line.nbytes
        self.work_done += _work(line)
        if "error" in record:
            self.error = f", error {record['error']:.4f}"
        more = f"{self.done}/{self.tensors} tensors, {size(self.bytes_done)}/{size(self.bytes)}{self.error}"
        self.progress.show("compress", self.work_done, self.work, more, restart=not fresh)

    def state(self) -> str:
        """What Ctrl-C says of it."""
        if not self.tensors:
            return "nothing has been written yet; run the same command to begin again"
        return f"{self.done} of {self.tensors} tensors are done; run the same command to continue"


def _work(line: "PlanLine") -> int:
    """What a tensor costs: the weights to be quantized. Copying is next to nothing."""
    rows, columns = line.matrix.shape if line.format else (1, 1)
    return int(rows * columns)


class _Loop:
    """What transformers loops over while it loads: a bar appears once that has taken some seconds."""

    def __init__(self, items: Any, what: str) -> None:
        self.items, self.what = items, what

    def __iter__(self) -> Iterator[Any]:
        total, started = len(self.items), time.monotonic()
        with ExitStack() as shown:
            bars: Progress | None = None
            for done, item in enumerate(self.items):
                if bars is None and time.monotonic() - started > PATIENCE:
                    bars = shown.enter_context(Progress())
                if bars is not None:
                    bars.show(self.what, done, total)
                yield item


def _loop(factory: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A loop of transformers with our bar; all else as it would be."""
    if args and hasattr(args[0], "__len__"):
        return _Loop(args[0], str(kwargs.get("desc") or "load").lower())
    return factory(*args, **kwargs)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the notes and warnings of transformers off the screen, and bars but those of slow loading and downloads."""
    import warnings

    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hook = logging.set_tqdm_hook(_loop)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            enable_progress_bars()  # the hub's, which are drawn on terminals only
            yield
    finally:
        logging.set_tqdm_hook(hook)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
