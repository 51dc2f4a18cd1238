"""The batches of a DataLoader in a test, after which its workers and the threads of its queues have ended."""

from contextlib import suppress
from itertools import islice
from traceback import walk_tb
from typing import Any

_kept: list[Any] = []  # the iterators that their loaders keep for the next iteration


def first_batches(loader: Any, num: int) -> list[dict[str, Any]]:
    """The first `num` batches of an iteration that ends here, with its workers unless the loader keeps them."""
    try:
        iterator = iter(loader)
    except Exception as error:
        for frame, _ in walk_tb(error.__traceback__):
            _end(frame.f_locals.get("self"))  # an iterator that began its workers
        raise
    try:
        return list(islice(iterator, num))
    finally:
        if getattr(loader, "_iterator", None) is iterator:
            _kept.append(iterator)
        else:
            _end(iterator)


def end_kept() -> None:
    """End what loaders keep of their iterations."""
    while _kept:
        _end(_kept.pop())


def _end(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator, then the threads that feed its queues.

    Of an iterator that is let go sooner, both the thread and the collector close the same pipes, and the second close
    can hit a file that was opened in between.
    """
    if hasattr(iterator, "_shutdown_workers"):
        with suppress(RuntimeError):  # torch's, of a spawned worker that aborts when it must end while it sends
            iterator._shutdown_workers()
        for queue in iterator._index_queues:
            if queue._thread is not None:
                queue._thread.join(10)
