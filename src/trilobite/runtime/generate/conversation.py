"""Conversations as JSON files, in the form that the page of `trilobite serve` exports and imports."""

import json
import secrets
from pathlib import Path

from trilobite.checkpoint.files import write_whole
from trilobite.errors import DestinationError, PromptError
from trilobite.runtime.generate.chat import Messages

ROLES = ("system", "user", "assistant")
TITLE = 40
"""Characters of a title."""


def save_conversation(path: Path, messages: Messages, *, system: str = "") -> None:
    """Write a conversation and its system prompt, all or nothing. Raises DestinationError."""
    said = next((m["content"] for m in messages if m["role"] == "user"), "")
    talk = {"id": secrets.token_hex(8), "title": said[:TITLE], "messages": messages, "system": system}
    try:
        write_whole(path, (json.dumps({"trilobite": 1, "conversations": [talk]}, indent=1) + "\n").encode())
    except OSError as e:
        raise DestinationError(f"{path}: cannot be written ({e.strerror}); choose another folder") from e


def load_conversation(path: Path) -> tuple[Messages, str]:
    """The turns and the system prompt of a file's first conversation, or of the `messages` of another program's.

    Raises PromptError for a file that holds none.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as e:
        raise PromptError(f"{path}: cannot be read ({e.strerror}); give a file that /save made") from e
    except ValueError as e:
        raise PromptError(f"{path}: not JSON ({e}); give a file that /save made") from e
    try:
        talk = document["conversations"][0] if "conversations" in document else document
        messages = [{"role": m["role"], "content": m["content"]} for m in talk["messages"]]
        system = [str(talk.get("system", "")), *(m["content"] for m in messages if m["role"] == "system")]
        sound = all(m["role"] in ROLES and isinstance(m["content"], str) for m in messages)
    except (LookupError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise PromptError(
            f"{path}: holds no `messages` of role ({', '.join(ROLES)}) and content; give a file that /save made"
        )
    return [m for m in messages if m["role"] != "system"], "\n".join(filter(None, system))
