"""A sink for tests: `python -P -m tests.trainer.support.planted_sink NAME PAGE`; NAME is the fault that it has."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer.observe.sinks.__main__ import main
from trainer.observe.sinks.sink import Opening


class Planted:
    """Writes a step's number a line into a file; at step 3 its fault begins."""

    def __init__(self, fault: str, path: str) -> None:
        self._fault, self._file = fault, open(path, "a", buffering=1)  # noqa: SIM115

    def write(self, line: Mapping[str, Any]) -> None:
        if line["step"] == 3 and self._fault == "dies":
            os._exit(7)
        if line["step"] == 3 and self._fault == "raises":
            raise OSError("planted")
        if line["step"] >= 3 and self._fault == "hangs":
            time.sleep(3600)
        self._file.write(f"{line['step']}\n")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self._fault == "never ends":
            time.sleep(3600)
        self._file.write("closed\n")


def refuse(opening: Opening, how: Mapping[str, str], say: Callable[[str], None]) -> Planted:
    raise OSError("planted: it cannot be opened")


def sinks() -> dict[str, Any]:
    faults = ("sound", "hangs", "raises", "dies", "never ends")
    made = {name: (lambda _opening, how, _say, name=name: Planted(name, how["path"])) for name in faults}
    return {**made, "refuses": refuse}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sinks()))
