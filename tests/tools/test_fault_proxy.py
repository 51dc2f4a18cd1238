"""The proxy breaks exactly the answers it is told to break."""

import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tools.fault_proxy import Fault, FaultProxy

ROOT = Path(__file__).parent.parent.parent
BODY = bytes(range(256)) * 1000
received: list[int] = []  # bytes of the bodies that reached the server


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        received.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
        self.do_GET()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server_port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture
def proxy(server_port: int) -> Iterator[FaultProxy]:
    with FaultProxy(server_port) as proxy:
        yield proxy


def ask(port: int, method: str = "GET", timeout_s: float = 20.0, target: str = "/") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request(method, target, body=b"x" * 300_000 if method == "PUT" else None)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_without_a_fault_all_passes(proxy: FaultProxy) -> None:
    for method in ("GET", "PUT", "GET"):
        assert ask(proxy.port, method) == (200, BODY)
    assert proxy.num_faults == 0


def test_latency_leaves_connections_as_they_are(proxy: FaultProxy) -> None:
    proxy.fault = Fault("latency", delay_s=0.05)
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=20)
    sockets = set()
    for number in (1, 2, 3):
        started = time.monotonic()
        connection.request("GET", "/")
        assert connection.getresponse().read() == BODY
        assert time.monotonic() - started >= 0.05
        assert proxy.num_faults == number
        sockets.add(connection.sock)
    assert len(sockets) == 1
    connection.close()


@pytest.mark.parametrize(
    ("kind", "code"), [("409", b"ConditionalRequestConflict"), ("412", b"PreconditionFailed"), ("503", b"SlowDown")]
)
def test_refusals_never_reach_the_server(proxy: FaultProxy, kind: str, code: bytes) -> None:
    received.clear()
    proxy.fault = Fault(kind)
    status, body = ask(proxy.port, "PUT")
    assert status == int(kind)
    assert code in body
    assert received == []


@pytest.mark.parametrize("after_bytes", [0, 100_000])
def test_a_dropped_request_reaches_the_server_in_part(proxy: FaultProxy, after_bytes: int) -> None:
    received.clear()
    proxy.fault = Fault("drop", after_bytes=after_bytes)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        ask(proxy.port, "PUT")
    deadline = time.monotonic() + 10
    while not received and time.monotonic() < deadline:
        time.sleep(0.01)
    assert received == [after_bytes]


def test_only_requests_to_the_target_are_broken(proxy: FaultProxy) -> None:
    proxy.fault = Fault("503", target="root")
    asked = [("GET", "/run/part"), ("GET", "/run/root.json"), ("PUT", "/run/part?like=root"), ("PUT", "/run/part")]
    assert [ask(proxy.port, method, target=target)[0] for method, target in asked] == [200, 503, 503, 200]
    proxy.fault = Fault("503", method="PUT", target="root")
    assert [ask(proxy.port, method, target=target)[0] for method, target in asked] == [200, 200, 503, 200]


@pytest.mark.parametrize(("kind", "error"), [("reset", ConnectionResetError), ("cut", http.client.IncompleteRead)])
def test_answers_break_off(proxy: FaultProxy, kind: str, error: type[Exception]) -> None:
    proxy.fault = Fault(kind, after_bytes=1000)
    with pytest.raises(error) as caught:
        ask(proxy.port)
    if isinstance(caught.value, http.client.IncompleteRead):
        assert caught.value.partial == BODY[:1000]
    proxy.fault = Fault(kind)
    with pytest.raises((ConnectionError, http.client.BadStatusLine)):
        ask(proxy.port, "PUT")


def test_stall(proxy: FaultProxy) -> None:
    proxy.fault = Fault("stall", after_bytes=10)
    with pytest.raises(TimeoutError):
        ask(proxy.port, timeout_s=0.5)


@pytest.mark.parametrize("at", [0, 65_536, len(BODY) - 1])
def test_one_bit_flips(proxy: FaultProxy, at: int) -> None:
    proxy.fault = Fault("flip", after_bytes=at)
    _, body = ask(proxy.port)
    assert [i for i in range(len(BODY)) if body[i] != BODY[i]] == [at]
    assert body[at] ^ BODY[at] == 1


def test_delay(proxy: FaultProxy) -> None:
    proxy.fault = Fault("delay", delay_s=0.3)
    started = time.monotonic()
    assert ask(proxy.port) == (200, BODY)
    assert time.monotonic() - started >= 0.3


def test_an_answer_is_held_until_the_fault_is_exchanged(proxy: FaultProxy) -> None:
    proxy.fault = Fault("hold")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, proxy.port)
        while not proxy.num_faults:
            time.sleep(0.01)
        assert not answer.done()
        proxy.fault = Fault()
        assert answer.result() == (200, BODY)


def test_the_requests_to_break_are_counted(proxy: FaultProxy) -> None:
    proxy.fault = Fault("503", method="PUT", skip=1, times=2)
    methods = ["PUT", "GET", "PUT", "PUT", "GET", "PUT"]
    assert [ask(proxy.port, method)[0] for method in methods] == [200, 200, 503, 503, 200, 200]
    assert proxy.num_faults == 2
    proxy.fault = Fault("503", times=1)  # counts anew
    assert [ask(proxy.port)[0] for _ in range(2)] == [503, 200]


def test_the_command_line(server_port: int) -> None:
    command = [sys.executable, "tools/fault_proxy.py", "0", str(server_port), "503", "--times", "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": "."}) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        assert [ask(port)[0] for _ in range(2)] == [503, 200]
        process.terminate()
