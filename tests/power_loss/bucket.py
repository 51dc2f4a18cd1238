"""A bucket of object storage in memory, that does to a program what the real one may: at any request, of any kind.

A request is lost with its program, refused, served without an answer, or refused and served later; a listing is late.
An object of more than PART_BYTES goes up in parts, each a request, and what a killed program leaves of it is an upload
that no listing shows. Every place below `s3://bucket` is one storage here.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

import threefold.storage
from tests.ckptkit.support.programs import Killed
from tests.power_loss.states_of_bucket import AT_END, Fault
from threefold.errors import StorageError
from threefold.storage import ObjectInfo, Storage, TemporaryFailure
from threefold.storage.contract import Buffer, buffers_of
from threefold.storage.memory import MemoryStorage
from threefold.storage.wrapping import Request, WrappingStorage

T = TypeVar("T")
URL = "s3://bucket"
PART_BYTES, AGE_S = 512, 2 * 86_400.0
CHANGES = ("write", "delete", "copy")


@dataclass(frozen=True)
class Place:
    """A place of the bucket, joined with names as a folder's path is; the same work comes to it `times` times."""

    url: str = URL
    times: int = 1

    def __truediv__(self, name: object) -> "Place":
        return Place(f"{self.url}/{name}", self.times)

    def __str__(self) -> str:
        return self.url

    def exists(self) -> bool:
        return True


@dataclass
class Bucket:
    """The places with their objects, the requests so far, and what is to go wrong with some of them."""

    faults: Mapping[int, Fault] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    uploads: dict[tuple[str, str], int] = field(default_factory=dict)  # unfinished, with how often that was begun
    places: dict[str, MemoryStorage] = field(default_factory=dict)
    is_killed: bool = False
    _silent: Request | None = None  # what gets no answer however often it is asked
    _late: list[tuple[int, Callable[[], object]]] = field(default_factory=list)
    _written: list[tuple[int, str, str]] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.RLock)

    def open(self, url: str) -> "BucketStorage":
        """Open a place."""
        return BucketStorage(self, self.places.setdefault(url.rstrip("/"), MemoryStorage(url.rstrip("/"))))

    def serve(self, url: str, request: Request, work: Callable[[], T], *, is_piece: bool = False) -> T:
        """Serve a request, or do to it what is to be done."""
        with self._lock:
            if self.is_killed:
                raise Killed
            number = len(self.requests)
            self.requests.append(request)
            self._land(number)
            if request == self._silent:
                raise TemporaryFailure("no answer came")
            fault = self.faults.get(number)
            if fault is None or fault.kind == "stale":
                return self._serve(url, request, work)
            if fault.kind == "kill":
                self.is_killed = True
                raise Killed
            if fault.kind == "late" and not is_piece:
                self._late.append((number + fault.after, lambda: self._serve(url, request, work)))
            if fault.kind == "lost":
                self._serve(url, request, work)
            if fault.kind == "refused" and fault.is_final:
                raise StorageError("it is not allowed")
            self._silent = request if fault.is_final else None
            raise TemporaryFailure("no answer came")

    def _serve(self, url: str, request: Request, work: Callable[[], T]) -> T:
        if request.operation == "write":
            self._written += [(len(self.requests), url, key) for key in request.keys if not self.has(url, key)]
        return work()

    def has(self, url: str, key: str) -> bool:
        """Return whether an object is there."""
        return self.places[url].info(key) is not None

    def hidden(self, url: str) -> Set[str]:
        """Return the keys that the listing which was just served does not show yet."""
        fault = self.faults.get(len(self.requests) - 1)
        if fault is None or fault.kind != "stale":
            return frozenset()
        return {key for _, place, key in self._written[-fault.after :] if place == url}

    def _land(self, number: float) -> None:
        due = [work for at, work in self._late if at <= number]
        self._late = [each for each in self._late if each[0] > number]
        for work in due:
            with suppress(StorageError):  # nobody hears that another had won
                work()

    def settle(self) -> None:
        """Begin to count, and let every listing show what is there."""
        self.requests.clear()
        self._written.clear()

    def end(self, *, lands: bool) -> None:
        """End the program: nothing fails any more; what was under way lands, and all is two days old."""
        self.faults, self.is_killed, self._silent = {}, False, None
        if lands:
            self._land(AT_END)
        then = time.time() - AGE_S
        for place in self.places.values():
            place._objects = {key: (data, min(at, then)) for key, (data, at) in place._objects.items()}

    def names(self) -> set[str]:
        """Return all objects, and all unfinished uploads."""
        objects = {f"{url}/{key}" for url, place in self.places.items() for key in place.list_keys()}
        return objects | {f"{url}/{key} as an unfinished upload" for url, key in self.uploads}

    def abort_uploads(
        self,
        storage: Storage,
        prefix: str = "",
        older_than_s: float = 0.0,
        *,
        is_wanted: Callable[[str], bool] = lambda key: True,
        dry_run: bool = False,
    ) -> list[str]:
        """Do what `abort_stale_uploads` does, of uploads that are as old as may be."""
        stale = [key for url, key in self.uploads if url == storage.url and key.startswith(prefix) and is_wanted(key)]
        for key in stale if not dry_run else ():
            del self.uploads[storage.url, key]
        return stale


class BucketStorage(WrappingStorage):
    """A place of a bucket, every request of which goes through it; local files are hidden, as there are none."""

    hides_files = True

    def __init__(self, bucket: Bucket, place: MemoryStorage) -> None:
        super().__init__(place)
        self._bucket = bucket

    def _request(self, request: Request, work: Callable[[], T]) -> T:
        return self._bucket.serve(self.url, request, work)

    def write(
        self, key: str, data: Buffer | Iterable[Buffer], *, if_absent: bool = False, size_bytes: int | None = None
    ) -> None:
        content = b"".join(buffers_of(data))
        if if_absent or len(content) <= PART_BYTES:
            super().write(key, content, if_absent=if_absent)
            return
        upload, bucket = (self.url, key), self._bucket
        piece = Request("part", (key,))
        bucket.serve(self.url, piece, lambda: bucket.uploads.update({upload: 1}), is_piece=True)
        try:
            for _ in range(0, len(content), PART_BYTES):
                bucket.serve(self.url, piece, lambda: None, is_piece=True)
            super().write(key, content)
        except StorageError:
            bucket.uploads.pop(upload, None)  # taken back
            raise
        bucket.uploads.pop(upload, None)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        items = tuple(super().list(prefix))
        hidden = self._bucket.hidden(self.url)
        return (item for item in items if item.key not in hidden)

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        keys = tuple(super().list_keys(prefix))
        hidden = self._bucket.hidden(self.url)
        return (key for key in keys if key not in hidden)


def in_memory(bucket: Callable[[], Bucket], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every s3:// URL be a place of the bucket that `bucket` returns then; pauses take no time."""
    backend = threefold.storage._backend

    def opened(url: Any, write_memory_bytes: int | None) -> Storage:
        is_ours = str(url).startswith(URL)
        return bucket().open(str(url)) if is_ours else backend(url, write_memory_bytes)

    monkeypatch.setattr("threefold.storage._backend", opened)
    monkeypatch.setattr("threefold.storage.repeating.time", SimpleNamespace(sleep=lambda seconds: None))
    for module in ("ckptkit.runs.debris", "ckptkit.rewrite.reshard", "datakit.format.output"):
        monkeypatch.setattr(
            f"{module}.abort_stale_uploads", lambda *words, **more: bucket().abort_uploads(*words, **more)
        )
