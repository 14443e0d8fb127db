"""SHA-256 of every file that `trilobite compress` makes of the bundled model: did a change change bytes?

    python tools/packed_hashes.py > after.txt                 # every preset, then what presets leave out
    python tools/packed_hashes.py --only quip2 --only gptq3   # cases by name
    diff before.txt after.txt

Run it with the `trilobite` of two checkouts and compare. What calibrates does so on a few short windows. Nothing in a
packed checkpoint depends on the clock; the identity of the run (versions, instruction set) has a line of its own.
"""

import argparse
import contextlib
import hashlib
import io
import json
import sys
import tempfile
from pathlib import Path

from trilobite.checkpoint.packed import TIMES
from trilobite.cli import app
from trilobite.recipe import PRESETS, needs_calibration

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "tiny-moe"
TEXT = ROOT / "examples" / "heldout.txt"
CALIBRATION = ["--calibration", str(TEXT), "--samples", "6", "--context", "64"]

PLAIN = {
    "quip2-free-rank": "-r quip2-free --rank uniform-4 --compensator fp16",
    "quip2-rtn": "-r quip2-free --method rtn",
}
CALIBRATED = {
    "order": "-r gptq2 --method gptq-order",
    "gptq-rank": "-r gptq3 --rank dense-8+kurtosis-4",
    "order-rank": "-r gptq3 --method gptq-order --rank uniform-4 --compensator int8",
    "quip2-rank": "-r quip2 --rank uniform-4",
    "saving": "-r gptq3 --propagate original",
    "keep": "-r gptq3 --keep expert",
    "tuned": "-r quip2 --finetune full",
    "tuned-original": "-r quip4 --finetune block --propagate original",
}
DOUBLE = """
name: double
rank: sparse-4
rules:
  - {roles: [head], format: int8-channel-sym, method: rtn}
  - {roles: [attention], format: int4-g32-sym-dq, method: METHOD}
  - {roles: [expert], names: "*.layers.0.*", format: int2-g64-dq, method: METHOD, rank: 0}
  - {roles: [expert], format: int3-channel-sym, method: METHOD}
"""
"""Formats that no preset has. METHOD is replaced."""


def cases(folder: Path) -> dict[str, list[str]]:
    """Arguments of `compress` by case, in order: --hessians takes what an earlier case saved."""
    hessians = str(folder / "hessians")
    found = {
        name: ["-r", name, *(CALIBRATION if needs_calibration(recipe) else [])]
        for name, recipe in PRESETS.items()
    }
    for method in ("search", "hqq", "gptq", "gptq-order"):
        recipe = folder / f"double-{method}.yaml"
        recipe.write_text(DOUBLE.replace("METHOD", method))
        found[recipe.stem] = ["-r", str(recipe), *(CALIBRATION if method.startswith("gptq") else [])]
    found |= {name: text.split() for name, text in PLAIN.items()}
    found |= {name: [*text.split(), *CALIBRATION] for name, text in CALIBRATED.items()}
    found["saving"] += ["--save-hessians", hessians]
    found["taking"] = ["-r", "quip3", "--propagate", "original", "--hessians", hessians]
    return found


def hashes(folder: Path) -> dict[str, str]:
    """By file; the identity in trilobite.json apart from the rest of it."""
    found = {}
    for path in sorted(p for p in folder.iterdir() if p.name != TIMES):
        data = path.read_bytes()
        if path.name == "trilobite.json":
            report = json.loads(data)
            identity = json.dumps(report.pop("identity"), sort_keys=True).encode()
            found["identity"] = hashlib.sha256(identity).hexdigest()
            data = json.dumps(report, sort_keys=True).encode()
        found[path.name] = hashlib.sha256(data).hexdigest()
    return found


def main() -> None:
    """Print a line for each case and file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", metavar="CASE", help="this case; repeat it for several")
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as name:
        known = cases(Path(name))
        if unknown := set(only or ()) - known.keys():
            parser.error(f"unknown case {min(unknown)!r}; known are {', '.join(known)}")
        for case, arguments in known.items():
            if only and case not in only:
                continue
            destination = Path(name) / case
            with contextlib.redirect_stdout(io.StringIO()):
                app(["compress", str(MODEL), str(destination), *arguments], standalone_mode=False)
            for file, digest in hashes(destination).items():
                print(f"{case:16} {file:32} {digest}", flush=True)
            print(f"{case} done", file=sys.stderr)


if __name__ == "__main__":
    main()
