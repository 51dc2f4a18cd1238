"""S3 and what speaks its language, through obstore, set up by the standard AWS_* variables.

AWS_ENDPOINT_URL (http or https), AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_MAX_ATTEMPTS are read
here and the rest (session tokens, roles, ...) by obstore. Every request has a deadline, THREEFOLD_STORAGE_TIMEOUT_S
(default 120), and a bounded number of repeats, so a dead server is an error and never a hang. Memory of a write is
at most MAX_PARTS_IN_FLIGHT + 2 parts of PART_BYTES; an object holds at most 10,000 parts (160 GB).
"""

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from threefold.errors import StorageError, UserError
from threefold.storage import AlreadyExists, Buffer, ObjectInfo, TemporaryFailure, buffers_of, check_key

PART_BYTES = 16 << 20
MIN_PART_BYTES = 5 << 20  # S3 takes no smaller part but the last
MAX_PARTS_IN_FLIGHT = 4
MAX_COPY_BYTES = 5 << 30  # S3 copies no larger object in one request
DEFAULT_ATTEMPTS = 8
DEFAULT_TIMEOUT_S = 120.0
RETRY_AFTER_S = 0.1
CREDENTIALS_HINT = "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... (and AWS_ENDPOINT_URL=... if it is not AWS)"
T = TypeVar("T")


