"""Calls of a class's methods that something comes before, or that end as a kill does."""

from collections.abc import Callable
from typing import Any

import pytest


def interrupted(patch: pytest.MonkeyPatch, owner: type, method: str, act: Callable[[], None]) -> None:
    """Let another machine act just before the next call of a method."""
    usual = getattr(owner, method)

    def call(*args: Any, **options: Any) -> Any:
        patch.setattr(owner, method, usual)
        act()
        return usual(*args, **options)

    patch.setattr(owner, method, call)


class Ends(KeyboardInterrupt):
    """Ends a run, as Ctrl-C does."""


def end_after(patch: pytest.MonkeyPatch, num_calls: int, owner: type, *methods: str) -> list[str]:
    """Let so many calls of methods pass, and raise Ends in each later one; return the names of those that pass."""
    passed: list[str] = []

    def ending(name: str) -> Callable[..., Any]:
        usual = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if len(passed) == num_calls:
                raise Ends
            passed.append(name)
            return usual(*args, **options)

        return call

    for name in methods:
        patch.setattr(owner, name, ending(name))
    return passed
