"""A stand-in for Google Cloud Storage's XML API on loopback: the requests that object stores are written through."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000
CHANGED_S = 1_790_000_000  # of every object
CHANGED = datetime.fromtimestamp(CHANGED_S, UTC).isoformat()


@dataclass
class Bucket:
    """Objects by key, and the parts of unfinished uploads by id; `requests` are method, path and headers of each."""

    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def fake_gcs(name: str) -> Iterator[tuple[str, Bucket]]:
    """URL and bucket of a server that has one bucket of this name."""
    bucket = Bucket()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            found, _, key = unquote(parts.path).lstrip("/").partition("/")
            query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
            with bucket.lock:
                bucket.requests.append((self.command, self.path, dict(self.headers.items())))
                if found != name:
                    self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
                else:
                    self._in_bucket(key, query, body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

        def _in_bucket(self, key: str, query: dict[str, str], body: bytes) -> None:
            objects, uploads = bucket.objects, bucket.uploads
            command, upload = self.command, query.get("uploadId", "")
            if not key:
                self._answer(200, _listing(objects, query))
            elif command == "POST" and "uploads" in query:
                uploads[upload := f"upload-{len(bucket.requests)}"] = {}
                self._answer(200, f"<Result><UploadId>{upload}</UploadId></Result>".encode())
            elif command == "PUT" and upload:
                uploads[upload][int(query["partNumber"])] = body
                self._answer(200, tag=_tag(body))
            elif command == "POST" and upload:
                parts = uploads.pop(upload)
                objects[key] = b"".join(parts[number] for number in sorted(parts))
                self._answer(200, f"<Result><ETag>{_tag(objects[key])}</ETag></Result>".encode())
            elif command == "DELETE" and upload:
                self._answer(204 if uploads.pop(upload, None) is not None else 404)
            elif command == "PUT" and self.headers.get("x-goog-if-generation-match") == "0" and key in objects:
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            elif command == "PUT" and (source := self.headers.get("x-goog-copy-source")):
                copied = objects.get(unquote(source).lstrip("/").partition("/")[2])
                if copied is not None:
                    objects[key] = copied
                self._answer(200 if copied is not None else 404)
            elif command == "PUT":
                objects[key] = body
                self._answer(200, tag=_tag(body))
            elif key not in objects:
                self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            elif command == "DELETE":
                del objects[key]
                self._answer(204)
            else:
                self._send(objects[key])

        def _send(self, content: bytes) -> None:
            match = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if not match:
                self._answer(200, content, _tag(content))
                return
            start = int(match[1])
            stop = min(int(match[2]) + 1 if match[2] else len(content), len(content))
            if start >= len(content):
                self._answer(416)
            else:
                place = f"bytes {start}-{stop - 1}/{len(content)}"
                self._answer(206, content[start:stop], _tag(content), {"Content-Range": place})

        def _answer(
            self, status: int, body: bytes = b"", tag: str = '"t"', headers: dict[str, str] | None = None
        ) -> None:
            self.send_response(status)
            common = {"ETag": tag, "Last-Modified": formatdate(CHANGED_S, usegmt=True), "x-goog-generation": "1"}
            for header, value in (common | (headers or {})).items():
                self.send_header(header, value)
            if status != 204:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", bucket
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def _listing(objects: dict[str, bytes], query: dict[str, str]) -> bytes:
    """One page; its continuation token is the last name that it gave."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    names: dict[str, bool] = {}  # whether it is a folder
    for key in sorted(objects):
        if key.startswith(prefix):
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key[len(prefix) :], "", "")
            names.setdefault(prefix + head + found, bool(found))
    left = [name for name in names if name > query.get("continuation-token", "")]
    entries = [
        f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        if names[name]
        else f"<Contents><Key>{escape(name)}</Key><Size>{len(objects[name])}</Size><ETag>{_tag(objects[name])}</ETag>"
        f"<LastModified>{CHANGED}</LastModified></Contents>"
        for name in left[:PAGE]
    ]
    token = f"<NextContinuationToken>{escape(left[PAGE - 1])}</NextContinuationToken>" if left[PAGE:] else ""
    return f"<ListBucketResult>{''.join(entries)}{token}</ListBucketResult>".encode()
