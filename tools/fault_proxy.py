"""A TCP proxy in front of an HTTP server that spoils chosen answers, for testing clients of object stores.

    python tools/fault_proxy.py LISTEN_PORT TARGET_PORT reset --method PUT --times 2

Each connection carries one request (the proxy asks the server to close it), so counting requests is exact; but for
`latency`, which leaves connections as they are, as a server far away does, and counts the heads that pass. The request
reaches the server whole and what breaks is the answer, as when an acknowledgement is lost; except with 409, 412 and
503, where it does not reach the server, and with drop, where it breaks off on its way.
"""

import argparse
import asyncio
import contextlib
import re
import socket
import struct
import sys
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from threefold.cli import Parser, run

KINDS = {
    "none": "pass everything on",
    "409": "answer 409 ConditionalRequestConflict in the server's place",
    "412": "answer 412 PreconditionFailed in the server's place",
    "503": "answer 503 SlowDown in the server's place",
    "drop": "reset the connection after AFTER_BYTES of the request's body were passed on",
    "reset": "reset the connection after AFTER_BYTES of the answer's body",
    "cut": "close the connection after AFTER_BYTES of the answer's body",
    "stall": "stop answering after AFTER_BYTES of the answer's body and keep the connection open",
    "flip": "flip one bit of the answer's body, AFTER_BYTES into it",
    "delay": "hold the answer back for DELAY_S seconds",
    "hold": "hold the answer back until the fault is exchanged",
    "latency": "pass on all that the server sends DELAY_S seconds later, whatever the request",
}
STATUS = {"409": "Conflict", "412": "Precondition Failed", "503": "Slow Down"}
CODE = {"409": "ConditionalRequestConflict", "412": "PreconditionFailed", "503": "SlowDown"}
CHUNK_BYTES = 1 << 16
MAX_HEAD_BYTES = 1 << 16
HELD_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, with which requests: after `skip` matching ones the next `times` (None: all that follow).

    A request matches by its method and by a part of its target (path and query), where these are given.
    """

    kind: str = "none"
    method: str | None = None
    target: str | None = None
    skip: int = 0
    times: int | None = None
    after_bytes: int = 0
    delay_s: float = 5.0


@dataclass
class FaultProxy:
    """A proxy on loopback in a thread of its own, used in a `with`; `fault` may be exchanged while it runs."""

    target_port: int
    fault: Fault = field(default_factory=Fault)
    port: int = 0
    num_faults: int = 0
    bytes_in: int = 0  # of all requests, heads and bodies

    def __enter__(self) -> Self:
        self._num_matching = 0
        self._counted = self.fault
        self._serving = set[asyncio.Task[None] | None]()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=MAX_HEAD_BYTES)
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        async def shut_down() -> None:
            self._server.close()
            open_requests = asyncio.all_tasks() - {asyncio.current_task()}
            for task in open_requests:
                task.cancel()
            await asyncio.gather(*open_requests, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(shut_down(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def wait(self) -> None:
        """Block until the thread ends, that is until the process is interrupted."""
        self._thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._serving.add(task)  # the loop alone does not keep it
        try:
            if self.fault.kind == "latency":
                await self._relay(reader, writer, self.fault.delay_s)
            else:
                await self._serve_request(reader, writer)
        finally:
            self._serving.discard(task)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        """Pass bytes on both ways until either side ends, those of the server delay_s later."""
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self.target_port)
            forward = asyncio.create_task(self._pump(reader, to_server))
            try:
                while data := await from_server.read(CHUNK_BYTES):
                    self._loop.call_later(delay_s, writer.write, data)
            finally:
                forward.cancel()
                to_server.close()
        self._loop.call_later(delay_s, writer.close)

    async def _serve_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.bytes_in += len(head)
            await self._answer(head, reader, writer, self._fault_of(head))
        writer.close()

    def _fault_of(self, head: bytes) -> Fault:
        fault = self.fault
        if fault is not self._counted:
            self._counted, self._num_matching = fault, 0
        method, target = head.split(b" ", 2)[:2]
        matches = method.decode() == (fault.method or method.decode()) and (fault.target or "") in target.decode()
        if fault.kind == "none" or not matches:
            return Fault()
        index = self._num_matching - fault.skip
        self._num_matching += 1
        if index < 0 or (fault.times is not None and index >= fault.times):
            return Fault()
        self.num_faults += 1
        return fault

    async def _answer(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault
    ) -> None:
        if fault.kind in STATUS:
            self.bytes_in += await _discard(reader, _content_length(head))
            writer.write(_refusal(fault.kind))
            await writer.drain()
            return
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self.target_port, limit=MAX_HEAD_BYTES)
        try:
            line, rest = head.split(b"\r\n", 1)
            to_server.write(line + b"\r\nConnection: close\r\n" + rest)
            if fault.kind == "drop":
                to_server.write(await reader.readexactly(fault.after_bytes))
                await to_server.drain()
                _reset(writer)
                return
            forward = asyncio.create_task(self._pump(reader, to_server))
            try:
                answer_head = await from_server.readuntil(b"\r\n\r\n")
                if fault.kind == "delay":
                    await asyncio.sleep(fault.delay_s)
                while fault.kind == "hold" and fault is self.fault:
                    await asyncio.sleep(HELD_POLL_S)
                await _send_back(answer_head, from_server, writer, fault)
            finally:
                forward.cancel()
        finally:
            to_server.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                self.bytes_in += len(data)
                if self.fault.kind == "latency":
                    self.num_faults += data.count(b" HTTP/1.1\r\n")
                writer.write(data)
                await writer.drain()


async def _send_back(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault) -> None:
    """Pass the answer on and break it where the fault says; the head goes first unless nothing at all is to pass."""
    breaks = fault.kind in ("reset", "cut", "stall")
    if not (breaks and fault.after_bytes == 0):
        writer.write(head)
    position = 0
    while True:
        at_fault = breaks and position == fault.after_bytes
        if at_fault:
            await writer.drain()
            if fault.kind == "stall":
                await asyncio.Event().wait()
            if fault.kind == "reset":
                _reset(writer)
            return
        data = await reader.read(min(CHUNK_BYTES, fault.after_bytes - position) if breaks else CHUNK_BYTES)
        if not data:
            return
        if fault.kind == "flip" and position <= fault.after_bytes < position + len(data):
            index = fault.after_bytes - position
            data = data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
        position += len(data)
        writer.write(data)
        await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _refusal(status: str) -> bytes:
    body = f'<?xml version="1.0"?><Error><Code>{CODE[status]}</Code><Message>injected</Message></Error>'
    head = f"HTTP/1.1 {status} {STATUS[status]}\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def _discard(reader: asyncio.StreamReader, num_bytes: int) -> int:
    """Read a request's body to its end: closing with unread data would reset the answer away; gives the bytes read."""
    left = num_bytes
    while left > 0 and (data := await reader.read(min(left, CHUNK_BYTES))):
        left -= len(data)
    return num_bytes - left


