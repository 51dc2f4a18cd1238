"""WorkerPool: worker processes that take one work item at a time; a plain pipe pool, no queue grows.

The first failure ends the run: the other workers are ended too, and what is sealed stays sealed.
"""

import os
import selectors
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import orjson

from datakit.preprocessing.task import Task
from datakit.text.documents import memory_hint
from datakit.text.inputs import WorkItem
from threefold.child_python import python_command, search_path
from threefold.closing import Closing
from threefold.errors import StorageError, UserError

# One thread each; and large frees go back to the system: glibc would keep a long document's memory for ever. A few free
# MiB stay (glibc's 128 KiB are too few where thresholds are set), or every batch would fault its memory in again.
WORKER_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 20),
}


class WorkerPool(Closing):
    """Some workers; use it in a `with`, which ends them."""

    def __init__(self, num_workers: int, *, keep_open: int) -> None:
        """Start the workers, which get ready while `run` is prepared.

        `keep_open` is a file descriptor that stays open as long as one of them lives.
        """
        self._workers: list[_Worker] = []
        try:
            for _ in range(num_workers):
                self._workers.append(_Worker(keep_open))
        except BaseException:
            self.close()
            raise

    def run(self, task: Task, items: Iterator[WorkItem]) -> Iterator[tuple[WorkItem, dict[str, Any]]]:
        """Hand out a task's items; give every message of the workers, with its item, until all items are sealed."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                worker.begin(task)
                if worker.take(next(items, None)):
                    selector.register(worker.answers, selectors.EVENT_READ, worker)
            while selector.get_map():
                for key, _ in selector.select():
                    worker = key.data
                    for message in worker.receive():
                        assert worker.item is not None, "a worker speaks of the item it has"
                        yield worker.item, message
                        if "sealed" in message and not worker.take(next(items, None)):
                            selector.unregister(worker.answers)

    def close(self) -> None:
        """End all workers and wait for them."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.communicate()


class _Worker:
    """One worker process and the item it has."""

    def __init__(self, keep_open: int) -> None:
        environment = {**os.environ, **WORKER_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(search_path())}
        # a Ctrl-C is the parent's alone, also while a worker imports, before it can ignore one
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process = subprocess.Popen(
                python_command("datakit.preprocessing.worker"),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, pass_fds=(keep_open,), bufsize=0,
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        items, answers = self.process.stdin, self.process.stdout
        assert items is not None, "stdin is a pipe"
        assert answers is not None, "stdout is a pipe"
        self._items, self.answers = items, answers
        self.item: WorkItem | None = None
        self._slice = 0  # of the item, as far as the worker said
        self._unread = b""

    def begin(self, task: Task) -> None:
        """Send the worker what its items will have in common."""
        self._send(task.to_line())

    def take(self, item: WorkItem | None) -> bool:
        """Begin an item; False when there is none."""
        self.item, self._slice = item, 0
        if item is not None:
            self._send(orjson.dumps(item) + b"\n")
        return item is not None

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived; raises the worker's error, or what its death is to the user."""
        data = os.read(self.answers.fileno(), 1 << 16)
        if not data:
            raise self._death()
        *lines, self._unread = (self._unread + data).split(b"\n")
        messages = [orjson.loads(line) for line in lines]
        for message in messages:
            raise_error(message)
            self._slice = message["progress"]["slice"]
        return messages

    def _send(self, line: bytes) -> None:
        view = memoryview(line)
        try:
            while view:
                view = view[self._items.write(view) :]
        except BrokenPipeError:
            raise self._death() from None

    def _death(self) -> StorageError:
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        place = more = ""
        if self.item:
            file = self.item.slices[self._slice].file
            place = f" in work item {self.item.number} ({file.path})"
            more = f"; perhaps for memory: {memory_hint(file)}" if code in (-signal.SIGKILL, -signal.SIGABRT) else ""
        return StorageError(
            f"a worker {how}{place}; sealed items are kept",
            hint=f"rerun the same command to continue{more}",
        )


def raise_error(message: dict[str, Any]) -> None:
    """Raise the error that a worker's message holds, if any."""
    if fault := message.get("error"):
        raise (StorageError if fault["io"] else UserError)(fault["message"], hint=fault["hint"])
