"""What a run of many steps costs on an object store, in requests, and on a local disk, in files looked at."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptkit.format.root import Root
from ckptkit.loading.roots import latest_step, newest_first
from ckptkit.runs.catalogue import committed_steps, listed_steps
from ckptkit.runs.fallback import restore_newest
from ckptkit.runs.pruning import STEPS_AT_A_TIME, Pruner, prune
from ckptkit.runs.retention import Retention
from tests.ckptkit.support.steps import TENSORS, write_steps
from tests.ckptkit.test_cli import Capture, call
from threefold.errors import StorageError
from threefold.storage import Buffer, ObjectInfo
from threefold.storage.local import LocalStorage

NUM_STEPS, FILES_A_STEP = 600, 5
NUM_LISTINGS = NUM_STEPS * FILES_A_STEP // 1000
POLICY = Retention(keep_last=5, keep_every=150)
NUM_PLACES = 8  # 600 is the newest too


class ObjectsInMemory:
    """An object store that counts requests: 1,000 names a listing, 1,000 keys a deletion."""

    supports_if_absent = True

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.url = self.address = "s3://bucket/run"
        self.objects, self.requests = objects, Counter[str]()
        self._lock = threading.Lock()

    @property
    def num_requests(self) -> int:
        return self.requests.total()

    def _count(self, kind: str, number: int = 1) -> None:
        with self._lock:
            self.requests[kind] += number

    def write(self, key: str, data: Any, *, if_absent: bool = False, size_bytes: int | None = None) -> None:
        self._count("write")
        self.objects[key] = bytes(data)

    def read(self, key: str) -> bytes:
        self._count("read")
        if key not in self.objects:
            raise StorageError(f"{key} does not exist")
        return self.objects[key]

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        self._count("read")
        return [self.objects[key][start:stop] for start, stop in ranges]

    def info(self, key: str) -> ObjectInfo | None:
        self._count("info")
        return ObjectInfo(key, len(self.objects[key]), 1.0) if key in self.objects else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = [ObjectInfo(key, len(self.objects[key]), 1.0) for key in sorted(self.objects) if key.startswith(prefix)]
        self._count("list", max(-(-len(found) // 1000), 1))
        return iter(found)

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        return (item.key for item in self.list(prefix))

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        folders = sorted({key.partition("/")[0] for key in self.objects if "/" in key})
        self._count("list", max(-(-len(folders) // 1000), 1))
        return iter(folders)

    def delete(self, keys: Iterable[str]) -> None:
        listed = list(keys)
        self._count("delete", -(-len(listed) // 1000))
        for key in listed:
            self.objects.pop(key, None)

    def copy(self, source: str, target: str) -> None:
        self.write(target, self.read(source))

    def local_path(self, key: str) -> Path | None:
        return None


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    """The keys of NUM_STEPS steps of a root and four files each."""
    made = ObjectsInMemory({})
    write_steps(made, 0)
    first = dict(made.objects)
    root = Root.from_bytes(first.pop("step-000000000/root.json"), "the first")
    found: dict[str, bytes] = {}
    for step in range(1, NUM_STEPS + 1):
        folder = f"step-{step:09d}"
        found |= {key.replace("step-000000000", folder): data for key, data in first.items()}
        found[f"{folder}/root.json"] = replace(root, step=step).to_bytes()
    return found


@pytest.fixture
def run(objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> ObjectsInMemory:
    made = ObjectsInMemory(dict(objects))
    monkeypatch.setattr("ckptkit.format.address.open_storage", lambda url, **options: made)
    return made


def test_the_newest_and_one_step_cost_few_requests(run: ObjectsInMemory, capsys: Capture) -> None:
    assert call(capsys, "inspect", run.url)[0] == 0
    assert run.num_requests <= 6
    for verb in ("ls", "inspect"):
        run.requests.clear()
        assert call(capsys, verb, f"{run.url}/step-000000300")[0] == 0
        assert run.num_requests <= 5
        assert not run.requests["list"]


def test_a_resume_looks_at_no_step_that_it_does_not_try(run: ObjectsInMemory) -> None:
    run.objects["step-000000600/root.json"] = b"damaged"
    run.objects["step-000003000/a/part-00000.index"] = b"not committed"
    lines: list[str] = []
    assert restore_newest(run.url, [], tensors=TENSORS, report=lines.append).step == NUM_STEPS - 1
    assert len(lines) == 1
    assert run.num_requests <= 16


def test_steps_and_records_cost_listings_and_the_roots(run: ObjectsInMemory, capsys: Capture) -> None:
    assert committed_steps(run) == [*range(1, NUM_STEPS + 1)]
    assert run.num_requests <= NUM_LISTINGS + 4
    run.requests.clear()
    code, out, _ = call(capsys, "ls", run.url)
    assert (code, len(out.splitlines())) == (0, NUM_STEPS + 1)
    assert run.requests == {"list": NUM_LISTINGS + 1, "read": NUM_STEPS}


def test_a_prune_reads_what_fills_a_place_and_lists_the_others(run: ObjectsInMemory) -> None:
    report = prune(run, POLICY, dry_run=True)
    assert len(report.deleted) == NUM_STEPS - NUM_PLACES
    assert run.requests["info"] == 0
    assert run.requests["list"] == NUM_LISTINGS + 1 + NUM_PLACES
    assert run.requests["read"] == NUM_STEPS + 3 * NUM_PLACES  # once more their roots, and two indexes
    run.requests.clear()
    done = prune(run, POLICY)
    assert replace(done, dry_run=True) == report
    assert run.requests["list"] == NUM_LISTINGS + 1 + NUM_STEPS
    num_batches = -(-len(done.deleted) // STEPS_AT_A_TIME)
    assert run.requests["info"] == num_batches + len(done.deleted)  # of pins, the last
    assert run.requests["delete"] == 2 * num_batches
    assert len(run.objects) == NUM_PLACES * FILES_A_STEP


def test_after_a_save_old_steps_cost_no_request_but_listings(run: ObjectsInMemory) -> None:
    pruner, every = Pruner(), Retention(keep_every=20)
    assert pruner.after_save(run, NUM_STEPS, every) == ""
    run.requests.clear()
    write_steps(run, NUM_STEPS + 1)
    run.requests.clear()
    assert pruner.after_save(run, NUM_STEPS + 1, every) == ""
    assert run.num_requests <= NUM_LISTINGS + 10


def test_steps_of_many_files_and_other_folders_are_not_listed(objects: dict[str, bytes]) -> None:
    few = {key: data for key, data in objects.items() if key < "step-000000041"}
    run = ObjectsInMemory(few | {f"logs/{number}": b"" for number in range(5000)})
    assert committed_steps(run) == [*range(1, 41)]
    assert [each.step for each in listed_steps(run)] == [*range(1, 41)]
    assert run.requests == {"list": 2 * (1 + 0) + 40, "info": 80}
    many = {f"step-{step:09d}/a/part-{number:05d}.index": b"" for step in range(1, 41) for number in range(800)}
    run = ObjectsInMemory(few | many)
    assert committed_steps(run) == [*range(1, 41)]
    assert run.requests == {"list": 2, "info": 40}


def test_newest_first_looks_no_further_than_it_is_asked(objects: dict[str, bytes]) -> None:
    run = ObjectsInMemory(dict(objects))
    found = newest_first(run)
    assert [next(found) for _ in range(4)] == [600, 599, 598, 597]
    assert run.requests == {"list": 1, "info": 7}
    assert latest_step(ObjectsInMemory({})) is None


def test_on_a_local_disk_no_file_of_every_step_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are read, and of steps that fill no place only the root is looked at and read."""

    class Watching(LocalStorage):
        looked: set[str] = set()  # noqa: RUF012  # of one test

        def info(self, key: str) -> ObjectInfo | None:
            self.looked.add(key)
            return super().info(key)

        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            for item in super().list(prefix):
                self.looked.add(item.key)
                yield item

    storage = Watching(tmp_path)
    write_steps(storage, *range(1, 9))
    storage.looked.clear()
    prune(storage, Retention(keep_last=1), dry_run=True)
    assert len(list(newest_first(storage))) == len(committed_steps(storage)) == 8
    files = {key for key in storage.looked if "/a1/" in key}
    assert {key.partition("/")[0] for key in files} == {"step-000000008"}
