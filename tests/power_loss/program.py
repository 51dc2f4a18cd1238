"""What every program of this folder is, and what makes and checks the runs of them."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptkit.format.keys import ROOT_KEY, step_folder
from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.catalogue import committed_steps
from tests.ckptkit.support.small_steps import restored_value, save_ranks
from threefold.errors import UserError
from threefold.storage import Storage, open_storage
from tools.power_loss.calls import ACKNOWLEDGED, HOST

LAYOUT = ParallelLayout(tp=2)
ONE_BY_ONE = threading.Lock()
LOADED: dict[tuple[int, ParallelLayout, bytes], int] = {}  # the values of steps that were whole, by their content


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

    With `is_repeatable` the same work, or what is done `again` instead, must end after a loss of power as if there had
    been none, but for what a prune of `runs` removes. Promises are read in no order.
    """

    work: Callable[[Path], object]
    fault_of: Callable[[Path, Sequence[str]], str]
    begin: Callable[[Path], object] = lambda _: None
    promised: tuple[str, ...] = ()  # before it begins
    is_repeatable: bool = True
    again: Callable[[Path], object] | None = None
    runs: tuple[str, ...] = ()


def saved(*steps: int, then: Callable[[Path], object] = lambda _: None) -> Callable[[Path], None]:
    """Return what makes a run of committed steps."""

    def begin(folder: Path) -> None:
        for step in steps:
            save_ranks(open_storage(str(folder / "run")), step, "a", LAYOUT, step)
        then(folder)

    return begin


def content_of(step: Path) -> bytes:
    """Return the digest of a step's files on a disk: its root's, and those of the attempt that the root names.

    A load reads no others. Of a step elsewhere, or without a root that can be read, return nothing.
    """
    try:
        root = (step / ROOT_KEY).read_bytes() if isinstance(step, Path) else b""
        attempt = str(step / json.loads(root)["attempt"])
    except (OSError, ValueError, KeyError):
        return b""
    names = os.listdir(attempt) if os.path.isdir(attempt) else []
    digest = hashlib.blake2b(root)
    for file in sorted(f"{attempt}/{name}" for name in names if not name.startswith(".")):
        content = Path(file).read_bytes()
        digest.update(f"{file.removeprefix(attempt)} {len(content)} ".encode() + content)
    return digest.digest()


def value_of(storage: Storage, step: int, layout: ParallelLayout, content: bytes) -> int:
    """Return the value that a step loads as; of one that was whole with the same content it is known."""
    key = step, layout, content
    value = LOADED.get(key) if content else None
    if value is None:
        value = LOADED[key] = restored_value(storage, step, layout)
    return value


def step_fault(folder: Path, promises: Sequence[str], run: str = "run", layout: ParallelLayout = LAYOUT) -> str:
    """Return what is wrong with the steps of a run: one that is committed and not whole, or a broken promise."""
    storage = open_storage(str(folder / run))
    steps = committed_steps(storage) if (folder / run).exists() else []
    sure = {int(text.split()[1]) for text in promises if text.startswith("whole")}
    removed = {int(text.split()[1]) for text in promises if text.startswith("gone")}
    for step in sorted(sure | set(steps)):
        try:
            value = value_of(storage, step, layout, content_of(folder / run / step_folder(step)))
        except (UserError, AssertionError) as error:
            return f"step {step} {'was promised' if step in sure else 'is committed'}: {type(error).__name__}"
        if value != step:
            return f"step {step} has the values of step {value}"
    return "".join(f"step {step} came back" for step in removed & set(steps))
