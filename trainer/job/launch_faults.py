"""What ends the ranks that a launcher started: a line each with rank, host and how it ended, and what to try."""

import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from threefold.cli import log
from threefold.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

MOST_LINES = 8


class FailedLaunch(UserError):
    """What a launcher or its ranks met; `exit_code` is that of the process that ends."""

    def __init__(self, message: str, *, hint: str | None = None, exit_code: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended: torch's failure of it, and what the rank left in its error file."""

    rank: int
    failure: "ProcessFailure"

    @property
    def _left(self) -> dict[str, Any]:
        message = self.failure.error_file_data.get("message")
        return message if isinstance(message, dict) else {}

    @property
    def is_said(self) -> bool:
        """Whether the ranks have printed that error themselves."""
        return bool(self._left.get("extraInfo", {}).get("is_said"))

    @property
    def text(self) -> str:
        """The first line of its error, if it left one."""
        return str(self._left.get("message", "")).partition("\n")[0]

    @property
    def exit_code(self) -> int:
        """Its exit code as shells count them."""
        code = self.failure.exitcode
        return 128 - code if code < 0 else code

    @property
    def place(self) -> tuple[int, int, int]:
        """Where it is among those that ended, causes first: a rank that lost another, or was ended, follows from one.

        torch notes times in whole seconds.
        """
        was_closed = self.exit_code == 128 + signal.SIGTERM and not self.text
        return 2 * was_closed + self.text.startswith("RankLost"), int(self.failure.timestamp), self.rank

    def __str__(self) -> str:
        failure = self.failure
        how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
        who = f"rank {self.rank} on {socket.gethostname()} (local rank {failure.local_rank}, pid {failure.pid})"
        return f"{who} {how}" + (f": {self.text}" if self.text else "")

    @property
    def hint(self) -> str:
        """What to look at, or to try."""
        if self.failure.exitcode == -signal.SIGKILL:
            return "dmesg -T | grep -i 'killed process' shows whether memory ran out; the same command resumes a run"
        if self.failure.exitcode < 0:
            return "PYTHONFAULTHANDLER=1 before the same command prints where; the same command resumes a run"
        return "what it printed is above, or in the folder of --log-dir"


def report_ranks(error: "ChildFailedError") -> int:
    """Report each rank that failed by itself, unless it said so, and return the exit code of the first of them.

    FailedLaunch if the first did not.
    """
    ends = (RankEnd(rank, failure) for rank, failure in error.failures.items())
    first, *others = sorted(ends, key=lambda end: end.place)
    for end in [end for end in others if not end.is_said and end.place[0] == 0][:MOST_LINES]:
        log(f"also {end}")
    if first.is_said:
        return first.exit_code
    raise FailedLaunch(str(first), hint=first.hint, exit_code=first.exit_code) from error
