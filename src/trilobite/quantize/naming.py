"""Errors about a matrix say which one."""

from collections.abc import Iterator
from contextlib import contextmanager

from trilobite.errors import CalibrationError, WeightError


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Let WeightError and CalibrationError begin with a name."""
    try:
        yield
    except (WeightError, CalibrationError) as e:
        raise type(e)(f"{name}: {e}") from None
