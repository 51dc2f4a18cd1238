"""Reached: the lines of a program's files that some work runs, its imports among them."""

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

Line = tuple[str, int]


def lines_reached(work: Callable[[], object], root: Path, places: Sequence[str]) -> set[Line]:
    """Return the lines, by path below the root, of files in some places that work runs here and in its threads."""
    lines, paths, starts = set[Line](), dict[str, str](), tuple(f"{root / place}" for place in places)

    def seen(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in paths:
            paths[name] = str(Path(name).relative_to(root)) if name.startswith(starts) else ""
        if not paths[name]:
            return None  # and no line of it is looked at
        lines.add((paths[name], frame.f_lineno))
        return seen

    threading.settrace(seen)
    sys.settrace(seen)
    try:
        work()
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]  # as its documentation says
    return lines
