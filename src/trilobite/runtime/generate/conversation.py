"""Conversations as JSON files: {"messages": [{"role": "user", "content": "…"}, …]}, as chat templates take them."""

import json
from pathlib import Path

from trilobite.checkpoint.files import write_whole
from trilobite.errors import DestinationError, PromptError
from trilobite.runtime.generate.chat import Messages

ROLES = ("system", "user", "assistant")


def save_conversation(path: Path, messages: Messages) -> None:
    """Write a conversation, all or nothing. Raises DestinationError."""
    document = {"kind": "trilobite conversation", "version": 1, "messages": messages}
    try:
        write_whole(path, (json.dumps(document, indent=2) + "\n").encode())
    except OSError as e:
        raise DestinationError(f"{path}: cannot be written ({e.strerror}); choose another folder") from e


def load_conversation(path: Path) -> Messages:
    """Read a conversation, ours or that of another program. Raises PromptError for a file that holds none."""
    try:
        document = json.loads(path.read_bytes())
    except OSError as e:
        raise PromptError(f"{path}: cannot be read ({e.strerror}); give a file that /save made") from e
    except ValueError as e:
        raise PromptError(f"{path}: not JSON ({e}); give a file that /save made") from e
    found = document.get("messages") if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(map(_is_message, found)):
        raise PromptError(
            f"{path}: holds no list `messages` of role ({', '.join(ROLES)}) and content; give a file that /save made"
        )
    return [{"role": m["role"], "content": m["content"]} for m in found]


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)
    )
