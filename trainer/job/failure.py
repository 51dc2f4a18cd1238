"""How a job reports what ended it: in each rank's error file, which torchrun reads, and as the last line of a rank."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import NoReturn, TypeVar

from threefold.cli import Parser
from threefold.errors import EXIT_OK, UserError
from threefold.masking import masked_values

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun names one for each rank
END_FILE = "TRAINER_END_FILE"  # of a node, which our launcher names: the code that a run ends with by itself
OTHERS_SPEAK_AFTER_S = 5.0
T = TypeVar("T")


class JobParser(Parser):
    """A Parser whose usage faults, which all ranks meet, and signals are reported once a node."""

    def error(self, message: str) -> "None":  # type: ignore[override]
        record(UserError(message))
        let_first_speak()
        super().error(message)

    def report_signal(self, number: int) -> None:
        if _is_first_of_node():
            super().report_signal(number)


def recorded(verb: Callable[[T], int]) -> Callable[[T], int]:
    """Let a verb leave what ends it in this rank's error file."""

    @wraps(verb)
    def act(options: T) -> int:
        try:
            return verb(options)
        except Exception as error:
            record(error)
            raise

    return act


def record(error: BaseException) -> None:
    """Write an error to this rank's error file in torch's form, if torchrun named one.

    torchrun prints what it calls the call stack: of an error that a user can mend that is the error alone.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    text, is_said = f"{type(error).__name__}: {error}", isinstance(error, UserError | OSError)
    trace = text if is_said else "".join(traceback.format_exception(error))
    extra = {"py_callstack": trace, "timestamp": str(int(time.time())), **({"is_said": True} if is_said else {})}
    message = {"message": text, "extraInfo": extra}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(masked_values({"message": message}), file)


def let_first_speak() -> None:
    """Wait on all ranks of a node but its first, which reports an error that all of them meet.

    torchrun then ends the others; one that still lives after a while is alone with its error.
    """
    if not _is_first_of_node():
        time.sleep(OTHERS_SPEAK_AFTER_S)


def _is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def code_of_rank(code: int) -> int:
    """Return what a rank ends with in a run that ends by itself with a code: 0 under a launcher, to which it is left.

    Only ours reads it.
    """
    path = os.environ.get(END_FILE)
    if path and _is_first_of_node():
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(str(code))
    return EXIT_OK if is_launched() else code


def is_launched() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def leave(code: int) -> NoReturn:
    """End the process without what libraries do, and print, at exit: its error stays the last line."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
