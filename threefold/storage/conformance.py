"""StorageConformance: what every Storage promises, as pytest tests that any backend can be held to.

    class TestMyStorage(StorageConformance):
        @pytest.fixture
        def storage(self) -> Storage:
            return MyStorage(...)          # an empty place; what is left there is yours to remove

A `pytest.register_assert_rewrite("threefold.storage.conformance")` in conftest.py shows values in failures. A backend
that cannot have some keys, or is slow with large objects, sets the attributes below to less.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from threefold.errors import StorageError
from threefold.storage import AlreadyExists, Buffer, Storage, trials

MIB = 1 << 20
ODD_PARTS = (
    "with space", " edges ", "a+b", "100%", "50%25", "%2F", "query?x=1", "hash#1", "x=1&y=2", "at@sign", "tilde~",
    "comma,semi;colon:", "it's", "(round)[square]{curly}", "dollar$", "bang!", "é-ü", "日本語", "🙂", ".hidden", "a..b",
    "trailing.", "UPPER", "upper", "-", "0",
)  # fmt: skip


class StorageConformance:
    """Subclass it with a fixture `storage`, an empty Storage for each test."""

    large_bytes = 40 * MIB
    num_writers = 16
    num_listed = 1100  # more than one answer of S3 lists
    odd_parts: tuple[str, ...] = ODD_PARTS

    def test_what_was_written_is_read_back_whole(self, storage: Storage) -> None:
        contents: dict[str, Buffer] = {
            "a/b/whole": b"0123456789",
            "view": memoryview(b"abcdef")[2:4],
            "array": bytearray(b"xyz"),
        }
        for key, content in contents.items():
            storage.write(key, content)
        assert {key: storage.read(key) for key in contents} == {key: bytes(part) for key, part in contents.items()}

    def test_an_empty_object_is_an_object(self, storage: Storage) -> None:
        storage.write("empty", b"")
        storage.write("folder/empty", iter([]))
        assert storage.read("empty") == b""
        assert storage.read_ranges("empty", [(0, 0)]) == [b""]
        assert _size_bytes(storage, "folder/empty") == 0
        assert _keys(storage) == ["empty", "folder/empty"]
        storage.copy("empty", "copied")
        assert storage.read("copied") == b""

    def test_each_write_is_seen_once_it_has_returned(self, storage: Storage) -> None:
        trials.shows_each_write(storage)

    @pytest.mark.parametrize("sizes", [[], [0], [1, 0, 3], [MIB] * 3, [MIB + 1] * 20])
    @pytest.mark.parametrize("sized", [False, True])
    def test_buffers_are_written_one_after_the_other(self, storage: Storage, sizes: list[int], sized: bool) -> None:
        parts = [bytes([65 + i % 26]) * size for i, size in enumerate(sizes)]
        storage.write("object", (memoryview(part) for part in parts), size_bytes=sum(sizes) if sized else None)
        assert _size_bytes(storage, "object") == sum(sizes)
        assert storage.read("object") == b"".join(parts)

    def test_a_large_object_of_many_parts(self, storage: Storage) -> None:
        block = bytes(range(256)) * (MIB // 256)
        num_blocks = self.large_bytes // MIB
        storage.write(
            "large",
            (number.to_bytes(8, "big") + block[8:] for number in range(num_blocks)),
            size_bytes=num_blocks * MIB,
        )
        starts = [number * MIB for number in (0, num_blocks // 2, num_blocks - 1)]
        found = storage.read_ranges("large", [(start, start + MIB) for start in starts])
        assert [bytes(part[:8]) for part in found] == [(start // MIB).to_bytes(8, "big") for start in starts]
        assert all(bytes(part[8:]) == block[8:] for part in found)
        storage.copy("large", "copied")
        assert _size_bytes(storage, "copied") == num_blocks * MIB

    def test_a_write_whose_source_fails_leaves_nothing(self, storage: Storage) -> None:
        def source() -> Iterator[bytes]:
            yield from [b"x" * MIB] * 20
            raise RuntimeError("the source is broken")

        with pytest.raises((RuntimeError, StorageError), match="the source is broken"):
            storage.write("folder/object", source())
        assert storage.info("folder/object") is None
        assert _keys(storage) == []

    def test_an_object_is_seen_whole_or_not_at_all(self, storage: Storage) -> None:
        trials.shows_no_part_of_a_write(storage, self.large_bytes // 2)

    def test_readers_beside_a_writer_see_one_value_or_the_other(self, storage: Storage) -> None:
        trials.shows_one_value_or_the_other(storage)

    def test_ranges_come_in_the_order_they_were_asked_for(self, storage: Storage) -> None:
        storage.write("object", bytes(range(200)))
        wanted = [(10, 20), (0, 5), (199, 200), (7, 7), (10, 20), (0, 200)]
        assert storage.read_ranges("object", wanted) == [bytes(range(*each)) for each in wanted]
        assert storage.read_ranges("object", []) == []

    @pytest.mark.parametrize("byte_range", [(5, 11), (10, 11), (50, 60)])
    def test_a_range_past_the_end_is_an_error(self, storage: Storage, byte_range: tuple[int, int]) -> None:
        storage.write("object", b"0123456789")
        with pytest.raises(StorageError, match="object"):
            storage.read_ranges("object", [(0, 1), byte_range])

    def test_missing_objects(self, storage: Storage) -> None:
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
        assert _keys(storage) == ["there/object"]

    def test_listing_is_by_prefix_and_sorted_by_key(self, storage: Storage) -> None:
        names = ["a", "b/1", "b/10", "b/2", "b-/x", "b.txt", "bc/1", "c/d/e/f", "é"]
        for name in reversed(names):
            storage.write(name, name.encode())
        assert _keys(storage) == sorted(names)
        for prefix in ["", "a", "b", "b/", "b/1", "b-", "bc", "c", "c/d", "c/d/e/", "c/d/e/f", "x", "x/y", "é"]:
            below = [name for name in sorted(names) if name.startswith(prefix)]
            assert _keys(storage, prefix) == below, prefix
            assert sorted(storage.list_keys(prefix)) == below, prefix
        assert {item.key: item.size_bytes for item in storage.list()} == {name: len(name.encode()) for name in names}

    def test_more_objects_than_one_answer_lists(self, storage: Storage) -> None:
        names = [f"many/{number:04}" for number in range(self.num_listed)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda name: storage.write(name, b""), names))
        assert _keys(storage, "many/") == names
        storage.delete(names[1:])
        assert _keys(storage) == names[:1]

    def test_folders_are_named_without_descending(self, storage: Storage) -> None:
        for key in ["step-2/root", "step-10/a/b/c", "step-1/x", "file"]:
            storage.write(key, b"")
        assert list(storage.list_folders()) == ["step-1", "step-10", "step-2"]
        assert list(storage.list_folders("step-10")) == ["a"]
        assert list(storage.list_folders("step-10/a/")) == ["b"]
        assert list(storage.list_folders("step-1")) == []
        assert list(storage.list_folders("nowhere")) == []

    def test_an_empty_place_lists_nothing(self, storage: Storage) -> None:
        assert _keys(storage) == []
        assert _keys(storage, "some/prefix") == []
        assert list(storage.list_keys()) == []
        assert list(storage.list_folders()) == []
        assert storage.info("anything") is None

    def test_what_is_there_is_listed_and_what_was_deleted_is_gone(self, storage: Storage) -> None:
        trials.lists_what_is_there(storage)
        storage.delete([])
        assert _keys(storage) == ["folder-0/object-0000"]

    def test_a_copy_is_independent_of_its_source(self, storage: Storage) -> None:
        content = bytes(range(256)) * 100_000
        storage.write("source", content)
        storage.copy("source", "deep/target")
        storage.write("source", b"changed")
        assert storage.read("deep/target") == content
        storage.copy("source", "deep/target")
        assert storage.read("deep/target") == b"changed"

    def test_times_are_seconds_since_the_epoch(self, storage: Storage) -> None:
        storage.write("now", b"x")  # a stand-in's clock may be anywhere
        info = storage.info("now")
        assert info is not None
        assert info == next(storage.list())
        assert 1.7e9 < info.modified_s < time.time() + 24 * 3600

    def test_odd_keys_are_keys_like_others(self, storage: Storage) -> None:
        keys = [key for part in self.odd_parts for key in (part, f"below/{part}/x")]
        for key in keys:
            storage.write(key, key.encode())
        assert _keys(storage) == sorted(keys)
        assert {key: storage.read(key).decode() for key in keys} == {key: key for key in keys}
        for key in keys:
            assert _size_bytes(storage, key) == len(key.encode())
        for part in self.odd_parts:
            assert _keys(storage, part) == [key for key in sorted(keys) if key.startswith(part)]
        assert list(storage.list_folders("below")) == sorted(self.odd_parts)
        odd = f"below/{self.odd_parts[0]}/x"
        storage.copy(odd, f"{odd} copied")
        assert storage.read(f"{odd} copied").decode() == odd
        storage.write(f"{odd} once", b"1", if_absent=True)
        storage.delete([*keys, f"{odd} copied", f"{odd} once"])
        assert _keys(storage) == []

    @pytest.mark.parametrize("key", ["", "/absolute", "a//b", "../up", "a/../b", "./a", "folder/"])
    def test_a_key_cannot_leave_the_storage(self, storage: Storage, key: str) -> None:
        calls: list[Callable[[str], object]] = [
            storage.read, storage.info, lambda k: storage.write(k, b""), lambda k: storage.delete([k])
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(AssertionError, match="not a storage key"):
                call(key)

    def test_if_absent_writes_once(self, storage: Storage) -> None:
        trials.writes_once(storage)

    def test_of_many_racing_writers_exactly_one_wins(self, storage: Storage) -> None:
        if not storage.supports_if_absent:
            pytest.skip("this backend serves one committing writer, and says so")
        barrier = threading.Barrier(self.num_writers)

        def write(number: int) -> bytes | None:
            value = b"writer %d" % number
            barrier.wait()
            try:
                storage.write("step/root", value, if_absent=True)
            except AlreadyExists:
                return None
            return value

        with ThreadPoolExecutor(self.num_writers) as pool:
            won = [value for value in pool.map(write, range(self.num_writers)) if value is not None]
        trials.shows_the_winner(storage, "step/root", won)
        assert _keys(storage) == ["step/root"]

    def test_threads_may_share_it(self, storage: Storage) -> None:
        def use(number: int) -> bool:
            key, value = f"thread-{number}/object", b"%d" % number * 10_000
            storage.write(key, value)
            same = storage.read(key) == value == storage.read_ranges(key, [(0, len(value))])[0]
            storage.delete([key])
            return same and storage.info(key) is None

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(use, range(24)))
        assert _keys(storage) == []


def _keys(storage: Storage, prefix: str = "") -> list[str]:
    return [item.key for item in storage.list(prefix)]


def _size_bytes(storage: Storage, key: str) -> int | None:
    info = storage.info(key)
    assert info is None or info.key == key
    return None if info is None else info.size_bytes
