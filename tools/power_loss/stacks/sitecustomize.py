"""Says who calls each fsync, where strace sees it: a Python that has this folder in its PYTHONPATH imports it first.

Before each fsync its callers are written to /dev/null, outermost first, as far as they are of this project. With
POWER_LOSS_WITHOUT the fsyncs whose callers hold that text are left out.
"""

import os
import sys

CALLERS = b"FSYNC BY "
_KITS = tuple(f"{os.sep}{kit}{os.sep}" for kit in ("threefold", "ckptkit", "datakit"))
_fsync = os.fsync
_without = os.environ.get("POWER_LOSS_WITHOUT", "")
_null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def fsync(file: int) -> None:
    """Say who calls, then make the file durable."""
    frame, callers = sys._getframe(1), list[str]()
    while frame is not None:
        code = frame.f_code
        if any(kit in code.co_filename for kit in _KITS):
            callers.append(f"{os.path.basename(code.co_filename).removesuffix('.py')}.{code.co_qualname}")
        frame = frame.f_back
    by = " > ".join(reversed(callers))
    os.write(_null, CALLERS + by.encode())
    if not _without or _without not in by:
        _fsync(file)


os.fsync = fsync
