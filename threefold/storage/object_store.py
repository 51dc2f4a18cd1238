"""S3 (and what speaks its language), Google Cloud Storage and Azure through obstore; `service` sets the client up.

Large objects go up in parts, several at once, each repeated on its own if its request fails; an upload that fails is
taken back, and what a killed process left behind `abort_stale_uploads` finds. Memory of a write is at most
MAX_PARTS_IN_FLIGHT + 2 parts; a part has PART_BYTES, or of an object that is known to exceed 70 GiB a
MAX_PARTS-th. obstore does not check what it receives: who reads must.

obstore's threads begin with the first request of a process, and a fork leaves them behind. A request of the child would
wait for ever; it would also put its sockets into the parent's epoll, whose threads crash or stop on them. So a child of
a process that has made a request is refused, whichever storage it asks.
"""

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from threefold.backoff import Backoff
from threefold.errors import StorageError, UserError
from threefold.masking import shown_cause
from threefold.storage.contract import (
    AlreadyExists,
    Buffer,
    ObjectInfo,
    Storage,
    TemporaryFailure,
    buffers_of,
    bytes_of_ranges,
    check_key,
)
from threefold.storage.service import open_service, request_timeout_s

PART_BYTES = 8 << 20
MIN_PART_BYTES = 5 << 20  # S3 takes no smaller part but the last
MAX_PARTS = 9_000  # of the 10,000 that S3 and GCS take, in case the object is a little larger than was said
MAX_PARTS_IN_FLIGHT = 8
MAX_COPY_BYTES = 5 << 30  # S3 copies no larger object in one request
NUM_DELETES_AT_ONCE = 16
RETRY_AFTER_S = 0.1
MISSING_BUCKET = ("NoSuchBucket", "ContainerNotFound")  # what S3 and GCS, and Azure, call it
ERRORS = BaseError, FileNotFoundError  # the builtin is what obstore raises for a missing object
T = TypeVar("T")


