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
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """How many ranks take part."""

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in their order."""

    def all_to_all(self, send: Sequence[Buffer]) -> list[Buffer]:
        """Give send[r] to each rank r; returns what each rank sent to this one, valid until the next call."""


class Alone:
    """The exchange of a process that loads by itself: one rank, which sends to itself alone."""

    rank, size = 0, 1

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of the one rank."""
        return [data]

    def all_to_all(self, send: Sequence[Buffer]) -> list[Buffer]:
        """Return what the one rank sent to itself."""
        return list(send)


def agreed(exchange: Exchange, work: Callable[[], bytes | None]) -> list[bytes]:
    """Do some work on every rank and return the bytes that each one's returned.

    If it fails on any rank, all of them raise the error of the first one that failed.
    """
    fault: Exception | None = None
    made = b""
    try:
        made = work() or b""
    except Exception as error:
        fault = error
    brought, faults = outcomes(exchange, made, None if fault is None else _reported(fault, exchange))
    if not faults:
        return brought
    if fault is not None and (exchange.size == 1 or not isinstance(fault, UserError | OSError)):
        raise fault  # as it is, with the place where it happened
    raise faults[min(faults)] from fault


def outcomes(
    exchange: Exchange, data: bytes = b"", error: UserError | None = None
) -> tuple[list[bytes], dict[int, UserError]]:
    """Return what each rank brings, and by rank the errors of those that failed; one `all_gather`, no pickle.

    An error of a subclass comes as the kind of error that it is: UserError, CheckFailed or StorageError.
    """
    message = _SOUND + data
    if error is not None:
        kind = next(name for name, known in reversed(_KINDS.items()) if isinstance(error, known))
        message = _FAILED + json.dumps({"kind": kind, "message": error.message, "hint": error.hint}).encode()
    faults: dict[int, UserError] = {}
    answers = exchange.all_gather(message)
    for rank, answer in enumerate(answers):
        if answer[:1] == _FAILED:
            found = json.loads(answer[1:])
            faults[rank] = _KINDS[found["kind"]](found["message"], hint=found["hint"])
    return [answer[1:] for answer in answers], faults


def on_all(exchange: Exchange, work: Callable[[], T]) -> T:
    """Do some work on every rank and give what this rank's returned; errors are those of `agreed`."""
    made: list[T] = []
    agreed(exchange, lambda: made.append(work()))
    return made[0]


def _reported(error: Exception, exchange: Exchange) -> UserError:
    """Return an error as all ranks report it."""
    if isinstance(error, UserError):
        return error
    what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return StorageError(f"rank {exchange.rank} of {exchange.size} failed: {what}")
