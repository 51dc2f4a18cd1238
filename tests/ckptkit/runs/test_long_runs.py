"""What a run of many steps costs on an object store, in requests, and on a local disk, in files looked at."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
from threefold.storage import ObjectInfo
from threefold.storage.local import LocalStorage
from threefold.storage.memory import MemoryStorage
from threefold.storage.wrapping import Request, WrappingStorage

NUM_STEPS, FILES_A_STEP = 600, 5
NUM_LISTINGS = NUM_STEPS * FILES_A_STEP // 1000
POLICY = Retention(keep_last=5, keep_every=150)
NUM_PLACES = 8  # 600 is the newest too


class ObjectStore(WrappingStorage):
    """Counts requests as an object store does: 1,000 names a listing, 1,000 keys a deletion."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        super().__init__(MemoryStorage("s3://bucket/run"))
        self.within, self.requests = self._storage, Counter[str]()
        self._lock = threading.Lock()
        for key, data in objects.items():
            self.within.write(key, data)

    @property
    def num_requests(self) -> int:
        return self.requests.total()

    def _request(self, request: Request, work: Callable[[], Any]) -> Any:
        found = work()
        kind = request.operation.partition("_")[0]  # of reads and listings there are several
        num_items = {"list": lambda: max(len(found), 1), "delete": lambda: len(request.keys)}.get(kind, lambda: 1)()
        with self._lock:
            self.requests[kind] += -(-num_items // 1000)
        return found


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    """The keys of NUM_STEPS steps of a root and four files each."""
    made = MemoryStorage()
    write_steps(made, 0)
    first = {key: made.read(key) for key in made.list_keys()}
    root = Root.from_bytes(first.pop("step-000000000/root.json"), "the first")
    found: dict[str, bytes] = {}
    for step in range(1, NUM_STEPS + 1):
        folder = f"step-{step:09d}"
        found |= {key.replace("step-000000000", folder): data for key, data in first.items()}
        found[f"{folder}/root.json"] = replace(root, step=step).to_bytes()
    return found


@pytest.fixture
def run(objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    made = ObjectStore(objects)
    for module in ("format.address", "runs.run"):
        monkeypatch.setattr(f"ckptkit.{module}.open_storage", lambda url, **options: made)
    return made


def test_the_newest_and_one_step_cost_few_requests(run: ObjectStore, capsys: Capture) -> None:
    assert call(capsys, "inspect", run.url)[0] == 0
    assert run.num_requests <= 6
    for verb in ("ls", "inspect"):
        run.requests.clear()
        assert call(capsys, verb, f"{run.url}/step-000000300")[0] == 0
        assert run.num_requests <= 5
        assert not run.requests["list"]


def test_a_resume_looks_at_no_step_that_it_does_not_try(run: ObjectStore) -> None:
    run.within.write("step-000000600/root.json", b"damaged")
    run.within.write("step-000003000/a/part-00000.index", b"not committed")
    lines: list[str] = []
    found = restore_newest(run.url, [], tensors=TENSORS, report=lines.append, sets_aside=False)
    assert found.step == NUM_STEPS - 1
    assert len(lines) == 1
    assert run.num_requests <= 16


def test_steps_and_records_cost_listings_and_the_roots(run: ObjectStore, capsys: Capture) -> None:
    assert committed_steps(run) == [*range(1, NUM_STEPS + 1)]
    assert run.num_requests <= NUM_LISTINGS + 4
    run.requests.clear()
    code, out, _ = call(capsys, "ls", run.url)
    assert (code, len(out.splitlines())) == (0, NUM_STEPS + 1)
    assert run.requests == {"list": NUM_LISTINGS + 1, "read": NUM_STEPS}


def test_a_prune_reads_what_fills_a_place_and_lists_the_others(run: ObjectStore) -> None:
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
    assert run.requests["info"] == 2 * num_batches + len(done.deleted)  # of the newest step before and after, and pins
    assert run.requests["delete"] == 2 * num_batches
    assert len([*run.within.list_keys()]) == NUM_PLACES * FILES_A_STEP


def test_after_a_save_old_steps_cost_no_request_but_listings(run: ObjectStore) -> None:
    pruner, every = Pruner(), Retention(keep_every=20)
    assert pruner.after_save(run, NUM_STEPS, every) == ""
    run.requests.clear()
    write_steps(run, NUM_STEPS + 1)
    run.requests.clear()
    assert pruner.after_save(run, NUM_STEPS + 1, every) == ""
    assert run.num_requests <= NUM_LISTINGS + 10


def test_steps_of_many_files_and_other_folders_are_not_listed(objects: dict[str, bytes]) -> None:
    few = {key: data for key, data in objects.items() if key < "step-000000041"}
    run = ObjectStore(few | {f"logs/{number}": b"" for number in range(5000)})
    assert committed_steps(run) == [*range(1, 41)]
    assert [each.step for each in listed_steps(run)] == [*range(1, 41)]
    assert run.requests == {"list": 2 * (1 + 0) + 40, "info": 80}
    many = {f"step-{step:09d}/a/part-{number:05d}.index": b"" for step in range(1, 41) for number in range(800)}
    run = ObjectStore(few | many)
    assert committed_steps(run) == [*range(1, 41)]
    assert run.requests == {"list": 2, "info": 40}


def test_newest_first_looks_no_further_than_it_is_asked(objects: dict[str, bytes]) -> None:
    run = ObjectStore(objects)
    found = newest_first(run)
    assert [next(found) for _ in range(4)] == [600, 599, 598, 597]
    assert run.requests == {"list": 1, "info": 7}
    assert latest_step(ObjectStore({})) is None


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
