"""Python's garbage collector rests while a model is built.

It runs when so many objects were made, and looks through all that there are: of a model with thousands of matrices ever
more, none of which it may free. Once at the end, it finds them old, and leaves them alone when tokens come.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """Collect nothing for a while, in the whole process; then, where it is not off anyway, once, and as before."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
            gc.collect()