class S3Storage:
    """Keys below s3://BUCKET/PREFIX."""

    supports_if_absent = True

    def __init__(self, url: str, *, write_memory_bytes: int | None = None) -> None:
        try:
            from obstore.exceptions import BaseError
            from obstore.store import S3Store
        except ImportError as error:
            raise UserError(f"{url} needs the package obstore", hint='pip install "threefold[s3]"') from error
        # by hand: keys may hold what ends the path of other URLs, "?" and "#"
        bucket, _, path = url.partition("://")[2].rstrip("/").partition("/")
        if not bucket:
            raise UserError(f"{url!r} names no bucket", hint="write it like s3://bucket/run")
        kept = [part for part in path.split("/") if part not in ("", ".", "..")]
        if path and path != "/".join(kept):
            raise UserError(
                f"{url!r} has an empty part, a . or a .. in its path, which no key has here",
                hint="/".join(["s3:/", bucket, *kept]),
            )
        self.url = url.rstrip("/")
        self._part_bytes, self._parts_in_flight = _parts_within(write_memory_bytes)
        self._bucket = bucket
        self._prefix = f"{path}/" if path else ""
        self._endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if self._endpoint and not re.match(r"https?://[^/]", self._endpoint):
            raise UserError(
                f"AWS_ENDPOINT_URL is {self._endpoint!r}, no URL of a server",
                hint="export AWS_ENDPOINT_URL=http://HOST:PORT, or unset it for AWS",
            )
        self._attempts = max(int(_number("AWS_MAX_ATTEMPTS", DEFAULT_ATTEMPTS)), 1)
        self._timeout_s = timeout_s = _number("THREEFOLD_STORAGE_TIMEOUT_S", DEFAULT_TIMEOUT_S)
        config: Any = {"region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"}
        if self._endpoint:
            config["endpoint"] = self._endpoint
        # obstore tells a missing object as the builtin FileNotFoundError
        self._errors = (BaseError, FileNotFoundError)
        options: Any = {
            "client_options": {
                "allow_http": bool(self._endpoint and self._endpoint.startswith("http://")),
                "connect_timeout": timedelta(seconds=min(timeout_s, 5.0)),
                "timeout": timedelta(seconds=timeout_s),
            },
            "retry_config": {
                "max_retries": self._attempts - 1,
                "retry_timeout": timedelta(seconds=timeout_s),
                "backoff": {
                    # each pause is drawn between this and twice the last: 8 attempts outlast at least 3.5 s
                    "init_backoff": timedelta(milliseconds=500),
                    "max_backoff": timedelta(seconds=10),
                    "base": 2,
                },
            },
        }
        self._store = S3Store(self._bucket, config=config, **options)
        # What may be written once only must not be cut: SeaweedFS keeps a PUT without checksum that broke off as empty.
        self._exclusive_store = S3Store(self._bucket, config=config | {"checksum_algorithm": "sha256"}, **options)

    def write(self, key: str, data: Buffer | Iterable[Buffer], *, if_absent: bool = False) -> None:
        import obstore

        path = self._path(key)
        if if_absent:
            self._write_if_absent(key, path, b"".join(buffers_of(data)))
            return
        source = iter(buffers_of(data))
        first, num_bytes = [], 0
        for buffer in source:
            first.append(buffer)
            num_bytes += memoryview(buffer).nbytes
            if num_bytes > self._part_bytes:
                break
        if num_bytes <= self._part_bytes:
            body = b"".join(first)
            self._call("write", key, lambda: obstore.put(self._store, path, body, use_multipart=False))
            return
        parts = itertools.chain(_emptying(first), source)
        self._call(
            "write",
            key,
            lambda: obstore.put(
                self._store, path, parts, chunk_size=self._part_bytes, max_concurrency=self._parts_in_flight,
                use_multipart=True,
            ),
        )  # fmt: skip

    def read(self, key: str) -> bytes:
        import obstore

        return self._call("read", key, lambda: bytes(obstore.get(self._store, self._path(key)).bytes()))

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        import obstore

        path = self._path(key)
        wanted = [(start, stop) for start, stop in ranges if stop > start]
        starts, stops = [start for start, _ in wanted], [stop for _, stop in wanted]
        found: list[Any] = []
        if wanted:
            found = self._call(
                "read", key, lambda: obstore.get_ranges(self._store, path, starts=starts, ends=stops, coalesce=0)
            )
        gotten = iter(found)
        parts = [bytes(next(gotten)) if stop > start else b"" for start, stop in ranges]
        for (start, stop), part in zip(ranges, parts, strict=True):
            if len(part) != stop - start:
                raise StorageError(f"{self.url}/{key} ends at byte {start + len(part)}, wanted were {start} to {stop}")
        return parts

    def info(self, key: str) -> ObjectInfo | None:
        import obstore

        def find() -> ObjectInfo | None:
            try:
                return self._object(obstore.head(self._store, self._path(key)))
            except FileNotFoundError:
                return None

        return self._call("look up", key, find)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        import obstore

        # obstore's prefixes end at a "/"; the rest of ours, and the order, are left to us
        folder = (self._prefix + prefix).rpartition("/")[0]

        def find() -> list[ObjectInfo]:
            found = obstore.list(self._store, folder or None, chunk_size=1000)
            objects = [self._object(meta) for chunk in found for meta in chunk]
            return sorted((o for o in objects if o.key.startswith(prefix)), key=lambda item: item.key)

        return iter(self._call("list", prefix, find))

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        import obstore

        folder = (self._prefix + prefix).rstrip("/")
        found = self._call("list", prefix, lambda: obstore.list_with_delimiter(self._store, folder or None))
        return iter(sorted(path.rpartition("/")[2] for path in found["common_prefixes"]))

    def delete(self, keys: Iterable[str]) -> None:
        import obstore

        paths = [self._path(key) for key in keys]
        for attempt in range(self._attempts if paths else 0):
            try:
                obstore.delete(self._store, paths)
                return
            except self._errors as error:
                # obstore repeats what the server refused for now, but no deletion whose answer was lost
                if attempt == self._attempts - 1 or "status code" in str(error):
                    raise self._failure(error, "delete", f"{len(paths)} objects") from error
                time.sleep(RETRY_AFTER_S * 2**attempt)

    def copy(self, source: str, target: str) -> None:
        import obstore

        info = self.info(source)
        if info is None:
            raise StorageError(f"{self.url}/{source} does not exist")
        if info.size_bytes > MAX_COPY_BYTES:
            starts = range(0, info.size_bytes, PART_BYTES)
            ranges = ((start, min(start + PART_BYTES, info.size_bytes)) for start in starts)
            self.write(target, (self.read_ranges(source, [each])[0] for each in ranges))
            return
        self._call("copy", source, lambda: obstore.copy(self._store, self._path(source), self._path(target)))

    def local_path(self, key: str) -> Path | None:
        return None

    def _path(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _object(self, meta: Any) -> ObjectInfo:
        return ObjectInfo(meta["path"].removeprefix(self._prefix), meta["size"], meta["last_modified"].timestamp())

    def _write_if_absent(self, key: str, path: str, body: bytes) -> None:
        """A conditional PUT; where its answer was lost or a repeat met the first try, what is there decides.

        Nothing there after a lost answer, a conflict (409) or a failed condition (412) is cause for another try: a PUT
        that is still under way brings the same bytes.
        """
        import obstore
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        started = time.monotonic()
        for attempt in itertools.count():
            try:
                obstore.put(self._exclusive_store, path, body, mode="create", use_multipart=False)
                return
            except (PermissionDeniedError, UnauthenticatedError, FileNotFoundError) as error:
                raise self._failure(error, "write", key) from error
            except self._errors as error:
                failure = self._failure(error, "write", key)
                try:
                    stored = None if self.info(key) is None else self.read(key)
                except StorageError:
                    raise failure from error
                if stored == body:
                    return
                if stored is not None:
                    raise AlreadyExists(f"{self.url}/{key} exists already: another writer won") from error
                may_pass = isinstance(failure, TemporaryFailure) or re.search(r"status code: (409|412)", str(error))
                is_last = attempt == self._attempts - 1 or time.monotonic() - started > self._timeout_s
                if is_last or not may_pass:
                    raise failure from error
                time.sleep(RETRY_AFTER_S * 2**attempt)

    def _call(self, doing: str, key: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except self._errors as error:
            raise self._failure(error, doing, key) from error

    def _failure(self, error: Exception, doing: str, key: str) -> StorageError:
        """What obstore said, in one sentence: its message repeats itself over twenty lines."""
        text = str(error)
        server = self._endpoint or "AWS"
        place = f"{self.url}/{key}".rstrip("/")
        code = match[1] if (match := re.search(r"<Code>(\w+)</Code>", text)) else ""
        status = match[1] if (match := re.search(r"status code: (\d+)", text)) else ""
        reason = " ".join(filter(None, [status, code]))
        if code == "NoSuchBucket":
            endpoint = f" --endpoint-url {self._endpoint}" if self._endpoint else ""
            hint = f"aws s3 mb s3://{self._bucket}{endpoint}"
            return StorageError(f"bucket {self._bucket!r} does not exist on {server}", hint=hint)
        if "169.254." in text:
            return StorageError(f"cannot {doing} {place}: no S3 credentials are set", hint=CREDENTIALS_HINT)
        if isinstance(error, FileNotFoundError):
            return StorageError(f"{place} does not exist")
        if status in ("401", "403") or "AccessDenied" in text:
            key_id = os.environ.get("AWS_ACCESS_KEY_ID", "")
            message = f"cannot {doing} {place}: {server} refused access key {key_id!r} ({reason or 'AccessDenied'})"
            return StorageError(message, hint=CREDENTIALS_HINT)
        if status:
            kind = TemporaryFailure if status == "429" or status.startswith("5") else StorageError
            return kind(f"cannot {doing} {place}: {server} answered {reason}")
        cause = text.split("\n", 1)[0].rpartition(" - ")[2]
        return TemporaryFailure(
            f"cannot {doing} {place}: no answer from {server} ({cause})", hint="check AWS_ENDPOINT_URL"
        )


def _parts_within(write_memory_bytes: int | None) -> tuple[int, int]:
    """Size of a part and how many are in flight at once, so that they and two more being gathered fit in memory."""
    if write_memory_bytes is None:
        return PART_BYTES, MAX_PARTS_IN_FLIGHT
    part_bytes = min(max(write_memory_bytes // 3, MIN_PART_BYTES), PART_BYTES)
    return part_bytes, min(max(write_memory_bytes // part_bytes - 2, 1), MAX_PARTS_IN_FLIGHT)


def _emptying(buffers: list[Buffer]) -> Iterator[Buffer]:
    """The buffers one after the other, each let go once it was given out."""
    buffers.reverse()
    while buffers:
        yield buffers.pop()


def _number(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise UserError(f"{variable}={text!r} is not a number", hint=f"unset {variable}") from None
