"""What goes wrong in a simulation: how likely it is, a write that lands late, and the end if a promise is broken."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.ckptkit.support.programs import Program
from threefold.storage.wrapping import Request


class Broken(BaseException):
    """Something that must hold does not; no program catches it."""


@dataclass(frozen=True)
class Chances:
    """How likely the same program goes on, is killed, has a request that fails, one whose answer is lost, one that
    lands late, one that takes minutes, or a listing that is late.
    """

    stay: float
    kill: float = 0.0
    fail: float = 0.0
    lose: float = 0.0
    late: float = 0.0
    stall: float = 0.0
    stale: float = 0.0


@dataclass(frozen=True)
class LatePut:
    """A write that failed and lands all the same, at a turn."""

    due: int
    sent: int
    program: Program
    place: str
    request: Request
    work: Callable[[], object]