class ObjectStorage(Storage):
    """Keys below SCHEME://BUCKET/PREFIX."""

    supports_if_absent = True
    _threads_of: ClassVar[int | None] = None  # the process that has obstore's threads, if any has

    def __init__(self, url: str, *, write_memory_bytes: int | None = None) -> None:
        self._service = open_service(url)
        self.url = self.address = url.rstrip("/")
        self._write_memory_bytes = write_memory_bytes
        self._prefix = f"{self._service.path}/" if self._service.path else ""

    def write(
        self, key: str, data: Buffer | Iterable[Buffer], *, if_absent: bool = False, size_bytes: int | None = None
    ) -> None:
        path = self._path(key)
        if if_absent:
            self._write_if_absent(key, path, b"".join(buffers_of(data)))
            return
        part_bytes, parts_in_flight = part_plan(size_bytes, self._write_memory_bytes)
        source = iter(buffers_of(data))
        first, num_bytes = [], 0
        for buffer in source:
            first.append(buffer)
            num_bytes += memoryview(buffer).nbytes
            if num_bytes > part_bytes:
                break
        if num_bytes <= part_bytes:
            self._call("write", key, lambda: obstore.put(self._store, path, b"".join(first), use_multipart=False))
            return
        parts = itertools.chain(_emptying(first), source)
        self._call(
            "write",
            key,
            lambda: obstore.put(
                self._store, path, parts, chunk_size=part_bytes, max_concurrency=parts_in_flight, use_multipart=True
            ),
            is_repeatable=False,
        )

    def read(self, key: str) -> bytes:
        return self._call("read", key, lambda: bytes(obstore.get(self._store, self._path(key)).bytes()))

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        path = self._path(key)

        def get(starts: list[int], stops: list[int]) -> list[memoryview]:
            def fetch() -> Any:
                return obstore.get_ranges(self._store, path, starts=starts, ends=stops, coalesce=0)

            return [memoryview(part) for part in self._call("read", key, fetch)]

        return bytes_of_ranges(f"{self.url}/{key}", ranges, get)

    def info(self, key: str) -> ObjectInfo | None:
        def find() -> ObjectInfo | None:
            try:
                return self._object(obstore.head(self._store, self._path(key)))
            except FileNotFoundError:
                return None

        return self._call("look up", key, find)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        # obstore's prefixes end at a "/"; the rest of ours, and the order, are left to us
        folder = (self._prefix + prefix).rpartition("/")[0]

        def find() -> list[ObjectInfo]:
            found = obstore.list(self._store, folder or None, chunk_size=1000)
            objects = [self._object(meta) for chunk in found for meta in chunk]
            return sorted((o for o in objects if o.key.startswith(prefix)), key=lambda item: item.key)

        return iter(self._call("list", prefix, find))

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        folder = (self._prefix + prefix).rstrip("/")
        found = self._call("list", prefix, lambda: obstore.list_with_delimiter(self._store, folder or None))
        return iter(sorted(path.rpartition("/")[2] for path in found["common_prefixes"]))

    def delete(self, keys: Iterable[str]) -> None:
        paths = [self._path(key) for key in keys]
        backoff = Backoff(RETRY_AFTER_S, max_tries=self._service.attempts)
        may_renew = True
        while paths:
            try:
                obstore.delete(self._store, paths)
                return
            except FileNotFoundError:
                self._delete_singly(paths)  # a server that names what is missing may have passed over what is not
                return
            except ERRORS as error:
                if may_renew and _is_refusal(error) and self._renew():
                    may_renew = False
                    continue
                # obstore repeats what the server refused for now, but no deletion whose answer was lost
                if "status code" in str(error) or (pause_s := backoff.next_s()) is None:
                    raise self._failure(error, "delete", f"{len(paths)} objects") from shown_cause(error)
                time.sleep(pause_s)

    def copy(self, source: str, target: str) -> None:
        info = self.info(source)
        if info is None:
            raise StorageError(f"{self.url}/{source} does not exist")
        if info.size_bytes > MAX_COPY_BYTES:
            starts = range(0, info.size_bytes, PART_BYTES)
            ranges = ((start, min(start + PART_BYTES, info.size_bytes)) for start in starts)
            self.write(target, (self.read_ranges(source, [each])[0] for each in ranges), size_bytes=info.size_bytes)
            return
        self._call("copy", source, lambda: obstore.copy(self._store, self._path(source), self._path(target)))

    def afresh(self) -> "ObjectStorage":
        return ObjectStorage(self.address, write_memory_bytes=self._write_memory_bytes)

    @property
    def _store(self) -> Any:
        return self._usable(self._service.store)

    def _usable(self, store: Any) -> Any:
        """Return a client that is about to be used; StorageError if a fork left its threads behind."""
        process = os.getpid()
        if ObjectStorage._threads_of is None:
            ObjectStorage._threads_of = process
        if ObjectStorage._threads_of != process:
            raise StorageError(
                f"cannot reach {self.url}: this process was forked from one that had used an object store, whose "
                "client does not survive a fork",
                hint='DataLoader(..., multiprocessing_context="forkserver"), '
                'or multiprocessing.set_start_method("forkserver")',
            )
        return store

    def _path(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _object(self, meta: Any) -> ObjectInfo:
        key, etag = meta["path"].removeprefix(self._prefix), (meta["e_tag"] or "").strip('"')
        return ObjectInfo(key, meta["size"], meta["last_modified"].timestamp(), etag)

    def _delete_singly(self, paths: Sequence[str]) -> None:
        def remove(path: str) -> None:
            try:
                obstore.delete(self._store, path)
            except FileNotFoundError as error:
                if any(code in str(error) for code in MISSING_BUCKET):
                    raise

        with ThreadPoolExecutor(NUM_DELETES_AT_ONCE) as pool:
            self._call("delete", f"{len(paths)} objects", lambda: [*pool.map(remove, paths)])

    def _write_if_absent(self, key: str, path: str, body: bytes) -> None:
        """Put once; if the answer was lost, or a repeat met the first try, what is there decides.

        Nothing there after a lost answer, a conflict (409) or a failed condition (412) is cause for another try: a PUT
        that is still under way brings the same bytes.
        """
        exclusive_store = self._usable(self._service.exclusive_store)
        backoff = Backoff(RETRY_AFTER_S, max_tries=self._service.attempts, within_s=request_timeout_s())
        may_renew = True
        while True:
            try:
                obstore.put(exclusive_store, path, body, mode="create", use_multipart=False)
                return
            except (PermissionDeniedError, UnauthenticatedError, FileNotFoundError) as error:
                if may_renew and _is_refusal(error) and self._renew():
                    may_renew, exclusive_store = False, self._usable(self._service.exclusive_store)
                    continue
                raise self._failure(error, "write", key) from shown_cause(error)
            except ERRORS as error:
                failure = self._failure(error, "write", key)
                try:
                    stored = None if self.info(key) is None else self.read(key)
                except StorageError:
                    raise failure from shown_cause(error)
                if stored == body:
                    return
                if stored is not None:
                    raise AlreadyExists(f"{self.url}/{key} exists already: another writer won") from shown_cause(error)
                may_pass = isinstance(failure, TemporaryFailure) or re.search(r"status code: (409|412)", str(error))
                if not may_pass or (pause_s := backoff.next_s()) is None:
                    raise failure from shown_cause(error)
                time.sleep(pause_s)

    def _call(self, doing: str, key: str, work: Callable[[], T], *, is_repeatable: bool = True) -> T:
        try:
            return work()
        except ERRORS as error:
            failure, cause = self._failure(error, doing, key), shown_cause(error)
            if not (is_repeatable and _is_refusal(error) and self._renew()):
                raise failure from cause
        try:
            return work()
        except ERRORS as error:
            raise self._failure(error, doing, key) from shown_cause(error)

    def _renew(self) -> bool:
        """Read credentials of files once more, if they may have been replaced; False if no others can be there."""
        if self._service.credentials is None or not self._service.credentials.may_be_new:
            return False
        try:
            self._service = open_service(self.url)
        except UserError:  # what refused says more
            return False
        return True

    def _failure(self, error: Exception, doing: str, key: str) -> StorageError:
        """Return what obstore said, in one sentence: its message repeats itself over twenty lines."""
        service, text = self._service, str(error)
        place = f"{self.url}/{key}".rstrip("/")
        code = match[1] if (match := re.search(r"<Code>(\w+)</Code>", text)) else ""
        status = match[1] if (match := re.search(r"status code: (\d+)", text)) else ""
        reason = " ".join(filter(None, [status, code]))
        if code in MISSING_BUCKET:
            message = f"bucket {service.bucket!r} does not exist on {service.server}"
            return StorageError(message, hint=service.make_bucket_hint)
        if service.credentials and service.credentials.fault:
            return StorageError(f"cannot {doing} {place}: {service.credentials.fault}", hint=service.credentials_hint)
        if "ExpiredToken" in text or "RequestExpired" in text:
            expired = f"the credentials of {service.identity} have expired"
            return StorageError(f"cannot {doing} {place}: {expired}", hint=service.credentials_hint)
        if "169.254." in text or "metadata.google" in text:
            return StorageError(f"cannot {doing} {place}: no credentials are set", hint=service.credentials_hint)
        if isinstance(error, FileNotFoundError):
            return StorageError(f"{place} does not exist")
        if status in ("401", "403") or "AccessDenied" in text:
            refused = f"{service.server} refused {service.identity} ({reason or 'AccessDenied'})"
            return StorageError(f"cannot {doing} {place}: {refused}", hint=service.credentials_hint)
        if status:
            kind = TemporaryFailure if status == "429" or status.startswith("5") else StorageError
            return kind(f"cannot {doing} {place}: {service.server} answered {reason}")
        cause = text.split("\n", 1)[0].rpartition(" - ")[2]
        message = f"cannot {doing} {place}: no answer from {service.server} ({cause})"
        return TemporaryFailure(message, hint=service.address_hint)


def _is_refusal(error: Exception) -> bool:
    """Return whether a server refused who asked; S3 answers 400 to a token that has expired."""
    return bool(re.search(r"status code: 40[13]|ExpiredToken|AccessDenied", str(error)))


def part_plan(size_bytes: int | None, write_memory_bytes: int | None) -> tuple[int, int]:
    """Bytes of a part and how many are in flight at once, so that these and two more being gathered fit in memory.

    An object of known size gets parts so large that MAX_PARTS of them suffice, whatever memory that takes.
    """
    part_bytes, in_flight = PART_BYTES, MAX_PARTS_IN_FLIGHT
    if write_memory_bytes is not None:
        part_bytes = min(max(write_memory_bytes // 3, MIN_PART_BYTES), PART_BYTES)
    if size_bytes is not None:
        part_bytes = max(part_bytes, -(-size_bytes // MAX_PARTS))
    if write_memory_bytes is not None:
        in_flight = min(max(write_memory_bytes // part_bytes - 2, 1), MAX_PARTS_IN_FLIGHT)
    return part_bytes, in_flight


def _emptying(buffers: list[Buffer]) -> Iterator[Buffer]:
    """Yield the buffers one after the other, each let go once it was given out."""
    buffers.reverse()
    while buffers:
        yield buffers.pop()
