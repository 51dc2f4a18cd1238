"""What ranks bring to each other: bytes of those that worked, errors of those that failed, of one kind on all ranks."""

from collections.abc import Sequence

import pytest

from ckptkit import Alone, on_all, outcomes
from ckptkit.io.blocks import DamagedGranule
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import Buffer, TemporaryFailure


class Recorded:
    """An exchange of which this rank is the last; `before` is what the others send."""

    def __init__(self, before: Sequence[bytes]) -> None:
        self._before, self.rank, self.size = before, len(before), len(before) + 1

    def all_gather(self, data: bytes) -> list[bytes]:
        return [*self._before, data]

    def all_to_all(self, send: Sequence[Buffer]) -> list[Buffer]:
        raise NotImplementedError


def sent(error: UserError | None = None, data: bytes = b"") -> bytes:
    """What a rank of such an outcome sends."""
    others: list[bytes] = []

    class Listening(Alone):
        def all_gather(self, data: bytes) -> list[bytes]:
            others.append(data)
            return [data]

    outcomes(Listening(), data, error)
    return others[0]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UserError("no such flag", hint="--help"), UserError),
        (CheckFailed("it is damaged"), CheckFailed),
        (DamagedGranule("a.safetensors", 3, ("w",)), CheckFailed),
        (StorageError("the disk is full: größer", hint="df"), StorageError),
        (TemporaryFailure("try later"), StorageError),
    ],
)
def test_errors_reach_all_ranks_as_what_they_are(error: UserError, kind: type[UserError]) -> None:
    exchange = Recorded([sent(data=b"\1 any bytes"), sent(error), sent()])
    brought, faults = outcomes(exchange, b"mine")
    assert (brought[0], brought[2:]) == (b"\1 any bytes", [b"", b"mine"])
    [(rank, fault)] = faults.items()
    assert (rank, type(fault), fault.message, fault.hint) == (1, kind, error.message, error.hint)
    assert fault.exit_code == error.exit_code
    with pytest.raises(kind) as raised:
        on_all(exchange, lambda: 5)
    assert raised.value.message == error.message


def test_a_rank_alone_raises_its_own_error_and_returns_its_own_value() -> None:
    own_error = KeyError("x")

    def fail() -> None:
        raise own_error

    with pytest.raises(KeyError) as raised:
        on_all(Alone(), fail)
    assert raised.value is own_error
    assert on_all(Alone(), lambda: ("any", {"value": 1})) == ("any", {"value": 1})
