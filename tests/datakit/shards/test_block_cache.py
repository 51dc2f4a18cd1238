"""BlockCache: one fetch a block for all processes, a bound that holds, and nothing unsound after kills."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datakit.format import native
from datakit.shards import block_cache, cache_folder
from datakit.shards.block_cache import BlockCache, shared_cache
from datakit.shards.shard_file import ShardFile
from threefold.errors import StorageError, UserError

SIZE = 4096


def content(name: str) -> bytes:
    return random.Random(name).randbytes(SIZE)


def read(file: ShardFile) -> bytes:
    return os.pread(file.descriptor, 2 * SIZE, 0)


def get(cache: BlockCache, name: str) -> bytes:
    return read(cache.get(name, SIZE, lambda: content(name)))


def blocks(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.rglob("*") if path.is_file() and path.name[0] != "."}


PROCESS = """
import random, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.datakit.shards.test_block_cache import SIZE, content, read
from datakit.shards.block_cache import BlockCache
cache = BlockCache(Path(sys.argv[2]), int(sys.argv[3]))
rng = random.Random(sys.argv[4])
def make(name):
    time.sleep(0.0005)
    with open(sys.argv[2] + "-log", "a") as log:
        log.write(name + "\\n")
    return content(name)
for _ in range(int(sys.argv[5])):
    name = str(rng.randrange(60))
    assert read(cache.get(name, SIZE, lambda: make(name))) == content(name), name
