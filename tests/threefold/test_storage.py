"""What every Storage promises, on disk, in memory, on a real S3 server; and `open_storage`."""

import errno
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.errors import StorageError, UserError
from threefold.storage import Storage, TemporaryFailure, open_storage, temporary_name, written_name
from threefold.storage.conformance import StorageConformance


class TestLocal(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage(tmp_path / "run")


class TestMemory(StorageConformance):
    @pytest.fixture
    def storage(self) -> Storage:
        return open_storage(f"memory://{uuid.uuid4().hex}")


class TestS3(StorageConformance):
    @pytest.fixture
    def storage(self, s3_url: str) -> Storage:
        return open_storage(s3_url)


@pytest.mark.ci
@pytest.mark.slow  # another way to the same server
class TestS3fs(StorageConformance):
    """The same server through fsspec: s3a:// is s3fs's, too."""

    num_listed = 50  # one request after the other

    @pytest.fixture
    def storage(self, s3_url: str) -> Storage:
        return open_storage(s3_url.replace("s3://", "s3a://"))


def keys(storage: Storage, prefix: str = "") -> list[str]:
    return [item.key for item in storage.list(prefix)]


PARTS = st.text("ab.-", min_size=1, max_size=3).filter(lambda part: part not in (".", "..") and part[0] != ".")
KEYS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)


@given(names=st.sets(KEYS, max_size=8), prefix=st.one_of(st.just(""), KEYS, KEYS.map(lambda key: key + "/")))
def test_local_and_memory_list_alike(names: set[str], prefix: str, tmp_path: Path) -> None:
    names = {name for name in names if not any(other.startswith(f"{name}/") for other in names)}
    unique = uuid.uuid4().hex
    for storage in (open_storage(tmp_path / unique), open_storage(f"memory://{unique}")):
        for name in names:
            storage.write(name, b"x")
        assert keys(storage, prefix) == sorted(name for name in names if name.startswith(prefix))


def test_urls_choose_their_backend(tmp_path: Path) -> None:
    assert open_storage(str(tmp_path)).url == str(tmp_path)
    assert open_storage(f"file://{tmp_path}/with%20space").url == f"{tmp_path}/with space"
    assert open_storage("s3://bucket/a/").url == "s3://bucket/a"
    assert Path(open_storage("relative").url).is_absolute()
    assert open_storage("file:///a?b#c").url == "/a?b#c"
    for url, message in [
        ("", "empty"), ("s3:///key", "no bucket"), ("nothing-like-it://x", "nothing-like-it"),
        ("file://run/a", "the host 'run'"), ("file://", "three slashes"), ("~/run", "only a shell knows"),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=message):
            open_storage(url)


def test_clients_are_imported_only_for_urls_that_need_them() -> None:
    program = """
import sys
from threefold.storage import TemporaryFailure, open_storage
open_storage("/tmp/x")
assert not {"obstore", "fsspec", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_temporary_name_tells_what_it_is_for() -> None:
    assert written_name(temporary_name("part-00000.index")) == "part-00000.index"
    for name in ("part-00000.index", ".notes.tmp", ".a.0123456789abcde.tmp", "..0123456789abcdef.tmp"):
        assert written_name(name) is None


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("ftp://host/x", "ftp://host/x: FTP cannot be read"),
        ("nosuch://host/x", "cannot open nosuch://host/x: Protocol not known"),
        ("github://host/x", "cannot open github://host/x: "),
    ],
)
def test_a_url_that_cannot_be_opened_is_one_line_with_its_name(url: str, fault: str) -> None:
    with pytest.raises(UserError) as caught:
        open_storage(url)
    assert caught.value.message.startswith(fault)
    assert "\n" not in caught.value.message


def test_a_file_system_that_nobody_answers_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(StorageError, match=r"cannot open hf://host: \[Errno -2\] Name or service not known"):
        open_storage("hf://host")


def test_a_full_disk_behind_fsspec_is_no_failure_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    storage = open_storage(f"local://{tmp_path}")
    monkeypatch.setattr(type(storage), "_open_new", full)
    with pytest.raises(StorageError, match=r"cannot write .*/key: No space left on device") as caught:
        storage.write("key", b"x")
    assert not isinstance(caught.value, TemporaryFailure)
    assert caught.value.hint
