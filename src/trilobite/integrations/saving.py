"""`save_pretrained` of a packed model: what transformers does not write beside the tensors."""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from trilobite.checkpoint.files import explained, write_whole
from trilobite.checkpoint.guard import guarded
from trilobite.checkpoint.packed import REPORT
from trilobite.checkpoint.verify import refreshed
from trilobite.errors import DestinationError
from trilobite.quantize.run.card import CARD, is_ours


def notes_of(folder: Path) -> dict[str, str]:
    """The report and the model card of a packed checkpoint, by file name, as far as it has them."""
    return {
        name: (folder / name).read_bytes().decode(errors="replace")
        for name in (REPORT, CARD)
        if (folder / name).is_file()
    }


def save_packed(
    model: PreTrainedModel,
    notes: Mapping[str, str],
    save_directory: str | PathLike[str],
    is_main_process: bool = True,
    push_to_hub: bool = False,
    **kwargs: Any,
) -> None:
    """`save_pretrained`, whose arguments it takes, with the report and the guard in config.json.

    notes: texts by file name    An adapter is saved alone, as transformers does.
    Raises DestinationError for `push_to_hub`, which would upload the folder before it is whole.
    """
    if push_to_hub:
        raise DestinationError(
            f"{save_directory}: save_pretrained(push_to_hub=True) would upload a folder without {REPORT}; call "
            "model.push_to_hub(name)"
        )
    type(model).save_pretrained(model, save_directory, is_main_process=is_main_process, **kwargs)
    if not is_main_process or getattr(model, "_hf_peft_config_loaded", False):
        return
    folder = Path(save_directory)
    config = guarded(json.loads((folder / "config.json").read_bytes()))
    with explained(folder):
        if (
            REPORT in notes
        ):  # other weights may have been put in since, and the tokenizer's files are another's
            notes = {**notes, REPORT: refreshed(notes[REPORT], folder)}
        for name, text in {**notes, "config.json": json.dumps(config, indent=2) + "\n"}.items():
            if name != CARD or is_ours(folder / CARD):
                write_whole(folder / name, text.encode())
