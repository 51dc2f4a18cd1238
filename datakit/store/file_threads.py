"""FileThreads: work on many files in threads, reported every few seconds, ended early by a fault or an interrupt."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event, Lock
from typing import TypeVar

from threefold.errors import UserError

File = TypeVar("File")
Result = TypeVar("Result")
Report = Callable[[str], None]
REPORT_EVERY_S = 2.0


class Ended(Exception):
    """Another file has failed: what this thread does is of no use any more."""


class FileThreads:
    """`num_workers` threads that each take one file after the other; good for one `map`."""

    def __init__(self, num_workers: int, *, report_every_s: float = REPORT_EVERY_S) -> None:
        if num_workers < 1:
            raise UserError(f"{num_workers} workers", hint="--workers 1")
        self._num_workers, self._report_every_s, self._ended = num_workers, report_every_s, Event()
        self._num_bytes, self._lock = 0, Lock()

    def map(self, work: Callable[[File], Result], files: Sequence[File], report: Report) -> list[Result]:
        """Return the results in the files' order.

        After a fault no file is begun, and it is raised once all threads rest.
        """

        def work_unless_ended(file: File) -> Result:
            if self._ended.is_set():
                raise Ended
            try:
                return work(file)
            except BaseException:
                self._ended.set()
                raise

        with ThreadPoolExecutor(self._num_workers) as pool:
            futures = [pool.submit(work_unless_ended, file) for file in files]
            unfinished = set(futures)
            try:
                while unfinished := wait(unfinished, timeout=self._report_every_s).not_done:
                    num_done = len(files) - len(unfinished)
                    report(f"{num_done}/{len(files)} files, {self._num_bytes / 1e6:,.1f} MB")
            finally:  # an interrupt comes up here, in the main thread
                self._ended.set()
        for future in futures:
            fault = future.exception()
            if fault is not None and not isinstance(fault, Ended):
                raise fault
        return [future.result() for future in futures]

    def until_ended(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the blocks of one file's work, which are counted.

        Ended between two of them once the work on all ends.
        """
        for block in blocks:
            if self._ended.is_set():
                raise Ended
            with self._lock:
                self._num_bytes += len(block)
            yield block
