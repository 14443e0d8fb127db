"""What says that a step cannot be replayed."""

from trilobite.errors import TrilobiteError


class Unsuited(TrilobiteError):
    """A step that cannot be replayed, and why; never leaves this room."""


class NotNow(Unsuited):
    """One that cannot where others of the same model may: a hook, another cache, memory that ended."""
