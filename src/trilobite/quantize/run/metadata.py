"""What stands beside the packed tensors: config.json for everybody, trilobite.json for us."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trilobite.checkpoint.checksums import CHECKSUMS, of_files
from trilobite.checkpoint.guard import guarded
from trilobite.checkpoint.packed import FORMAT_VERSION, SCALED_VERSION, report_text
from trilobite.checkpoint.remote.store import is_url
from trilobite.checkpoint.source import Source
from trilobite.quantize.plan.plan import Plan, describe
from trilobite.quantize.run.card import base_license


def packed_config(source: Source, recipe: str, done: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """config.json of the packed checkpoint: the original's, quantization_config replaced by ours, and the guard.

    done: records by tensor name
    """
    exponents = {name: done[name]["exponent"] for name in sorted(done) if "exponent" in done[name]}
    config = {k: v for k, v in source.config.items() if k not in ("quantization_config", "auto_map")}
    config["quantization_config"] = {
        "quant_method": "trilobite",
        "format_version": SCALED_VERSION if exponents else FORMAT_VERSION,
        "recipe": recipe,
        **({"exponents": exponents} if exponents else {}),
    }
    return guarded(config)


def source_name(src: str, folder: Path) -> str:
    """How reports call an original: its hub id, of folders too that lie in the hub's cache; else the folder's name.

    Of a hub URL, too, it is the hub id, without the revision.
    """
    if is_url(src):
        kind, _, place = src.rstrip("/").partition("://")
        return "/".join(place.split("@")[0].split("/")[:2]) if kind == "hf" else place.rpartition("/")[2]
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+$", str(folder))
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return folder.resolve().name if Path(src).exists() else src


def times_json(done: Mapping[str, Mapping[str, Any]]) -> str:
    """Seconds by tensor. done: records by tensor name."""
    seconds = {name: record["seconds"] for name, record in done.items() if "seconds" in record}
    return (
        json.dumps({"kind": "trilobite times", "version": 1, "seconds": dict(sorted(seconds.items()))}) + "\n"
    )


def packed_report(
    source: Source,
    src: str,
    plan: Plan,
    identity: Mapping[str, Any],
    done: Mapping[str, Mapping[str, Any]],
    tuned: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, bytes],
) -> str:
    """trilobite.json: the plan as executed. Without clocks or paths, so that equal runs give equal bytes.

    src: what the original was called by    done: records by tensor name    tuned: how fine-tuning went, by part
    files: what stands beside it, by name
    """
    head: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "identity": dict(identity),
        "source": source_name(src, source.path),
        "rank": plan.rank,
    }
    if licence := base_license(source.path):
        head["license"] = licence
    if tuned:
        head["finetune"] = {part: dict(record) for part, record in sorted(tuned.items())}
    if files:
        head[CHECKSUMS] = of_files(files)
    rows = []
    for line in plan.lines:
        record = {k: v for k, v in done[line.matrix.name].items() if k not in ("name", "seconds")}
        rows.append(describe(line, plan.recipe.compensator) | record)
    return report_text(head, rows)
