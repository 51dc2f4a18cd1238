"""Pauses of Python's garbage collection, while many objects are made of which none is garbage.

A collection looks at all objects of the program each time that their number has grown by a quarter. For 20,000 tensors
that took as long as all the rest of a save's plan.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Let nothing be collected meanwhile; a program that collects by itself, or never, goes on so."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
