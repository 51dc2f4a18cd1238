"""Overflow: a save that finds no room makes some, by the rules of retention, and else goes to the next tier.

The leader alone prunes, and its word decides, so that all writers save to the same place. Blocks whose memory is reused
are there once: a save of such goes elsewhere only if the lack of room is seen before it begins.

What an earlier writer may still be copying stays until this one has saved. A slower tier that does not answer counts as
lacking all that it is to have, as long as saves find a place; a save that finds none lets those steps go, for the next.

Of several nodes, each with a disk of its own, one alone may be full. It brings its part of a step to the slower tier
that the others copy theirs to, whose leader commits. Its writers go there each by itself.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from ckptkit.format.keys import Seat
from ckptkit.handoff.protocol import SaveOrder
from ckptkit.loading.roots import newest_first
from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.retention import owed
from ckptkit.writer.commit import NoRoom, NotCommitted, await_commit
from ckptkit.writer.maintenance import Maintenance
from ckptkit.writer.retries import Retries
from ckptkit.writer.step import is_full, report_failed
from threefold.errors import StorageError, UserError
from threefold.storage import AlreadyExists, open_storage

SMALL_FILES_BYTES = 64 << 10  # the root, and the rest of the last block of each file
HAS_NO_ROOM, HAS_ANOTHER = "has no room", "has another try of it"  # why a step is elsewhere
DEADLINES_OF_DEBRIS = 2  # what broke off longer ago than so many deadlines is nobody's any more


@dataclass(frozen=True)
class Room:
    """The room in the place of a save, as its writer sees it; `copied` returns the steps that are being copied now.

    Until a first save `is_new`: an earlier writer may be copying what the slower tiers lack.
    """

    order: SaveOrder
    maintenance: Maintenance
    copied: Callable[[], Collection[int]]
    may_prune: Callable[[], bool]
    is_new: bool

    @property
    def is_there(self) -> bool:
        """Whether all writers' files fit, if each has as many bytes as this one's."""
        num_bytes = sum(file.size_bytes + file.index.size for file in self.order.files)
        return self.maintenance.has_room(num_bytes * self.order.seat.num_writers + SMALL_FILES_BYTES)

    def make(self, *, spares_uncopied: bool = True) -> None:
        """Delete what is not to be kept, and what saves left that broke off; a leader alone does."""
        if self.order.seat.leads and self.may_prune():
            needed = {*self.copied(), *(self._uncopied() if self.is_new and spares_uncopied else ())}
            debris_s = DEADLINES_OF_DEBRIS * self.order.deadline_s
            self.maintenance.make_room(self.order.retention, needed, debris_s)

    def let_go(self) -> None:
        """Delete also what slower tiers may lack, as no place took a step, so that the next one finds room."""
        if self.is_new and self.order.intervals and not self.is_there:
            step = self.order.seat.step
            self.maintenance.warn(f"no place took step {step}: older steps did not wait for slower tiers")
            self.make(spares_uncopied=False)

    def _uncopied(self) -> set[int]:
        """Return the steps that slower tiers lack of those that they are to have: all, if one does not answer."""
        order, uncopied = self.order, set[int]()
        steps = committed_steps(open_storage(order.seat.url)) if order.intervals else []
        for url, every in order.intervals.items():
            try:
                newest = next(newest_first(open_storage(url)), -1)
            except UserError:
                newest = -1
            uncopied |= owed(every, steps, newest)
        return uncopied


def save_where_room_is(
    room: Room, write: Callable[[Seat], object], patience_s: Callable[[], float], retries: Retries
) -> tuple[Seat, str]:
    """Save by `write` to the order's seat, or to its overflow; return the seat, and why it is not the first.

    Raise what the first place's failure was, if it was not for want of room or no place is left.
    """
    try:
        return _saved(room, write, patience_s, retries)
    except StorageError:
        room.let_go()
        raise


def _saved(
    room: Room, write: Callable[[Seat], object], patience_s: Callable[[], float], retries: Retries
) -> tuple[Seat, str]:
    """Save where there is room."""
    order, seat = room.order, room.order.seat
    if seat.leads and not room.is_there:
        room.make()
    is_alone = seat.num_writers == 1
    if is_alone and order.overflow is not None and not room.is_there:
        return _saved_elsewhere(order, write, StorageError(f"{seat.url} has no room for step {seat.step}"))
    try:
        write(seat)
        return seat, ""
    except StorageError as error:
        if isinstance(error, AlreadyExists) and order.goes_beside_nodes:  # another node has not saved that try
            return _saved_elsewhere(order, write, error)
        if not is_full(error):
            _report_elsewhere(order, patience_s, retries, error)
            raise
        failure = error
    room.make()
    if order.ring.is_window:
        _report_elsewhere(order, patience_s, retries, failure)
        raise failure
    if is_alone and order.retention.has_rules:
        try:
            write(seat)
            return seat, ""
        except StorageError as error:
            if not is_full(error):
                _report_elsewhere(order, patience_s, retries, error)
                raise
    if order.overflow is None:
        raise failure
    if not (seat.leads or isinstance(failure, NoRoom) or order.goes_beside_nodes):
        _await_word(seat, patience_s, retries)
    return _saved_elsewhere(order, write, failure)


def _saved_elsewhere(order: SaveOrder, write: Callable[[Seat], object], failure: StorageError) -> tuple[Seat, str]:
    """Save to the overflow; beside nodes that copy their parts there its leader lets them begin."""
    overflow = order.overflow
    assert overflow is not None, "asked for only if there is one"
    marks = [overflow.copying_key] if order.goes_beside_nodes and overflow.leads else []
    try:
        for key in marks:
            open_storage(overflow.url).write(key, b"")
        write(overflow)
    except StorageError as error:
        raise StorageError(
            f"{failure.message}; nor did the next tier take it: {error.message}", hint=failure.hint or error.hint
        ) from error
    with suppress(StorageError):
        open_storage(overflow.url).delete(marks)
    return overflow, HAS_ANOTHER if isinstance(failure, AlreadyExists) else HAS_NO_ROOM


def _report_elsewhere(
    order: SaveOrder, patience_s: Callable[[], float], retries: Retries, error: StorageError
) -> None:  # fmt: skip
    """Report another failure than want of room where the others save, if the leader found no room before it.

    What a node does not have it cannot copy either, and another may wait for that.
    """
    if order.overflow is None or isinstance(error, NotCommitted | AlreadyExists):
        return
    if not order.goes_beside_nodes:
        if order.seat.leads:
            return
        with suppress(StorageError):
            _await_word(order.seat, patience_s, retries)
    report_failed(open_storage(order.overflow.url), order.overflow, error.message)


def _await_word(seat: Seat, patience_s: Callable[[], float], retries: Retries) -> None:
    """Return once the leader says that there was no room; raise what else it says."""
    try:
        await_commit(open_storage(seat.url), seat, lambda: 2 * patience_s(), retries=retries)
    except NoRoom:
        return
