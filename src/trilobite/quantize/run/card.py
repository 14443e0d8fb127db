"""The model card of a packed checkpoint: README.md with front matter, as the hub expects it.

A mark at its end holds the checksum of what stands above: a card that a person changed no longer fits it, and is never
written again.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trilobite.checkpoint.evaluation import facts
from trilobite.checkpoint.files import explained, write_whole
from trilobite.quantize.plan.report import Report, report

CARD = "README.md"
LICENSE_KEYS = ("license", "license_name", "license_link")
MAX_README = 2**20
_MARK = re.compile(r"<!-- written by trilobite, sha256 ([0-9a-f]{64}): change the text, and it stays -->\n")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(
    found: Mapping[str, Any], config: Mapping[str, Any], measured: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The text of a card. found: trilobite.json    config: config.json    measured: what `eval --save` kept."""
    made = report(found["tensors"])
    source, recipe = str(found["source"]), str(found["identity"]["recipe"]["name"])
    text = f"---\n{_front_matter(found, config)}---\n\n# {_prose(source)}, packed by Trilobite\n\n"
    text += f"Recipe {_code(recipe)}"
    text += f", ranks {_code(found['rank'])}" if found["rank"] else ""
    text += f": {made.parameters:,} parameters in {made.tensor_bytes:,} bytes of tensors, "
    text += f"{made.bits_per_weight:.3f} bits per weight.\n"
    text += "What became of every tensor is in `trilobite.json`; `trilobite report .` shows it.\n\n"
    text += _roles(made) + _LOADING + _evaluation(measured)
    return f"{text}\n{_mark(text)}"


def is_ours(path: Path) -> bool:
    """Whether a card may be written there: none is there, or one that no person changed."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        return True
    except (OSError, UnicodeDecodeError):
        return False
    above, _, below = text.rpartition("\n<!-- ")
    return bool(_MARK.fullmatch(f"<!-- {below}")) and f"<!-- {below}" == _mark(above)


def update_card(
    folder: Path,
    found: Mapping[str, Any],
    config: Mapping[str, Any],
    measured: Sequence[Mapping[str, Any]],
) -> bool:
    """Write the card of a packed checkpoint anew, unless a person changed it; returns whether it was written.

    Raises DestinationError.
    """
    if not is_ours(folder / CARD):
        return False
    with explained(folder):
        write_whole(folder / CARD, model_card(found, config, measured).encode())
    return True


def base_license(folder: Path) -> dict[str, str]:
    """What the front matter of a checkpoint's README says of its licence; empty where it says nothing."""
    try:
        with (folder / CARD).open("rb") as file:
            text = file.read(MAX_README).decode(errors="replace")
        front = re.match(r"---\s*\n(.*?)\n---\s*\n", text, re.DOTALL)
        data = yaml.safe_load(front[1]) if front else None
    except (OSError, yaml.YAMLError, RecursionError):
        return {}
    if not isinstance(data, dict):
        return {}
    return {key: data[key] for key in LICENSE_KEYS if isinstance(data.get(key), str)}


def _mark(text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"<!-- written by trilobite, sha256 {digest}: change the text, and it stays -->\n"


def _front_matter(found: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    license_of_base = found.get("license", {})
    data: dict[str, Any] = {key: license_of_base[key] for key in LICENSE_KEYS if key in license_of_base}
    if _HUB_ID.fullmatch(source := str(found["source"])):
        data |= {"base_model": source, "base_model_relation": "quantized"}
    data["library_name"] = "trilobite"
    data["pipeline_tag"] = "translation" if config.get("is_encoder_decoder") else "text-generation"
    data["tags"] = ["trilobite", "quantized", "mixture-of-experts"]
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _roles(made: Report) -> str:
    lines = [
        "| role | format | tensors | bytes | bits per weight | rank | error |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for role in made.roles:
        cells = (
            role.role,
            ", ".join(role.formats),
            str(role.tensors),
            f"{role.bytes:,}",
            f"{role.bits_per_weight:.3f}",
            f"{role.rank:.1f}" if role.rank else "",
            "" if role.error is None else f"{role.error:.4f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\nError: |W - W_q| / |W|, Frobenius, mean of the role's matrices.\n"


_LOADING = """
## How to load it

```
pip install trilobite
trilobite chat .
```

```python
import trilobite  # before from_pretrained: without it transformers refuses this folder
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(".")
```
"""


def _evaluation(measured: Sequence[Mapping[str, Any]]) -> str:
    """What was measured, a line for every number."""
    lines = [
        f"| {_prose(fact.on)} | {_prose(fact.what)} | {'not finite' if fact.value is None else f'{fact.value:.4f}'} |"
        for entry in measured
        for fact in facts(entry)
    ]
    if not lines:
        return ""
    return "\n## Evaluation\n\n| on | what | value |\n| --- | --- | ---: |\n" + "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """A name in backticks, on one line."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"


def _prose(text: str) -> str:
    """A name as text: one line, nothing in it Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>#|!$~&])", r"\\\1", " ".join(str(text).split()))
