"""CacheFolder: what all processes of a machine take of the disk is within the bound."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from datakit import write_store
from datakit.shards.block_cache import BlockCache
from datakit.shards.holdings import Kind
from datakit.shards.kept_open import KeptOpen
from tests.datakit.shards.test_block_cache import PROCESS, SIZE, blocks, content, get


def used_bytes(folder: Path) -> int:
    """What the files of a folder take on the disk, and those that this process has open or mapped without a name."""
    sizes = {(status.st_dev, status.st_ino): status.st_blocks * 512 for status in map(os.stat, files_of(folder))}
    for entry in Path("/proc/self/map_files").iterdir():
        with suppress(OSError):
            if os.readlink(entry).startswith(f"{folder}/"):
                status = entry.stat()
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_mapped_and_open_blocks_stay_within_the_bound(tmp_path: Path) -> None:
    caches = [BlockCache(tmp_path, 40 * SIZE) for _ in range(4)]  # as those of four processes
    blocks_kept, opened = [], []
    for number in range(200):
        cache, name = caches[number % 4], str(number)
        memory = cache.mapped_block(name, SIZE, lambda name=name: content(name))
        if memory is not None:
            blocks_kept.append(memory)
        else:
            read = cache.get(name, SIZE, lambda name=name: content(name))
            read.let_go()
            opened.append(read)
        if number % 10 == 9:
            assert used_bytes(tmp_path) <= 40 * SIZE
    assert len(blocks_kept) == 4 * 4  # half of the cache, in equal parts
    assert not any(read.is_kept for read in opened)
    assert [memory.tobytes() for memory in blocks_kept] == [content(str(number)) for number in range(16)]
    assert {str(number) for number in range(16)} <= blocks(tmp_path).keys()  # so nothing is fetched again


def test_what_is_open_to_be_read_once_has_its_room_until_then(tmp_path: Path) -> None:
    first, second = BlockCache(tmp_path, 40 * SIZE), BlockCache(tmp_path, 40 * SIZE)
    mapped = [first.mapped_block(str(number), SIZE, lambda: content("x")) for number in range(10)]
    assert mapped[-1] is None  # it has its part already
    read = first.get("read", SIZE, lambda: content("read"))
    assert not read.is_kept
    for number in range(100):
        second.get(f"other {number}", SIZE, lambda: content("y")).let_go()
    assert os.fstat(read.descriptor).st_nlink == 2
    assert used_bytes(tmp_path) <= 40 * SIZE
    read.let_go()
    assert not (first.folder.holdings.folder / "read").exists()


def test_whole_files_are_held_up_to_half_and_leave_less_to_read_ahead(tmp_path: Path) -> None:
    cache, fetched = BlockCache(tmp_path, 40 * SIZE), list[str]()

    def fetch(name: str) -> bytes:
        fetched.append(name)
        return content(name)

    names = [f"file {number}" for number in range(19)]
    files = KeptOpen[int, Any](cache.files)
    for number in [*range(19), *range(19)]:
        files.get(number, lambda number: cache.memory(names[number], SIZE, lambda: fetch(names[number])))
    assert fetched == names
    assert len(files) == 19
    room = cache.folder.max_bytes - 19 * SIZE
    assert 0.75 * room < cache.folder.ahead_bytes < 0.9 * room
    files.get(19, lambda _: cache.memory("one more", SIZE, lambda: fetch("one more")))
    assert len(files) == 19  # the oldest makes room


def test_what_is_held_goes_with_who_holds_it(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 9 * SIZE)
    mapped_blocks = [cache.mapped_block(name, SIZE, lambda name=name: content(name)) for name in "abcd"]
    assert cache.mapped_block("e", SIZE, lambda: content("e")) is None
    mapped_blocks.pop()
    assert cache.mapped_block("e", SIZE, lambda: content("e")) is not None
    assert [memory.tobytes() for memory in mapped_blocks] == [content(name) for name in "abc"]
    program = PROCESS.replace(
        'print("done")', "kept = cache.mapped_block('x', SIZE, lambda: content('x'))\nprint('done')"
    )
    for end in ("", "os.kill(os.getpid(), 9)"):
        command = [sys.executable, "-c", f"import os\n{program}\n{end}", str(Path(__file__).parents[3])]
        subprocess.run([*command, str(tmp_path), str(8 * SIZE), "1", "1"], check=False, timeout=60)
    del mapped_blocks
    for number in range(20):
        get(cache, str(number))
    assert len(list(tmp_path.rglob(".process-*"))) == 1
    assert "x" not in blocks(tmp_path)


def test_more_processes_hold_less_each(tmp_path: Path) -> None:
    first = BlockCache(tmp_path, 17 * SIZE)
    held = [first.mapped_block(str(number), SIZE, lambda: content("a")) for number in range(6)]
    others = [BlockCache(tmp_path, 17 * SIZE) for _ in range(3)]
    assert first.mapped_block("6", SIZE, lambda: content("6")) is None
    assert others[0].folder.may_hold(2 * SIZE, Kind.BLOCK)
    assert not others[0].folder.may_hold(3 * SIZE, Kind.BLOCK)
    assert all(memory is not None for memory in held)


def test_a_forked_process_holds_for_itself(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 16 * SIZE)
    block = cache.mapped_block("a", SIZE, lambda: content("a"))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            del block
            same = cache.mapped_block("a", SIZE, lambda: content("a"))
            code = 0 if same is not None and same.tobytes() == content("a") else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    cache.needed.clear()
    for number in range(40):
        get(cache, str(number))
    assert block is not None
    assert "a" in blocks(tmp_path)


READER = """
import sys
from datakit import Blend, Loader, RemoteStore
url, cache, cache_mib, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
blend = Blend([(RemoteStore.at(url, cache=cache, cache_mib=cache_mib), 1.0)], seq_length=4096, block_tokens=1 << 20)
with Loader(blend, 32, 1, rank, 3) as loader:
    for _ in range(6):
        loader.next_step()
    print("begun", flush=True)
    sys.stdin.readline()
    for _ in range(20):
        loader.next_step()
    print("read", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("cache_mib", [5, 16])
def test_the_bound_is_what_all_ranks_of_a_machine_take_of_the_disk(tmp_path: Path, cache_mib: int) -> None:
    """Mapped and open blocks that have no name any more among them."""
    store = write_store(tmp_path / "store", [range(1 << 16)] * 256, vocab_size=1 << 16, shard_documents=64)
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", READER, f"file://{store.path}", str(cache), str(cache_mib)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank)], **pipes) for rank in range(3)]
    try:
        for said in ("begun\n", "read\n"):
            assert [rank.stdout.readline() for rank in ranks] == [said] * 3
            for rank in ranks:
                rank.send_signal(signal.SIGSTOP)
                os.waitpid(rank.pid, os.WUNTRACED)
            assert disk_bytes(cache, [rank.pid for rank in ranks]) <= cache_mib << 20
            for rank in ranks:
                rank.send_signal(signal.SIGCONT)
                print(file=rank.stdin, flush=True)
        assert [rank.wait(60) for rank in ranks] == [0] * 3
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def disk_bytes(folder: Path, processes: list[int]) -> int:
    """Return what files of a folder take on the disk: those that have names, and those that processes have open."""
    entries = [
        entry for pid in processes for kind in ("fd", "map_files") for entry in Path(f"/proc/{pid}/{kind}").iterdir()
    ]
    opened = [entry for entry in entries if str(folder) in os.readlink(entry)]
    found = {status.st_ino: status.st_blocks * 512 for status in map(os.stat, [*folder.rglob("*"), *opened])}
    return sum(found.values())
