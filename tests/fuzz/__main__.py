"""Run cases and print those that ended otherwise than they should; the last line is JSON.

PYTHONPATH=tests python -m fuzz --cases 10000
PYTHONPATH=tests python -m fuzz --only 4711          # one case again, with all that it printed
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from fuzz.cases import Fuzzer, Verdict, prepare

parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--cases", type=int, default=10_000, help="how many")
parser.add_argument("--first", type=int, default=0, help="number of the first")
parser.add_argument("--only", type=int, help="this case alone")


def main() -> None:
    """Exit status 1 if a case failed."""
    args = parser.parse_args()
    numbers = range(args.first, args.first + args.cases) if args.only is None else [args.only]
    failed: list[Verdict] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder) / "made")
        fuzzer = Fuzzer(Path(folder) / "made", Path(folder) / "work")
        for number in numbers:
            verdict = fuzzer.run(number)
            if verdict.failure or args.only is not None:
                failed += [verdict] * bool(verdict.failure)
                last = (
                    verdict.tail if args.only is not None else verdict.tail.strip().rpartition("\n")[2][:300]
                )
                print(
                    f"{number} {verdict.action}: {verdict.failure or 'as it should'}: {verdict.done}\n    {last}",
                    flush=True,
                )
    kinds = Counter(verdict.failure for verdict in failed)
    print(
        json.dumps(
            {
                "cases": len(numbers),
                "failed": len(failed),
                "kinds": kinds,
                "seconds": round(time.monotonic() - started),
            }
        )
    )
    sys.exit(1 if failed else 0)


main()
