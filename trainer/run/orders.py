"""Orders: work that another thread of the first rank asks of the main threads of all ranks.

A program that calls a model whenever it wants runs on that thread alone; the main threads serve it together. They
wait for each other no longer than for an order, or for the word that there is none yet.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from trainer.job.ranks import Ranks

T = TypeVar("T")
Handlers = Mapping[str, Callable[[Any], Any]]
END = "end"


class Orders(Generic[T]):
    """The orders of one program, which returns a T on the first rank."""

    def __init__(self, ranks: Ranks, *, word_every_s: float = 5.0) -> None:
        """Let ranks wait for each other no longer than so many seconds."""
        self._ranks, self._word_every_s = ranks, word_every_s
        self._orders: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._answers: queue.Queue[Any] = queue.Queue()

    def ask(self, kind: str, what: Any) -> Any:
        """Return what the main threads make of an order, whose content is JSON; for the program's thread."""
        self._orders.put((kind, what))
        return self._answers.get()

    def serve(self, program: Callable[[], T], handlers: Handlers) -> T | None:
        """Run the program on a thread of the first rank, and its orders on all ranks; return what it returned there.

        An error of the program is raised on all ranks.
        """
        results: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(program())
            except Exception as error:
                errors.append(error)
            self._orders.put((END, None))

        if self._ranks.rank == 0:
            threading.Thread(target=run, name="orders", daemon=True).start()
        while True:
            kind, what = self._ranks.broadcast(self._next() if self._ranks.rank == 0 else None)
            if kind == END:
                break
            if kind:
                answer = handlers[kind](what)
                if self._ranks.rank == 0:
                    self._answers.put(answer)
        self._ranks.raise_on_all(errors[0] if errors else None)
        return results[0] if results else None

    def _next(self) -> tuple[str, Any]:
        try:
            return self._orders.get(timeout=self._word_every_s)
        except queue.Empty:
            return "", None
