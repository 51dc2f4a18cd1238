"""A plugin of pytest, by which tests call native libraries of the folder in $SANITIZED: `-p tests.native.sanitized`."""

import os
from pathlib import Path

import threefold.native


def library_path(kit: str) -> Path:
    """Return where a kit's library with sanitizers is."""
    return Path(os.environ["SANITIZED"], kit, "_native.so")


threefold.native.library_path = library_path
