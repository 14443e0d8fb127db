"""Benchmark tasks through lm_eval (the `eval` extra), from local files or from the Hugging Face hub.

    tasks = load_tasks(["piqa", "mmlu"], data=Path("eval"))
    run_tasks(model, tokenizer, tasks, limit=None, batch=8)["piqa"]["acc"]

With `data`, the tasks are those of `task_files/`: they read that folder (`task_data` describes its files) and
touch no network. Without it they are lm_eval's own, which download their data. Few-shot counts are those of
MiLo (arXiv:2504.02658, section 4): five for MMLU and TriviaQA, none for the others.
"""

import copy
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trilobite.errors import EvaluationError, MissingExtraError, TrilobiteError
from trilobite.evaluate.task_data import SHOTS
from trilobite.runtime.finite import checked_logits

TASK_FILES = Path(__file__).with_name("task_files")
TASKS = tuple(sorted(path.stem for path in TASK_FILES.glob("*.yaml")))
"""The tasks that run from local files."""

MMLU = "mmlu"
FEWSHOT = {"mmlu": SHOTS, "triviaqa": SHOTS}
"""By what the name of a task begins with: those of MMLU's subjects begin with its own."""
ONLINE_NAMES = {"wikitext2": "wikitext"}
TALKERS = ("lm_eval", "datasets", "huggingface_hub")
"""Loggers with notes on what is registered, and on every attempt to reach the network."""
SEED = 1234
"""lm_eval's own default for the choice of few-shot examples."""
BOOTSTRAP_ITERATIONS = 1000
"""For the standard error of the perplexities; that of a mean is computed, not sampled."""


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: dict[str, Any],
    *,
    limit: int | None,
    batch: int,
) -> dict[str, dict[str, float]]:
    """Run benchmark tasks one after another on a loaded model.

    tasks: of `load_tasks`    batch: sequences in a forward pass
    limit: only the first `limit` items of every task, and of every member of a group
    returns: task -> {metric: value, metric_stderr: its standard error where there is one, "n": items scored};
        the members of a group follow it under their own names (mmlu, mmlu_anatomy, ...)
    Raises EvaluationError for a result that is NaN, and for logits that are.
    """
    from lm_eval.models.huggingface import HFLM

    if limit is not None and limit < 1:
        raise EvaluationError(f"limit {limit}: no items; use --limit 1 or more, or leave it out")
    results: dict[str, dict[str, float]] = {}
    with _quiet(), checked_logits(model):
        # a copy, because lm_eval gives the tokenizer a padding token
        lm = HFLM(
            pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch, trust_remote_code=False
        )
        for name, task in tasks.items():
            results |= _run(lm, name, task, limit)
    return results


def load_tasks(tasks: list[str], *, data: Path | None) -> dict[str, Any]:
    """Build tasks with their data and few-shot counts, ready for `run_tasks`.

    tasks: names from TASKS, or without `data` any that lm_eval knows    data: folder of the data files
    returns: task -> lm_eval's TaskDict (a group and its members, or one task). Raises EvaluationError for an unknown
    task, a missing or damaged data file; MissingExtraError when lm_eval is not installed.
    """
    with _quiet():
        manager = _manager(data)
        return {name: _load(manager, name, online=data is None) for name in tasks}


