"""JsonLines: a file of one JSON line a step, in order, whatever happened to the run.

Resuming at step N first takes out the lines of later steps, and a line cut short by a kill.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from threefold.errors import StorageError


class JsonLines:
    """A sink that is a file; owned by the training thread."""

    def __init__(self, path: str, *, start_step: int, say: Callable[[str], None]) -> None:
        """Open the file, cut back to `start_step`; `say` takes a line on a full disk."""
        self._say, self._failed = say, False
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            cut_back(Path(path), start_step)
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}", hint="--metrics FILE") from error

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line."""
        self._keep_going(lambda file: file.write(json.dumps(line) + "\n"))

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._keep_going(lambda file: file.flush())

    def close(self) -> None:
        """Close the file."""
        self._keep_going(lambda file: file.close())

    def _keep_going(self, action: Callable[[TextIO], object]) -> None:
        """Act on the file; a full disk is reported once, and what found no room is written with a later line."""
        try:
            action(self._file)
        except OSError as error:
            if not self._failed:
                self._say(f"warning: cannot write {self._file.name}: {error.strerror}; training goes on")
            self._failed = True


def cut_back(path: Path, step: int) -> None:
    """Rewrite a metrics file without the lines of steps after `step` and without lines that are not whole."""
    if not path.is_file():
        return
    temporary = path.with_name(path.name + ".tmp")
    with path.open(encoding="utf-8", errors="replace") as source, temporary.open("w", encoding="utf-8") as target:
        for line in source:
            try:
                keep = line.endswith("\n") and json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError, RecursionError):  # cut short by a kill
                continue
            if keep:
                target.write(line)
    os.replace(temporary, path)
