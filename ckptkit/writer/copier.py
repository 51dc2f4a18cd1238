"""TierCopier: copies a writer's own files of a step from the first tier to slower ones, beside the saves that follow.

Each place has a thread, which copies one step at a time, and of the steps that wait the newest. A leader (the first
writer of what a place holds) decides which: it marks the step's folder there. The other writers follow the mark, so
that all copy the same one. Files are read back verified, past the page cache, in blocks of 16 MiB, and keep their names
and bytes. Indexes go last, and the root when the leader has seen those of all writers. A copy that fails is tried
again, and given up for a newer step. Nothing is ever removed from where it came from.
"""

import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ckptkit.format.part_copy import copy_part, verified_blocks
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Root
from ckptkit.handoff.protocol import SaveOutcome, TierCopy
from ckptkit.io.striping import Striper
from ckptkit.loading.roots import committed_attempt, read_root, root_key
from ckptkit.plan.cover import Cover
from ckptkit.runs.rollback import quarantine
from ckptkit.writer.commit import commit_root, wait_for_parts
from ckptkit.writer.maintenance import Maintenance
from threefold.backoff import Backoff
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.masking import masked
from threefold.storage import AlreadyExists, Storage, open_storage
from threefold.storage.local import sync_name
from threefold.storage.second_look import read_checked

MAX_TRIES, FIRST_PAUSE_S = 4, 1.0
LOOK_FOR_MARK_S = 1.0
MAX_CHOICES = 4  # steps that a writer remembers, and keeps, until it sees which of them the leader chose


class TierCopier:
    """The threads of one writer process that copy.

    They call `report`, `may_prune` before they prune, and `on_copied` once the first tier need not hold a step longer.
    """

    def __init__(
        self, report: Callable[[SaveOutcome], None], may_prune: Callable[[], bool] = lambda: True,
        on_copied: Callable[[TierCopy], None] = lambda tier_copy: None,
    ) -> None:  # fmt: skip
        self._threads = defaultdict[str, _TierThread](partial(_TierThread, report, may_prune, on_copied))

    def offer(self, tier_copies: Iterable[TierCopy]) -> None:
        """Take steps that are in the first tier now; does not block."""
        for tier_copy in tier_copies:
            self._threads[tier_copy.target.url].offer(tier_copy)

    @property
    def steps(self) -> set[int]:
        """The steps that are being copied or wait for it, and so are still needed in the first tier."""
        return {tier_copy.target.step for each in self._threads.values() for tier_copy in each.copies()}

    def finish(self) -> None:
        """Wait until nothing is left to copy."""
        for thread in self._threads.values():
            thread.finish()


class _TierThread:
    """One place's thread, which lives while there is something to copy, and the steps that wait for it.

    The saving thread and the main thread of the writer process call `offer`, `copies` and `finish`.
    """

    def __init__(
        self,
        report: Callable[[SaveOutcome], None],
        may_prune: Callable[[], bool],
        on_copied: Callable[[TierCopy], None],
    ) -> None:
        self._report, self._may_prune, self._on_copied = report, may_prune, on_copied
        self._maintenance: Maintenance | None = None
        self._changed = threading.Condition()
        self._waiting: list[TierCopy] = []
        self._current: TierCopy | None = None
        self._thread: threading.Thread | None = None
        self._ending_since: float | None = None

    def offer(self, tier_copy: TierCopy) -> None:
        with self._changed:
            self._waiting.append(tier_copy)
            num_kept = 1 if tier_copy.target.leads else MAX_CHOICES
            passed_over, self._waiting = self._waiting[:-num_kept], self._waiting[-num_kept:]
            self._changed.notify()
            if self._thread is None:
                name = f"copy to {tier_copy.target.url}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
        self._report_passed_over(passed_over, tier_copy)

    def copies(self) -> list[TierCopy]:
        with self._changed:
            return [*self._waiting, *filter(None, [self._current])]

    def finish(self) -> None:
        with self._changed:
            self._ending_since = time.monotonic()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (tier_copy := self._next()) is not None:
            started = time.monotonic()
            self._maintenance = maintenance = self._maintenance or Maintenance(
                tier_copy.target.url, leads=tier_copy.target.leads
            )
            error = self._copy(tier_copy, maintenance.striper)
            may_prune = not error and self._may_prune()
            if tier_copy.target.leads and may_prune:
                maintenance.prune(tier_copy.target.step, tier_copy.retention, tier_copy.needed)
            with self._changed:
                self._current = None
            self._report(_outcome(tier_copy, error, time.monotonic() - started, maintenance.take_warning()))
            if tier_copy.source.leads and may_prune:
                self._make_room(tier_copy)

    def _next(self) -> TierCopy | None:
        """Return the next step to copy; None ends the thread."""
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    return None
                waiting = list(self._waiting)
            chosen = waiting[-1] if waiting[-1].target.leads else _marked(waiting)
            with self._changed:
                if chosen is not None and chosen in self._waiting:  # not passed over for those that came meanwhile
                    at = self._waiting.index(chosen)
                    passed_over, self._waiting = self._waiting[:at], self._waiting[at + 1 :]
                    self._current = chosen
                    break
            if chosen is None and not self._gave_up(waiting[-1]):
                with self._changed:
                    self._changed.wait(LOOK_FOR_MARK_S)
        self._report_passed_over(passed_over, chosen)
        return chosen

    def _gave_up(self, newest: TierCopy) -> bool:
        """Whether, after the last order came, the leader was waited for in vain."""
        with self._changed:
            if self._ending_since is None or time.monotonic() - self._ending_since < newest.deadline_s:
                return False
            left, self._waiting = self._waiting, []
        for tier_copy in left:
            self._report(_outcome(tier_copy, f"writer {tier_copy.target.first_writer} did not begin to copy it", 0.0))
        return True

    def _copy(self, tier_copy: TierCopy, striper: Striper) -> str:
        """Copy one step, however often it takes within reason; return what went wrong, "" if nothing did."""
        backoff = Backoff(FIRST_PAUSE_S, max_tries=MAX_TRIES, within_s=tier_copy.deadline_s)
        while True:
            try:
                copy_to_tier(tier_copy, striper)
                return ""
            except (AlreadyExists, CheckFailed) as failure:  # no other try would end otherwise
                error = str(failure)
                break
            except (UserError, OSError) as failure:
                error = str(failure)
            except Exception as failure:  # a fault of ours: training goes on, and so do the saves
                traceback.print_exc()
                error = f"{type(failure).__name__}: {failure}"
                break
            with self._changed:
                if tier_copy.target.leads and self._waiting:
                    error = f"given up for step {self._waiting[-1].target.step}: {error}"
                    break
                if (pause_s := backoff.next_s()) is None:
                    error = f"{error} (tried {backoff.num_tries} times)"
                    break
                self._changed.wait(pause_s)
        if not tier_copy.target.leads:
            _tell_leader(tier_copy, error)
        return error

    def _make_room(self, tier_copy: TierCopy) -> None:
        """Let the first tier delete what it held for the copy; a fault in that does not end this thread."""
        try:
            self._on_copied(tier_copy)
        except Exception:
            traceback.print_exc()

    def _report_passed_over(self, passed_over: Sequence[TierCopy], chosen: TierCopy) -> None:
        for tier_copy in passed_over:
            self._report(_outcome(tier_copy, f"passed over for step {chosen.target.step}: the copies are slower", 0.0))