def _content_length(head: bytes) -> int:
    match = re.search(rb"\r\ncontent-length:\s*(\d+)", head, re.IGNORECASE)
    return int(match[1]) if match else 0


def _proxy(arguments: argparse.Namespace) -> None:
    fault = Fault(
        arguments.fault, arguments.method, arguments.target, arguments.skip, arguments.times, arguments.after_bytes,
        arguments.delay_s,
    )  # fmt: skip
    with FaultProxy(arguments.target_port, fault, arguments.listen_port) as proxy:
        print(f"http://127.0.0.1:{proxy.port}", flush=True)
        proxy.wait()


def build_parser() -> Parser:
    """Return the command line of this program."""
    faults = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    parser = Parser(prog="fault_proxy.py", description="Spoil chosen answers of an HTTP server.", epilog=faults)
    parser.add_argument("listen_port", type=int, help="port to listen on; 0 takes a free one, which is printed")
    parser.add_argument("target_port", type=int, help="port of the server on 127.0.0.1")
    parser.add_argument("fault", choices=KINDS, help="what goes wrong")
    parser.add_argument("--method", help="only requests of this HTTP method, such as PUT")
    parser.add_argument("--target", help="only requests with this in their path or query, such as root.json")
    parser.add_argument("--skip", type=int, default=0, help="let so many matching requests pass first")
    parser.add_argument("--times", type=int, help="then spoil so many; all that follow if left out")
    parser.add_argument("--after-bytes", type=int, default=0, help="bytes of the body to pass first")
    parser.add_argument("--delay-s", type=float, default=5.0, help="seconds that delay holds an answer back")
    parser.set_defaults(handler=_proxy)
    return parser


if __name__ == "__main__":
    sys.exit(run(build_parser()))
