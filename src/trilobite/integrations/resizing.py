"""`resize_token_embeddings` of a packed model: its packed head becomes an ordinary one, whose rows can change."""

import json
import warnings

from torch import nn
from transformers import PreTrainedModel

from trilobite.checkpoint.packed import REPORT, report_text
from trilobite.recipe import Role
from trilobite.runtime.modules.dequantize import dense_linear
from trilobite.runtime.modules.linear import PackedLinear


def resize_packed(
    model: PreTrainedModel,
    notes: dict[str, str],
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Embedding:
    """`resize_token_embeddings`, whose arguments it takes; of another size only, a packed head is dequantized.

    notes: texts by file name, in which the report says so from now on
    """
    before = model.get_input_embeddings().num_embeddings
    wanted = before if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of:
        wanted += -wanted % pad_to_multiple_of
    if wanted == before:
        return model.get_input_embeddings()  # type: ignore[no-any-return]
    head = model.get_output_embeddings()
    if isinstance(head, PackedLinear):
        warnings.warn(
            f"the packed head of {before} tokens is a {model.dtype} one of {wanted} now, and is saved as one",
            stacklevel=2,
        )
        model.set_output_embeddings(dense_linear(head, model.dtype))
    embeddings: nn.Embedding = type(model).resize_token_embeddings(
        model, new_num_tokens, pad_to_multiple_of, mean_resizing
    )
    if REPORT in notes:
        notes[REPORT] = _resized(notes[REPORT], before, wanted, embeddings.weight.itemsize)
    return embeddings


def _resized(report: str, before: int, rows: int, itemsize: int) -> str:
    """The report, of matrices [before, K] with a row for every token."""
    head = json.loads(report)
    lines = head.pop("tensors")
    for i, line in enumerate(lines):
        if line["role"] in (Role.EMBEDDING.value, Role.HEAD.value) and line["shape"][0] == before:
            columns = line["shape"][1]
            lines[i] = {
                "name": line["name"],
                "role": line["role"],
                "shape": [rows, columns],
                "bytes": rows * columns * itemsize,
                "kept": f"resized from {before} tokens",
            }
    return report_text(head, lines)
