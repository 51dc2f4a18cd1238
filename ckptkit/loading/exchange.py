"""Exchange: how ranks that restore together talk, so that each of them reads a share and gets the rest from the others.

Any object with these four names will do. Every rank makes the same calls in the same order; a call either returns on
all ranks or ends with an error on all, within a deadline of the implementation's.
"""

import json
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import Buffer

T = TypeVar("T")
_KINDS: dict[str, type[UserError]] = {kind.__name__: kind for kind in (UserError, CheckFailed, StorageError)}
_SOUND, _FAILED = b"\0", b"\1"


class Exchange(Protocol):
    """The ranks of a node, or of a whole job: this one's number among them and two collectives over bytes."""

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""

    @property
    def size(self) -> int:
        """How many ranks take part."""

    def all_gather(self, data: bytes) -> list[bytes]:
        """The data of every rank, in their order."""

    def all_to_all(self, send: Sequence[Buffer]) -> list[Buffer]:
        """Give send[r] to each rank r; returns what each rank sent to this one, valid until the next call."""


class Alone:
    """The exchange of one rank."""

    rank, size = 0, 1

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]

    def all_to_all(self, send: Sequence[Buffer]) -> list[Buffer]:
        return list(send)


def agreed(exchange: Exchange, work: Callable[[], bytes | None]) -> list[bytes]:
    """Do some work on every rank and give the bytes that each one's returned.

    Where it fails on any rank, all of them raise the error of the first one that failed.
    """
    fault: Exception | None = None
    try:
        message = _SOUND + (work() or b"")
    except Exception as error:
        fault, message = error, _FAILED + _told(error, exchange)
    answers = exchange.all_gather(message)
    for answer in answers:
        if answer[:1] == _FAILED:
            if fault is not None and (exchange.size == 1 or not isinstance(fault, UserError | OSError)):
                raise fault  # as it is, with the place where it happened
            told = json.loads(answer[1:])
            raise _KINDS[told["kind"]](told["message"], hint=told["hint"]) from fault
    return [answer[1:] for answer in answers]


def together(exchange: Exchange, work: Callable[[], T]) -> T:
    """Do some work on every rank and give what this rank's returned; errors are those of `agreed`."""
    made: list[T] = []
    agreed(exchange, lambda: made.append(work()))
    return made[0]


def _told(error: Exception, exchange: Exchange) -> bytes:
    """An error as the other ranks hear of it."""
    if isinstance(error, UserError):
        kind = next(name for name, known in reversed(_KINDS.items()) if isinstance(error, known))
        return json.dumps({"kind": kind, "message": error.message, "hint": error.hint}).encode()
    what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    message = f"rank {exchange.rank} of the {exchange.size} that restore together failed: {what}"
    return json.dumps({"kind": "StorageError", "message": message, "hint": None}).encode()
