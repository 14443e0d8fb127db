"""What keeps packed weights from being taken for others: transformers without Trilobite would skip the quantization,
find none of the parameters that it looks for, and answer with a model of random ones.

`transformers_weights` in config.json names the file to load; a text that names none is an error of every
`from_pretrained`, before anything is loaded, and the error quotes it. The quantizer removes it from the configuration in
memory (`lift`). vLLM does not read that key.
"""

from collections.abc import Mapping
from typing import Any

FIELD = "transformers_weights"
MARK = "packed by Trilobite"
GUARD = f"{MARK}: `pip install trilobite`, then `import trilobite` before from_pretrained"


def guarded(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that transformers refuses without Trilobite; of models with images, its text part alone too."""
    with_guard = {**config, FIELD: GUARD}
    if isinstance(config.get("text_config"), dict):
        with_guard["text_config"] = {**config["text_config"], FIELD: GUARD}
    return with_guard


def lift(config: Any) -> None:
    """Remove the guard, in any release's words, from a configuration of transformers and from its text part."""
    for part in (config, getattr(config, "text_config", None)):
        if str(getattr(part, FIELD, "")).startswith(MARK):
            delattr(part, FIELD)
