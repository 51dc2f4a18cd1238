"""RemoteFile: the bytes of a local file, however it is read; nothing past its end; a request that fails is repeated."""

import io
import math
import random
from pathlib import Path

import pytest

from datakit.files import remote_file
from datakit.files.remote_file import RemoteFile
from threefold.errors import StorageError
from threefold.storage import TemporaryFailure, open_storage
from threefold.storage.fault import Fault, FaultStorage
from threefold.storage.fsspec import FsspecStorage
from threefold.storage.repeating import RepeatingStorage
from tools import fault_proxy
from tools.fault_proxy import FaultProxy
from tools.s3_server import Server

pytestmark = pytest.mark.usefixtures("short_pauses")


class SmallBlocks(RemoteFile):
    """One that reads 1,000 bytes at a time."""

    first_bytes, block_bytes = 64, 1000


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    """The content of the file `a`."""
    content = random.Random(1).randbytes(25_003)
    (tmp_path / "a").write_bytes(content)
    return content


def test_it_reads_like_a_local_file(tmp_path: Path, content: bytes) -> None:
    with io.BufferedReader(SmallBlocks(f"local://{tmp_path}/a"), 200) as remote, (tmp_path / "a").open("rb") as local:
        for number in range(400):
            choose = random.Random(number)
            if choose.random() < 0.2:
                whence = choose.choice([io.SEEK_SET, io.SEEK_CUR, io.SEEK_END])
                base = {io.SEEK_SET: 0, io.SEEK_CUR: local.tell(), io.SEEK_END: len(content)}[whence]
                target = choose.randrange(len(content) + 10)
                assert remote.seek(target - base, whence) == local.seek(target)
            num_bytes = choose.choice([1, 10, 300, 3000])
            assert remote.read(num_bytes) == local.read(num_bytes)
            assert remote.tell() == local.tell()


def test_a_stream_reads_each_byte_once_and_nothing_past_its_stop(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote_file._threads().shutdown()  # what the test before has read ahead would count too
    remote_file._threads.cache_clear()
    asked: list[tuple[int, int]] = []
    read_ranges = FsspecStorage.read_ranges

    def noted(self: FsspecStorage, key: str, ranges: list[tuple[int, int]]) -> list[bytes]:
        asked.extend(ranges)
        return read_ranges(self, key, ranges)

    monkeypatch.setattr(FsspecStorage, "read_ranges", noted)
    with io.BufferedReader(SmallBlocks(f"local://{tmp_path}/a", stop=20_001), 100) as stream:
        stream.seek(7)
        assert stream.read() == content[7:20_001]
    assert sum(stop - start for start, stop in asked) == 20_001 - 7
    assert min(asked)[0] == 7
    assert max(stop - start for start, stop in asked) == 1000


def test_a_request_that_fails_is_repeated_and_then_raised(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = Fault(TemporaryFailure("torn"), ("read_ranges",), times=2)
    monkeypatch.setattr(remote_file, "_storage", lambda url, _: RepeatingStorage(FaultStorage(open_storage(url), torn)))
    file = SmallBlocks(f"local://{tmp_path}/a")  # alone: what reads ahead would mix with it
    assert file.read(60) == content[:60]
    assert torn.num_met == 2
    torn.times = math.inf
    with pytest.raises(TemporaryFailure, match="torn"):
        io.BufferedReader(SmallBlocks(f"local://{tmp_path}/a")).read()


def test_no_byte_comes_before_the_first(tmp_path: Path, content: bytes) -> None:
    file = SmallBlocks(f"local://{tmp_path}/a")
    file.seek(7)
    with pytest.raises(OSError, match="Invalid argument"):
        file.seek(-8, io.SEEK_CUR)
    assert file.tell() == 7


def test_a_missing_object_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nothing does not exist"):
        SmallBlocks(f"local://{tmp_path}/nothing")


@pytest.mark.parametrize("kind", ["503", "reset", "cut"])
def test_torn_answers_of_an_object_store_are_read_again(
    kind: str, s3_url: str, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = random.Random(2).randbytes(11 << 20)
    open_storage(s3_url).write("a", content)
    s3_proxy.fault = fault_proxy.Fault(kind, method="GET", skip=1, times=2, after_bytes=100_000)
    with io.BufferedReader(RemoteFile(f"{s3_url}/a"), 1 << 20) as stream:
        assert stream.read() == content
    assert s3_proxy.num_faults == 2


def test_a_server_that_the_environment_names_later_is_asked_from_then_on(
    s3_url: str, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook that goes from one server to another."""
    open_storage(s3_url).write("a", b"here")
    with FaultProxy(s3_server.port) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        assert RemoteFile(f"{s3_url}/a").read(4) == b"here"
    assert RemoteFile(f"{s3_url}/a").read(4) == b"here"
