"""WorkerPool: workers are the parent's to end, whatever comes from the terminal."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from datakit.preprocessing import worker_pool
from datakit.preprocessing.recipe import Recipe
from datakit.preprocessing.task import Task
from datakit.preprocessing.worker import seal_item
from datakit.preprocessing.worker_pool import WorkerPool
from datakit.store.item_records import Progress
from datakit.store.token_store import TokenStore
from datakit.text.inputs import FileSlice, InputFile, WorkItem
from datakit.tokenization.identity import TokenizerIdentity
from tests.datakit.conftest import Cli, write_jsonl
from tests.support.planted import Planted
from threefold.errors import StorageError


@contextmanager
def pipe() -> Iterator[int]:
    ends = os.pipe()
    yield ends[1]
    for end in ends:
        os.close(end)


def test_a_ctrl_c_while_a_worker_starts_is_the_parents_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, started = worker_pool.subprocess.Popen, []

    def begin_and_interrupt(*arguments: object, **options: object) -> object:
        process = begin(*arguments, **options)  # type: ignore[call-overload]
        process.send_signal(signal.SIGINT)  # it has not come to its first line yet
        started.append(process)
        return process

    monkeypatch.setattr(worker_pool.subprocess, "Popen", begin_and_interrupt)
    timed_out = pytest.raises(worker_pool.subprocess.TimeoutExpired)
    with pipe() as keep_open, WorkerPool(1, keep_open=keep_open), timed_out:
        started[0].wait(1.0)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_workers_import_nothing_from_the_current_folder(
    cli: Cli, planted: Planted, tmp_path: Path, tokenizer_path: str
) -> None:
    write_jsonl(planted.folder / "a.jsonl", ["the store", "größe"])
    words = ["preprocess", "a.jsonl", "--output", tmp_path / "s", "--tokenizer", tokenizer_path, "--workers", "2"]
    assert cli(*words, "--item-size", "10") == 0
    assert planted.executed == []
    assert TokenStore.open(tmp_path / "s").num_documents == 2


WORKER_THAT_DIES = """
import os, signal, sys
sys.stdin.buffer.readline(), sys.stdin.buffer.readline()
progress = b'{"input_bytes": 0, "num_tokens": 0, "num_by_reference": 0, "slice": 1}'
os.write(1, b'{"progress": ' + progress + b"}\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_that_dies_names_the_file_that_it_was_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "python_command", lambda _: [sys.executable, "-c", WORKER_THAT_DIES])
    slices = (FileSlice(InputFile(f"{name}.txt", "txt", "", 10, 0), 0, 10) for name in "abc")
    task = Task("s", Recipe("tok.json"), TokenizerIdentity("tokenizers", "", 1, None, None), "tokenizers")
    named = pytest.raises(StorageError, match=r"killed by signal 9 in work item 3 \(b\.txt\)")
    with pipe() as keep_open, WorkerPool(1, keep_open=keep_open) as pool, named as caught:
        list(pool.run(task, iter([WorkItem(3, tuple(slices))])))
    assert "perhaps for memory: give fewer --workers, or --txt-split line" in (caught.value.hint or "")


def test_a_worker_without_memory_says_so_and_names_the_file_that_it_was_at() -> None:
    class Sealer:
        def seal(self, item: WorkItem, report: Callable[[Progress], None]) -> None:
            report(Progress(0, 0, slice=1))
            raise MemoryError

    slices = (FileSlice(InputFile(name, "jsonl", "", 10, 0), 0, 10) for name in ("a.jsonl", "b.jsonl"))
    error = seal_item(Sealer(), WorkItem(0, tuple(slices)), lambda _: None)["error"]
    assert error == {"io": True, "message": "memory does not suffice for b.jsonl", "hint": "give fewer --workers"}
