"""What every program of this folder is, and what makes and checks the runs of them."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.catalogue import committed_steps
from tests.ckptkit.support.small_steps import restored_value, save_ranks
from threefold.errors import UserError
from threefold.storage import open_storage
from tools.power_loss.calls import ACKNOWLEDGED, HOST

LAYOUT = ParallelLayout(tp=2)
ONE_BY_ONE = threading.Lock()


def say(text: str) -> None:
    """Promise something, in a line of its own."""
    with ONE_BY_ONE:
        print(ACKNOWLEDGED.decode() + text, flush=True)


def be_host(name: str) -> None:
    """Let this thread play a host of its own from now on."""
    with open(os.devnull, "wb", buffering=0) as null:
        null.write(HOST + name.encode())


@dataclass(frozen=True)
class Program:
    """What is there before, what is done, and what is wrong with a folder afterwards, given all that was promised.

    With `is_repeatable` the same work, done once more after a loss of power, must end as if there had been none, but
    for what a prune of `runs` removes.
    """

    work: Callable[[Path], object]
    fault_of: Callable[[Path, Sequence[str]], str]
    begin: Callable[[Path], object] = lambda _: None
    promised: tuple[str, ...] = ()  # before it begins
    is_repeatable: bool = True
    runs: tuple[str, ...] = ()


def saved(*steps: int, then: Callable[[Path], object] = lambda _: None) -> Callable[[Path], None]:
    """Return what makes a run of committed steps."""

    def begin(folder: Path) -> None:
        for step in steps:
            save_ranks(open_storage(str(folder / "run")), step, "a", LAYOUT, step)
        then(folder)

    return begin


def step_fault(folder: Path, promises: Sequence[str], run: str = "run", layout: ParallelLayout = LAYOUT) -> str:
    """Return what is wrong with the steps of a run: one that is committed and not whole, or a broken promise."""
    storage = open_storage(str(folder / run))
    steps = committed_steps(storage) if (folder / run).exists() else []
    sure = {int(text.split()[1]) for text in promises if text.startswith("whole")}
    removed = {int(text.split()[1]) for text in promises if text.startswith("gone")}
    for step in sorted(sure | set(steps)):
        try:
            value = restored_value(storage, step, layout)
        except (UserError, AssertionError) as error:
            return f"step {step} {'was promised' if step in sure else 'is committed'}: {type(error).__name__}"
        if value != step:
            return f"step {step} has the values of step {value}"
    return "".join(f"step {step} came back" for step in removed & set(steps))
