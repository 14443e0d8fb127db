"""Kill commands at random moments, a thousand times in all; the last line is JSON.

PYTHONPATH=tests python -m kills --kills 1000
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from kills.killer import Killer
from kills.tasks import TASKS, prepare

parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--kills", type=int, default=1000, help="how many")
parser.add_argument("--seed", type=int, default=0, help="of their moments")
parser.add_argument("--only", choices=[task.name for task in TASKS], help="this task alone")


def main() -> None:
    """Exit status 1 where a run ended otherwise than one that was let be."""
    args = parser.parse_args()
    tasks = [task for task in TASKS if args.only in (None, task.name)]
    tolls = []
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder) / "made")
        killer = Killer(Path(folder) / "made", Path(folder) / "work", args.seed)
        for i, task in enumerate(tasks):
            toll = killer.run(task, args.kills * (i + 1) // len(tasks) - args.kills * i // len(tasks))
            tolls.append(toll)
            print(
                f"{toll.task}: {toll.seconds} s, {toll.kills} kills, {toll.finished} results, "
                f"{'; '.join(toll.wrong) or 'all as if nobody had killed them'}",
                flush=True,
            )
    wrong = sum(map(len, (toll.wrong for toll in tolls)))
    summary = {
        "kills": sum(t.kills for t in tolls),
        "results": sum(t.finished for t in tolls),
        "wrong": wrong,
    }
    print(json.dumps({**summary, "tasks": [asdict(toll) for toll in tolls]}))
    sys.exit(1 if wrong else 0)


main()
