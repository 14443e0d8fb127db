"""No progress bars and no notes of transformers while it works for us: its errors become our own."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers silent for a while."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    if shown:  # else it would hide those of the hub again, which the command line shows
        logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)  # it logs tracebacks of what it raises anyway
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