print("done")
"""


def processes(folder: Path, max_bytes: int, count: int, num_gets: int) -> list[subprocess.Popen[str]]:
    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", PROCESS, root, str(folder), str(max_bytes)]
    return [
        subprocess.Popen([*command, str(number), str(num_gets)], stdout=subprocess.PIPE, text=True)
        for number in range(count)
    ]


def test_processes_fetch_a_block_once(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    for process in processes(folder, 100 * SIZE, 3, 200):
        assert process.communicate(timeout=60)[0] == "done\n"
    made = Path(f"{folder}-log").read_text().split()
    assert sorted(set(made)) == sorted(made)
    assert len(made) > 50


def test_runs_of_several_threads_wait_for_each_other_and_fetch_what_is_missing(tmp_path: Path) -> None:
    cache, fetched = BlockCache(tmp_path, 100 * SIZE), list[str]()
    names = list(map(str, range(20)))

    def fill(first: int, stop: int) -> None:
        def make(start: int, after: int) -> list[bytes]:
            found = names[first + start : first + after]
            fetched.extend(found)
            time.sleep(0.01)
            return [content(name) for name in found]

        cache.fill([(name, SIZE) for name in names[first:stop]], make)

    get(cache, "5")
    threads = [threading.Thread(target=fill, args=place) for place in ((0, 12), (4, 16), (8, 20), (0, 20))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fetched) == sorted(set(names) - {"5"})
    assert all(get(cache, name) == content(name) for name in names)
    assert cache.bytes_added == 20 * SIZE


def test_kills_leave_whole_blocks_within_the_bound(tmp_path: Path) -> None:
    folder, rng = tmp_path / "cache", random.Random(5)
    for _ in range(4):
        running = processes(folder, 20 * SIZE, 2, 10**6)
        while not blocks(folder) and all(process.poll() is None for process in running):
            time.sleep(0.01)  # until they have begun
        time.sleep(rng.random() / 2)
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=30)
    found = blocks(folder)
    assert found
    assert all(path.read_bytes() == content(name) for name, path in found.items())
    cache = BlockCache(folder, 20 * SIZE)
    for number in range(60):  # no lock is left, and the count of bytes mends itself
        get(cache, str(number))
    assert 15 <= len(blocks(folder)) <= 20
    assert not list(folder.rglob(".*.tmp"))


def test_the_oldest_go_first_and_needed_ones_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = BlockCache(tmp_path, 17 * SIZE)
    cache.needed |= {"0", "1"}
    now = time.time()
    for number in range(16):
        get(cache, str(number))
        path = blocks(tmp_path)[str(number)]
        os.utime(path, (now - 100 + number, now - 100 + number))
    get(cache, "2")  # used again
    get(cache, "16")
    assert {"0", "1", "2", "15", "16"} <= blocks(tmp_path).keys()
    assert "3" not in blocks(tmp_path)
    cache.needed |= set(map(str, range(40)))
    for number in range(40):
        assert get(cache, str(number)) == content(str(number))
    assert len(blocks(tmp_path)) <= 16


def test_a_stopped_owner_holds_nobody_up(tmp_path: Path) -> None:
    cache, begun, end = BlockCache(tmp_path, 100 * SIZE), threading.Event(), threading.Event()
    cache.folder.patience_s = 0.1

    def stopped() -> bytes:
        begun.set()
        end.wait(30)
        return content("a")

    thread = threading.Thread(target=lambda: cache.get("a", SIZE, stopped))
    thread.start()
    begun.wait(30)
    assert get(cache, "a") == content("a")
    end.set()
    thread.join()
    assert get(cache, "a") == content("a")


def test_other_starts_of_the_machine_are_removed_if_nobody_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = []
    for boot in ("one", "two", "three"):
        (tmp_path / "boot").write_text(boot)
        monkeypatch.setattr(cache_folder, "_BOOT_ID", tmp_path / "boot")
        caches.append(BlockCache(tmp_path / "cache", 100 * SIZE))
        get(caches[-1], boot)
        if boot == "one":
            caches[0].folder._in_use.close()
    assert blocks(tmp_path / "cache").keys() == {"two", "three"}


def test_a_block_that_was_cut_is_fetched_again(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 100 * SIZE)
    get(cache, "a")
    os.truncate(blocks(tmp_path)["a"], 10)
    assert get(cache, "a") == content("a")
    assert cache.bytes_added == 2 * SIZE


def test_a_mapped_block_outlives_its_file(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "cache", 10 * SIZE)
    mapped = [cache.memory(name, SIZE, lambda name=name: content(name)) for name in ("a", "b", "a")]
    for path in blocks(tmp_path).values():
        path.unlink()
    assert [each.tobytes() for each in mapped] == [content("a"), content("b"), content("a")]
    assert not mapped[0].flags.writeable
    assert cache.bytes_added == 2 * SIZE


def test_a_block_that_was_cut_is_neither_mapped_nor_found(tmp_path: Path) -> None:
    cache, fetched = BlockCache(tmp_path / "cache", 10 * SIZE), list[str]()

    def make(first: int, stop: int) -> list[bytes]:
        fetched.extend("abc"[first:stop])
        return [content(name) for name in "abc"[first:stop]]

    cache.fill([(name, SIZE) for name in "abc"], make)
    os.truncate(blocks(tmp_path)["b"], SIZE - 1)
    cache.fill([(name, SIZE) for name in "abc"], make)
    os.truncate(blocks(tmp_path)["c"], SIZE + 1)
    assert cache.memory("c", SIZE, lambda: fetched.append("C") or content("c")).tobytes() == content("c")
    assert fetched == ["a", "b", "c", "b", "C"]
    assert {name: path.read_bytes() for name, path in blocks(tmp_path).items()} == {n: content(n) for n in "abc"}


class Library:
    """The native library, of which one function fails until it was called so often."""

    def __init__(self, function: str, code: int, num_failures: int) -> None:
        self.function, self.code, self.num_failures = function, code, num_failures

    def __getattr__(self, name: str) -> Any:
        real = getattr(native.library(), name)

        def call(*arguments: Any) -> Any:
            if name == self.function and self.num_failures:
                self.num_failures -= 1
                return -self.code
            return real(*arguments)

        return call


def test_a_full_disk_is_made_room_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = BlockCache(tmp_path, 100 * SIZE)
    for number in range(60):
        get(cache, str(number))
    library = Library("dk_write_blocks", errno.ENOSPC, 2)
    monkeypatch.setattr(block_cache, "library", lambda: library)
    assert get(cache, "new") == content("new")
    assert library.num_failures == 0
    assert 40 <= len(blocks(tmp_path)) <= 60 - 2 + 1
    library.num_failures = 100
    with pytest.raises(StorageError, match=r"cannot use the cache .*: No space left on device") as caught:
        get(cache, "other")
    assert "--data.cache-mib" in str(caught.value.hint)
    assert blocks(tmp_path) == {}


@pytest.mark.parametrize("what", ["all of it", "what is in it", "what this process has there"])
def test_a_folder_that_was_removed_is_used_again(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "cache"
    cache = BlockCache(folder, 100 * SIZE)
    memory = cache.mapped_block("a", SIZE, lambda: content("a"))
    for _ in range(3):
        for path in [folder] if what == "all of it" else [*folder.glob("*/.process*" if "process" in what else "*")]:
            shutil.rmtree(path)
        cache.fill([("b", SIZE), ("c", SIZE)], lambda first, stop: [content(name) for name in "bc"[first:stop]])
        assert get(cache, "d") == content("d")
        for path in [folder] if what == "all of it" else [*folder.glob("*/.process*" if "process" in what else "*")]:
            shutil.rmtree(path)
        again = cache.mapped_block("e", SIZE, lambda: content("e"))
        assert again is not None
        assert again.tobytes() == content("e")
    assert memory is not None
    assert memory.tobytes() == content("a")


def test_the_first_batch_that_maps_more_than_there_is_names_the_least(tmp_path: Path) -> None:
    cache, blocks = BlockCache(tmp_path, 1 << 20), np.array([1 << 20] * 5)
    for sizes, least in ((blocks, 5), (np.array([1 << 20, 1]), 5), (np.append(blocks, 5 << 20), 21)):
        with pytest.raises(UserError, match=rf"has 1048576 bytes, and a step maps {sizes.sum()} bytes") as caught:
            cache.check_step(sizes)
        assert caught.value.hint == f"--data.cache-mib {least}, or more; cache_mib={least} in a program"
        enough = BlockCache(tmp_path, least << 20)
        enough.check_step(sizes)
        name, size = str(least), int(sizes.max())
        enough.fill([(name, size)], lambda *_: [bytes(size)])  # noqa: B023
        enough.check_step(np.append(sizes, 100 << 20))  # later ones are read in parts


def test_two_figures_for_one_folder_are_the_less(tmp_path: Path) -> None:
    caches = [shared_cache(tmp_path / "cache", mib) for mib in (64, 16, 32)]
    assert [cache is caches[0] for cache in caches] == [True, True, True]
    assert caches[0].folder.max_bytes == 16 << 20
    del caches
    assert shared_cache(tmp_path / "cache", 64).folder.max_bytes == 64 << 20


def test_a_figure_ends_with_its_folder(tmp_path: Path) -> None:
    small = shared_cache(tmp_path / "cache", 2)  # as garbage would that was not collected yet
    shutil.rmtree(tmp_path / "cache")
    cache = shared_cache(tmp_path / "cache", 32)
    assert (small.folder.max_bytes, cache.folder.max_bytes) == (2 << 20, 32 << 20)
    assert get(small, "one") == get(cache, "one") == content("one")


def test_a_block_too_large_is_one_error(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 4 * SIZE)
    with pytest.raises(
        UserError, match=r"a block of 20480 bytes does not fit into a quarter of the cache .* has 16384 bytes"
    ):
        cache.get("a", 5 * SIZE, lambda: bytes(5 * SIZE))
    assert not blocks(tmp_path)


@pytest.mark.parametrize(
    ("folder", "cache_mib", "hint"),
    [
        ("s3://bucket/cache", 16, "--data.cache /local/cache"),
        ("file:///cache", 16, "--data.cache /local/cache"),
        ("~/cache", 16, str(Path("~/cache").expanduser())),
        ("s3:/bucket", 16, "s3://bucket"),
        ("", 16, "give a folder"),
        (None, 16, ""),
        ("cache", 0, "cache_mib=10240"),
        ("cache", 1.5, "cache_mib=10240"),
    ],
)
def test_a_cache_that_cannot_be_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Any, cache_mib: Any, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        shared_cache(folder, cache_mib)
    assert (caught.value.hint or "").startswith(hint)
    assert list(tmp_path.iterdir()) == []
