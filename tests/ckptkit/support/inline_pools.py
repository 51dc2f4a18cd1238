"""Pools whose work is done in the caller's thread, so that a program has one thread and repeats itself."""

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class InlinePool:
    """A ThreadPoolExecutor without threads."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "InlinePool":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., T], *arguments: Any) -> "Future[T]":
        future: Future[T] = Future()
        try:
            future.set_result(work(*arguments))
        except BaseException as error:  # handed to the caller, whatever it is
            future.set_exception(error)
        return future

    def map(self, work: Callable[..., T], *items: Iterable[Any]) -> Iterator[T]:
        return iter([work(*each) for each in zip(*items, strict=False)])

    def shutdown(self, **_: object) -> None:
        pass


def inline_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program do all its requests in its own thread, whichever loaded module of ckptkit has a pool for them."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ckptkit.") and vars(module).get("ThreadPoolExecutor") is ThreadPoolExecutor:
            monkeypatch.setattr(module, "ThreadPoolExecutor", InlinePool)