def copy_to_tier(tier_copy: TierCopy, striper: Striper | None = None) -> None:
    """Copy one writer's files of a step; the leader then waits for the other writers' and commits.

    Files that an earlier try left whole are not copied again, and nothing is touched once the step is committed. A
    replica that holds another try of the step, which its node saved again since, loses that one.
    """
    seat, step = tier_copy.target, tier_copy.target.step
    source, storage = open_storage(tier_copy.source.url), open_storage(seat.url)
    root: Root | None = None
    if seat.leads:
        root = read_root(source, step)
        if root.attempt != seat.attempt:
            raise AlreadyExists(f"step {step} of {source.url} is of attempt {root.attempt} by now")
    committed = committed_attempt(storage, step, seat.attempt)
    if committed == seat.attempt:
        sync_name(storage, root_key(step))
        return  # the answer to an earlier try was lost
    if committed is not None and not (seat.leads and tier_copy.of_node and quarantine(storage, step, committed)):
        raise AlreadyExists(f"step {step} of {storage.url} is committed already")
    if seat.leads and seat.num_writers > 1:
        storage.write(seat.copying_key, b"")
    file_bytes = tier_copy.data_bytes // max(tier_copy.num_files, 1)
    (striper or Striper()).prepare(storage, seat.keys(0)[0], file_bytes, seat.num_writers)
    for number in reversed(range(tier_copy.num_files)):
        _copy_part(source, storage, seat.keys(number))
    if root is None:
        _await_own_node(tier_copy, storage)
        return
    is_same = root.share is None or tier_copy.of_node  # as in the source, which was checked when it was committed
    cover = None if is_same else Cover(list(root.tensors.values()))
    parts = wait_for_parts(storage, seat, lambda: tier_copy.deadline_s, cover=cover)
    certificate = root.certificate if cover is None else cover.certificate
    copied = replace(root, parts=parts, share=root.share if tier_copy.of_node else None, certificate=certificate)
    if is_same and copied != root:
        raise CheckFailed(f"the files of step {step} in {storage.url} are not those in {source.url}")
    commit_root(storage, copied)
    with suppress(StorageError):
        storage.delete([seat.copying_key])


def _copy_part(source: Storage, target: Storage, keys: tuple[str, str]) -> None:
    """Copy one data file, and then its index, byte for byte."""
    data_key, index_key = keys
    where = f"{source.url}/{index_key}"

    def read(storage: Storage) -> tuple[bytes, PartIndex]:
        text = storage.read(index_key)
        return text, PartIndex.from_bytes(text, where)

    text, index = read_checked(source, where, read)
    copy_part(verified_blocks(source, data_key, index), target, keys, index, text)


def _await_own_node(tier_copy: TierCopy, storage: Storage) -> None:
    """Wait, as the leader of a node, until all of its writers have copied a step; so long it stays there."""
    if tier_copy.source.leads and tier_copy.source.num_writers > 1:
        wait_for_parts(storage, tier_copy.source, lambda: tier_copy.deadline_s)


def _marked(waiting: Sequence[TierCopy]) -> TierCopy | None:
    """Return the newest of some steps that the leader began to copy; None too while the place does not answer."""
    with suppress(StorageError):
        storage = open_storage(waiting[-1].target.url)
        for tier_copy in reversed(waiting):
            if storage.info(tier_copy.target.copying_key) is not None:
                return tier_copy
    return None


def _tell_leader(tier_copy: TierCopy, error: str) -> None:
    """Let the leader wait no longer for this writer's files."""
    with suppress(StorageError):
        open_storage(tier_copy.target.url).write(tier_copy.target.failed_key, masked(error).encode())


def _outcome(tier_copy: TierCopy, error: str, seconds: float, warning: str = "") -> SaveOutcome:
    seat = tier_copy.target
    return SaveOutcome(seat.step, error, tier_copy.data_bytes, seconds, warning=warning, url=seat.url)