def _manager(data: Path | None) -> Any:
    """lm_eval's index of the tasks that there are: its own, or those that read a folder."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as e:
        raise MissingExtraError(
            'tasks need lm_eval, which is not installed; pip install "trilobite[eval]"'
        ) from e
    if data is None:
        return TaskManager()
    if not data.is_dir():
        raise EvaluationError(f"{data}: not a folder; --data must name the folder of the task files")
    return TaskManager(include_path=str(TASK_FILES), include_defaults=False, metadata={"data": str(data)})


def _load(manager: Any, name: str, *, online: bool) -> Any:
    known_as = ONLINE_NAMES.get(name, name) if online else name
    subject = f"{MMLU}::{name}" if name.startswith(f"{MMLU}_") and not online else ""
    if subject:
        known_as = MMLU
    if known_as not in manager.all_tasks:
        more = ", and all that `lm_eval ls tasks` prints" if online else ""
        raise EvaluationError(f"task {name!r}: unknown; known are {', '.join(TASKS)}{more}")
    try:
        loaded = manager.load([known_as])
    except TrilobiteError:
        raise
    except (OSError, ValueError) as e:  # what `datasets` raises without network, or without its cache
        reason = " ".join(str(e).split())
        raise EvaluationError(f"task {name!r}: cannot load its data ({reason}); use --data DIR") from e
    if subject:
        loaded = _only(loaded, subject, name)
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", next((n for of, n in FEWSHOT.items() if name.startswith(of)), 0))
        task.set_fewshot_seed(SEED)
    return loaded


def _only(loaded: Any, member: str, name: str) -> Any:
    """One member of a group, on its own. Raises EvaluationError where there is none."""
    if member not in loaded["tasks"]:
        some = ", ".join(m.rpartition("::")[2] for m in sorted(loaded["tasks"])[:3])
        raise EvaluationError(f"task {name!r}: no subject of {MMLU}; expected one of its 57, such as {some}")
    return {**loaded, "tasks": {member: loaded["tasks"][member]}, "groups": {}}


def deviations(tasks: Mapping[str, Any]) -> dict[str, str]:
    """How tasks of `load_tasks` differ from lm_eval's of the same names, where they do."""
    found = {}
    for name, loaded in tasks.items():
        for task in loaded["tasks"].values():
            metadata = task.get_config("metadata") or {}
            if differs := metadata.get("differs"):
                found[name] = str(differs)
    return found


def _run(lm: Any, name: str, loaded: Any, limit: int | None) -> dict[str, dict[str, float]]:
    """One task, or one group and its members, as flat numbers."""
    # not simple_evaluate: it spends seconds on describing the machine, and takes one few-shot count for all
    from lm_eval import evaluate

    raw = evaluate(
        lm=lm, task_dict=loaded, limit=limit, bootstrap_iters=BOOTSTRAP_ITERATIONS, log_samples=False
    )
    items = {member: count["effective"] for member, count in raw["n-samples"].items()}
    results: dict[str, dict[str, float]] = {}
    if loaded["groups"]:
        group = next(iter(loaded["groups"]))  # the one asked for; its subgroups come after it
        results[name] = _numbers(name, raw["results"][group], sum(items.values()))
    for member, count in items.items():
        # lm_eval calls the inline members of a group GROUP::NAME
        label = name if list(raw["results"]) == [member] else member.rpartition("::")[2]
        results[label] = _numbers(label, raw["results"][member], count)
    return results


def _numbers(name: str, metrics: dict[str, Any], items: int) -> dict[str, float]:
    """{"acc,none": x, "acc_stderr,none": y, "alias": ...} -> {"acc": x, "acc_stderr": y, "n": items}."""
    split = {key: key.split(",", 1) for key, value in metrics.items() if "," in key and value != "N/A"}
    # the part after the comma names a filter of the answers; it is noise unless there are several
    several = len({answer_filter for _, answer_filter in split.values()}) > 1
    numbers = {key if several else metric: float(metrics[key]) for key, (metric, _) in split.items()}
    for metric, value in numbers.items():
        if math.isnan(value):
            raise EvaluationError(f"{name}: {metric} is NaN, as the model's logits are; damaged checkpoint")
    return {**numbers, "n": items}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep notes of lm_eval and of what it loads data with off the screen; standard output is the caller's alone.

    Its bootstrap would also fork one process per core, each a copy of a process that holds the model.
    """
    levels = {logger: logger.level for logger in map(logging.getLogger, TALKERS)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr), patch.dict("os.environ", {"DISABLE_MULTIPROC": "1"}), _bars():
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextmanager
def _bars() -> Iterator[None]:
    """Progress bars, lm_eval's and those of what it calls, where there is a terminal to draw them on."""
    from tqdm import tqdm

    begin = tqdm.__init__

    def hidden(bar: Any, *args: Any, **kwargs: Any) -> None:
        begin(bar, *args, **{**kwargs, "disable": True})

    with nullcontext() if sys.stderr.isatty() else patch.object(tqdm, "__init__", hidden):
        yield
