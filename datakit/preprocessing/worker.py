"""A worker of preprocessing: `python -m datakit.preprocessing.worker` seals the work items that it reads from stdin.

Messages are JSON, one a line. In: the Task, then items. Out: `progress` while an item is at work, then `sealed` or
`error`. The worker ends with its parent, whatever ended that: its stdin closes.
"""

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, BinaryIO

import orjson

from datakit.preprocessing.task import Sealer, Task
from datakit.store.item_records import Progress
from datakit.text.documents import memory_hint
from datakit.text.inputs import WorkItem
from threefold.errors import StorageError, UserError

PROGRESS_INTERVAL_S = 0.5
LARGE_BYTES = 1 << 20  # a file that may take all memory is named before it is read


def main() -> None:
    """Serve the parent until it closes stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the parent, which ends the workers
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing a library prints may mix with the messages
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(messages,), daemon=True).start()
    sealer = Task.from_line(messages.get()).sealer()
    while True:
        _serve(sealer, WorkItem.parse(orjson.loads(messages.get())), answers)


def _receive(messages: "queue.SimpleQueue[bytes]") -> None:
    for line in sys.stdin.buffer:
        messages.put(line)
    os._exit(1)  # the parent is gone


def seal_item(sealer: Sealer, item: WorkItem, progress: Callable[[Progress], None]) -> dict[str, Any]:
    """Seal one item; the message that says so, or says what is wrong with it."""
    latest = Progress(0, 0)

    def report(current: Progress) -> None:
        nonlocal latest
        latest = current
        progress(current)

    try:
        sealer.seal(item, report)
    except MemoryError:
        file = item.slices[latest.slice].file
        return {"error": {"io": True, "message": f"memory does not suffice for {file.path}", "hint": memory_hint(file)}}
    except OSError as error:
        return {"error": {"io": True, "message": str(error), "hint": None}}
    except UserError as error:
        return {"error": {"io": isinstance(error, StorageError), "message": error.message, "hint": error.hint}}
    return {"sealed": item.number, "progress": asdict(latest)}


def _serve(sealer: Sealer, item: WorkItem, answers: BinaryIO) -> None:
    reported_s, reported_slice = time.monotonic(), 0

    def report(progress: Progress) -> None:
        nonlocal reported_s, reported_slice
        part = item.slices[progress.slice]
        is_large = progress.slice != reported_slice and part.stop - part.start >= LARGE_BYTES
        if is_large or time.monotonic() - reported_s >= PROGRESS_INTERVAL_S:
            reported_s, reported_slice = time.monotonic(), progress.slice
            _send(answers, {"progress": progress})

    _send(answers, seal_item(sealer, item, report))


def _send(answers: BinaryIO, message: dict[str, Any]) -> None:
    answers.write(orjson.dumps(message) + b"\n")


if __name__ == "__main__":
    main()
