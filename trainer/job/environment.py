"""What torch and its OpenMP read of the environment when they are loaded; set before that, unless the user did.

Also how they are loaded: without collections of garbage, of which there is none, a rank starts sooner.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # its warnings are of each try to connect; what fails is one line of ours
# Threads that wait for each other in a loop take the processor from the one that they wait for: where others run beside
# on the same cores, a step takes several times as long.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}


_PREPARED: set[str] = set()  # what was set here


def prepare_torch() -> bool:
    """Set the variables that are not set; return False if torch is loaded already, which would not see them."""
    if "torch" in sys.modules:
        return False
    for name, value in {**QUIET, **PASSIVE}.items():
        if name not in os.environ:
            os.environ[name] = value
            _PREPARED.add(name)
    return True


def hush_torch() -> None:
    """Let torch, which is not loaded yet, print nothing of its own to stderr, unless the user chose what it does."""
    _PREPARED.update(name for name in QUIET if name not in os.environ)
    os.environ.update({name: "FATAL" for name in QUIET if name in _PREPARED})


def forget_prepared() -> None:
    """Take out what was set: torch is loaded, and a program of another's that is started next decides by itself."""
    for name in _PREPARED:
        os.environ.pop(name, None)
    _PREPARED.clear()


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Enclose the import of torch: what it makes stays, and is searched for garbage neither now nor later."""
    is_first = "torch" not in sys.modules and gc.isenabled()
    if is_first:
        gc.disable()
    try:
        yield
    finally:
        if is_first:
            gc.freeze()
            gc.enable()
