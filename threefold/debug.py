"""THREEFOLD_DEBUG=1: errors print their traceback, requests to storages are logged, scratch of a failed run is kept."""

import os

VARIABLE = "THREEFOLD_DEBUG"


def is_debugging() -> bool:
    """Return whether the environment asks for all that helps to find a fault; "" and "0" do not."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")
