"""Shared by the tests of saving and restoring: pieces of a small model on any layout, ranks in processes, faults."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from ckptkit.format.keys import ROOT_KEY
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Piece, TensorInfo
from ckptkit.runs.catalogue import committed_steps
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions, SaveReport
from tests.ckptkit.support.model_tables import NUMPY, gpt_tensors, rank_chunks, values
from tests.support.checks import require
from threefold.errors import CheckFailed
from threefold.storage import open_storage

ROOT = Path(__file__).parents[3]
NUM_LAYERS = 3
ONE = ParallelLayout()


def pieces_of(
    tensors: list[TensorInfo], layout: ParallelLayout, rank: int, arrays: dict[str, np.ndarray] | None = None,
    make: Callable[[np.ndarray], Any] = np.copy,
) -> list[Piece]:  # fmt: skip
    """What a rank holds, from whole arrays, or zeros where there are none; `make` turns each range into its memory."""
    pieces = []
    for info, box, start, stop in rank_chunks(tensors, NUM_LAYERS, layout, layout.coords(rank)):
        if arrays is None:
            flat = np.zeros(stop - start, NUMPY[info.dtype])
        else:
            cut = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
            flat = arrays[info.name][cut].reshape(-1)[start:stop]
        pieces.append(Piece(info.name, box, start, stop, make(flat)))
    return pieces


def save_one(
    checkpointer: Checkpointer, step: int, tensors: list[TensorInfo], layout: ParallelLayout = ONE, rank: int = 0,
    scale: int = 1, **metadata: object,
) -> float:  # fmt: skip
    """Save the values of a table, times `scale`, as one rank; returns the stall."""
    arrays = {name: (array * scale).astype(array.dtype) for name, array in values(tensors).items()}
    pieces = pieces_of(tensors, layout, rank, arrays)
    return checkpointer.save(
        step, pieces, tensors=tensors, layout=layout, num_layers=NUM_LAYERS, metadata=metadata | {"scale": scale}
    )


def save_whole(
    url: str | Path, step: int, tensors: list[TensorInfo], *, scale: int = 1, attempt: str = "a",
    deadline_s: float = 60.0,
) -> SaveReport:  # fmt: skip
    """Save a table's values from this process as the only rank, and wait; a failure is in the report."""
    with Checkpointer(str(url), attempt=attempt, options=CheckpointerOptions(deadline_s)) as checkpointer:
        save_one(checkpointer, step, tensors, scale=scale)
        return checkpointer.wait()[0]


def assert_restored(pieces: Sequence[Piece], expected: Sequence[Piece]) -> None:
    """Bit for bit."""
    for piece, want in zip(pieces, expected, strict=True):
        require(np.asarray(piece.data).tobytes() == np.asarray(want.data).tobytes(), piece.name)


def assert_holds(url: str | Path, step: int, tensors: list[TensorInfo], scale: int = 1) -> None:
    """The committed step holds the values of the table, times `scale`."""
    from ckptkit.loading.restore import restore

    pieces = pieces_of(tensors, ONE, 0)
    arrays = {name: (array * scale).astype(array.dtype) for name, array in values(tensors).items()}
    root = restore(str(url), step, pieces, tensors=tensors)
    require(root.metadata["scale"] == scale, f"step {step} holds scale {root.metadata['scale']}, not {scale}")
    assert_restored(pieces, pieces_of(tensors, ONE, 0, arrays))


def newest_good(url: str | Path, tensors: list[TensorInfo]) -> int:
    """The step that a restart gets: the newest committed one that is not damaged; it must hold step times the values.

    Wrong values fail the test: damage has to be found, not restored.
    """
    for step in reversed(committed_steps(open_storage(url))):
        try:
            assert_holds(url, step, tensors, scale=step)
        except CheckFailed:
            continue
        return step
    raise AssertionError(f"{url} holds no sound step")


def remove_remains(run: Path) -> None:
    """Delete what failed saves left in a run, the folders of steps that are not committed."""
    for folder in run.iterdir():
        if not (folder / ROOT_KEY).exists():
            shutil.rmtree(folder)


def start_rank(
    url: str, *arguments: object, under: Sequence[str] = (), group: int | None = None
) -> subprocess.Popen[str]:
    """Start `rank_program` beside this file, a trainer of one rank, in its own process; `under` is put before it.

    `group` is the process group it joins, 0 for a new one.
    """
    command = [*under, sys.executable, "-m", "tests.ckptkit.support.rank_program", url, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, process_group=group)


def wait_until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Wait until something holds that another process brings about."""
    deadline = time.monotonic() + within_s
    while not condition():
        require(time.monotonic() < deadline, "it did not come about")
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def strace(*inject: str) -> list[str]:
    """The command that runs another under strace with faults injected into its system calls."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    return ["strace", "-f", "-qq", "-o", os.devnull, *(word for each in inject for word in ("-e", f"inject={each}"))]


class Injection:
    """Faults in the system calls of a running process, such as `fsync:error=EIO:when=2`, while in the `with`.

    Calls are counted from its begin, those of each thread apart. Afterwards `is_met` tells whether any fault came.
    """

    def __init__(self, pid: int, inject: str) -> None:
        if shutil.which("strace") is None:
            pytest.skip("strace is not installed")
        self.is_met = False
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115  # closed with the process
        trace = f"trace={inject.partition(':')[0]}"
        command = ["strace", "-f", "-o", self._log.name, "-e", trace, "-e", f"inject={inject}", "-p", str(pid)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        said = self._process.stderr.readline()
        if "attached" not in said:
            self.__exit__()
            if "not permitted" in said:
                pytest.skip("strace may not attach to a process here")
            raise AssertionError(said)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=5)
        except subprocess.TimeoutExpired:  # strace may wait for ever for what was killed under it
            self._process.kill()
            self._process.communicate()
        log = self._log.read()
        self.is_met = b"(INJECTED)" in log or b"+++ killed by SIGKILL +++" in log
        self._log.close()


SMALL = gpt_tensors()
