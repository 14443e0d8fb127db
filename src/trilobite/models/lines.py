"""Sentences as they come from files and pipes: one a line."""

from trilobite.errors import PromptError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(data: bytes) -> list[str]:
    """The lines of UTF-8 text, ended by LF or CR LF. Raises PromptError, with the line, for bytes that are no text."""
    lines = data.removeprefix(BYTE_ORDER_MARK).split(b"\n")
    if not lines[-1]:
        lines.pop()
    sentences = []
    for number, line in enumerate(lines, 1):
        try:
            sentences.append(line.removesuffix(b"\r").decode())
        except UnicodeDecodeError as e:
            raise PromptError(
                f"line {number}: not UTF-8 at byte {e.start + 1}; convert the input with iconv"
            ) from e
    return sentences
