"""What every Storage promises, on every backend: local files, memory through fsspec, and a real S3 server."""

import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from threefold.errors import StorageError, UserError
from threefold.storage import AlreadyExists, Storage, open_storage

BACKENDS = ["local", "memory", "s3"]


@pytest.fixture(params=BACKENDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(tmp_path / "run")
    if request.param == "memory":
        return open_storage(f"memory://{uuid.uuid4().hex}")
    return open_storage(request.getfixturevalue("s3_url"))


def keys(storage: Storage, prefix: str = "") -> list[str]:
    return [item.key for item in storage.list(prefix)]


def test_what_was_written_is_read_back_whole(storage: Storage) -> None:
    storage.write("a/b/whole", b"0123456789")
    storage.write("empty", b"")
    storage.write("view", memoryview(b"abcdef")[2:4])
    assert storage.read("a/b/whole") == b"0123456789"
    assert storage.read("empty") == b""
    assert storage.read("view") == b"cd"


def test_a_write_replaces_what_was_there(storage: Storage) -> None:
    storage.write("key", b"a long first value")
    storage.write("key", b"second")
    assert storage.read("key") == b"second"
    assert keys(storage) == ["key"]


@pytest.mark.parametrize("sizes", [[], [0], [1, 0, 3], [1 << 20] * 3, [(1 << 20) + 1] * 40])
def test_buffers_are_written_one_after_the_other(storage: Storage, sizes: list[int]) -> None:
    parts = [bytes([65 + i % 26]) * size for i, size in enumerate(sizes)]
    storage.write("object", (memoryview(part) for part in parts))
    info = storage.info("object")
    assert info is not None
    assert info.size_bytes == sum(sizes)
    assert storage.read("object") == b"".join(parts)


def test_a_write_whose_source_fails_leaves_nothing(storage: Storage) -> None:
    def source() -> Iterator[bytes]:
        yield from [b"x" * (1 << 20)] * 20
        raise RuntimeError("the source is broken")

    with pytest.raises((RuntimeError, StorageError), match="the source is broken"):
        storage.write("folder/object", source())
    assert storage.info("folder/object") is None
    assert keys(storage) == []


def test_ranges_come_in_the_order_they_were_asked_for(storage: Storage) -> None:
    storage.write("object", bytes(range(200)))
    wanted = [(10, 20), (0, 5), (199, 200), (7, 7), (10, 20), (0, 200)]
    assert storage.read_ranges("object", wanted) == [bytes(range(*each)) for each in wanted]
    assert storage.read_ranges("object", []) == []


@pytest.mark.parametrize("wanted", [(5, 11), (10, 11), (50, 60)])
def test_a_range_past_the_end_is_an_error(storage: Storage, wanted: tuple[int, int]) -> None:
    storage.write("object", b"0123456789")
    with pytest.raises(StorageError, match="object"):
        storage.read_ranges("object", [(0, 1), wanted])


def test_missing_objects(storage: Storage) -> None:
    storage.write("there/object", b"x")
    assert storage.info("there/missing") is None
    assert storage.info("there") is None
    assert storage.info("there/object/below") is None
    for read in (lambda: storage.read("there/missing"), lambda: storage.read_ranges("there/missing", [(0, 1)])):
        with pytest.raises(StorageError, match="there/missing does not exist"):
            read()
    with pytest.raises(StorageError, match="missing"):
        storage.copy("there/missing", "target")
    storage.delete(["there/missing", "nowhere/at/all"])


def test_listing_is_by_prefix_and_sorted_by_key(storage: Storage) -> None:
    names = ["a", "b/1", "b/10", "b/2", "b-/x", "b.txt", "bc/1", "c/d/e/f", "é"]
    for name in reversed(names):
        storage.write(name, name.encode())
    assert keys(storage) == sorted(names)
    for prefix in ["", "a", "b", "b/", "b/1", "b-", "bc", "c", "c/d", "c/d/e/", "c/d/e/f", "x", "x/y", "é"]:
        assert keys(storage, prefix) == [name for name in sorted(names) if name.startswith(prefix)], prefix
    assert {item.key: item.size_bytes for item in storage.list()} == {name: len(name.encode()) for name in names}


def test_folders_are_named_without_descending(storage: Storage) -> None:
    for key in ["step-2/root", "step-10/a/b/c", "step-1/x", "file"]:
        storage.write(key, b"")
    assert list(storage.list_folders()) == ["step-1", "step-10", "step-2"]
    assert list(storage.list_folders("step-10")) == ["a"]
    assert list(storage.list_folders("step-10/a/")) == ["b"]
    assert list(storage.list_folders("step-1")) == []
    assert list(storage.list_folders("nowhere")) == []


def test_an_empty_place_lists_nothing(storage: Storage) -> None:
    assert keys(storage) == []
    assert keys(storage, "some/prefix") == []
    assert list(storage.list_folders()) == []
    assert storage.info("anything") is None


def test_deleted_objects_are_gone(storage: Storage) -> None:
    for key in ["a/1", "a/2", "b/c/d/e", "f"]:
        storage.write(key, b"x")
    storage.delete(["a/1", "b/c/d/e", "missing"])
    assert keys(storage) == ["a/2", "f"]
    storage.delete([])
    storage.write("b/c/d/e", b"again")
    assert storage.read("b/c/d/e") == b"again"


def test_a_copy_is_independent_of_its_source(storage: Storage) -> None:
    content = bytes(range(256)) * 100_000
    storage.write("source", content)
    storage.copy("source", "deep/target")
    storage.write("source", b"changed")
    assert storage.read("deep/target") == content


def test_times_are_seconds_since_the_epoch(storage: Storage) -> None:
    storage.write("object", b"x")
    info = storage.info("object")
    assert info is not None
    assert info == next(storage.list())
    assert info.modified_s > 1.7e9


def test_if_absent_writes_once(storage: Storage) -> None:
    storage.write("root", b"first", if_absent=True)
    with pytest.raises(AlreadyExists, match="root exists already"):
        storage.write("root", b"second", if_absent=True)
    storage.write("root", b"first", if_absent=True)  # a repeat whose first answer was lost
    assert storage.read("root") == b"first"
    assert keys(storage) == ["root"]


def test_of_racing_writers_one_wins(storage: Storage) -> None:
    if not storage.supports_if_absent:
        pytest.skip("this backend serves one committing writer, and says so")
    won: list[bytes] = []
    barrier = threading.Barrier(8)

    def write(value: bytes) -> None:
        barrier.wait()
        try:
            storage.write("step/root", value, if_absent=True)
            won.append(value)
        except AlreadyExists:
            pass

    threads = [threading.Thread(target=write, args=(b"writer %d" % i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [storage.read("step/root")] == won


@pytest.mark.parametrize("key", ["", "/absolute", "a//b", "../up", "a/../b", "./a", "folder/"])
def test_a_key_cannot_leave_the_storage(storage: Storage, key: str) -> None:
    for call in (storage.read, storage.info, lambda k: storage.write(k, b""), lambda k: storage.delete([k])):
        with pytest.raises(AssertionError, match="not a storage key"):
            call(key)


PARTS = st.text("ab.-", min_size=1, max_size=3).filter(lambda part: part not in (".", "..") and part[0] != ".")
KEYS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    for url, message in [("", "empty"), ("s3:///key", "no bucket"), ("nothing-like-it://x", "nothing-like-it")]:
        with pytest.raises(UserError, match=message):
            open_storage(url)


def test_clients_are_imported_only_for_urls_that_need_them() -> None:
    program = """
import sys
from threefold.storage import open_storage
open_storage("/tmp/x")
assert not {"obstore", "fsspec", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
