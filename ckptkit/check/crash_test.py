"""Crash test: what a place does with races, kills, reads and listings, tried there by the code that saves.

Trials write below one new folder of the place, which is removed at the end. Processes of this machine alone take part,
and none can cut the power.
"""

import contextlib
import os
import random
import secrets
import select
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import IO

import numpy as np

from ckptkit.check.crash_child import LOST, READY, SAVED, SAVING, WON, Order, pieces, table, values_of
from ckptkit.format.address import open_address
from ckptkit.loading.restore import restore
from ckptkit.runs.catalogue import committed_steps, missing_place
from ckptkit.runs.pruning import prune
from ckptkit.runs.retention import Retention
from threefold.child_python import python_command, search_path
from threefold.closing import Closing
from threefold.errors import CheckFailed, UserError, quoted
from threefold.storage import Storage, TemporaryFailure, is_local, local_root, open_storage, trials
from threefold.storage.file_systems import mount_of
from threefold.storage.fsspec import FsspecStorage
from threefold.storage.local import keep_file
from threefold.storage.stale_uploads import abort_stale_uploads

PROVED = "what each line says, of the processes of this machine and of this moment"
NOT_PROVED = (
    "a loss of power, which no program can cut: a disk that acknowledges a flush and does not do it is not found",
    "writers and readers on two machines at once",
    "what the place does under another load, or after its next change",
)
MIB = trials.MIB
BLOCK_BYTES, NUM_SMALL, NUM_FLUSHES = 8 * MIB, 50, 16
HEAD_START_S, ANSWER_WITHIN_S = 0.02, 600.0
MEMORY = ("tmpfs", "ramfs")
NO_BARRIER = ("nobarrier", "barrier=0")
ANY_AGE_S = -86_400.0  # also what another clock says is of tomorrow


@dataclass(frozen=True)
class Outcome:
    """How one trial ended: what was looked at, or what is wrong and what to do about it."""

    name: str
    ok: bool
    what: str
    hint: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Effort:
    """How often things are tried: races of two processes, kills of a save, and the bytes of a step."""

    num_races: int = 20
    num_kills: int = 8
    size_bytes: int = 16 * MIB


def crash_test(url: str, effort: Effort | None = None) -> Iterator[Outcome]:
    """Try a place, and yield how each trial ended; UserError or StorageError if nothing can be written there."""
    place, effort = _fresh_place(url), effort or Effort()
    steps: dict[str, Callable[[Storage], str | tuple[str, dict[str, float]]]] = {
        "read after write": trials.shows_each_write,
        "list after write": trials.lists_what_is_there,
        "whole or absent": trials.shows_no_part_of_a_write,
        "reads beside a write": trials.shows_one_value_or_the_other,
        "written once": trials.writes_once,
        "races": partial(_races, num_races=effort.num_races),
        "clock": trials.keeps_time,
        "kills": partial(_kills, num_kills=effort.num_kills, size_bytes=effort.size_bytes),
        "rates": partial(_rates, size_bytes=effort.size_bytes),
    }
    if is_local(place):
        steps["flushes"] = _flushes
    try:
        for number, (name, trial) in enumerate(steps.items()):
            yield _outcome(name, partial(trial, open_storage(f"{place.address}/{number}")))
    except BaseException:
        with contextlib.suppress(UserError):  # the failure that led here is the one to report
            _remove(place)
        raise
    yield _outcome("removed", lambda: _remove(place))


def _outcome(name: str, trial: Callable[[], str | tuple[str, dict[str, float]]]) -> Outcome:
    try:
        done = trial()
    except TemporaryFailure:
        raise
    except UserError as fault:
        return Outcome(name, False, fault.message, fault.hint)
    what, figures = (done, {}) if isinstance(done, str) else done
    return Outcome(name, True, what, figures=figures)


def _fresh_place(url: str) -> Storage:
    """Return the storage of a new folder of a place, into which something was written."""
    storage, step = open_address(url)
    if step is not None:
        raise UserError(f"{url} is one step, runs are saved to what is tried", hint=quoted(storage.url))
    if storage.url.startswith("memory:"):
        raise UserError(f"{url} is memory of one process, which no other shares", hint="choose a folder or a bucket")
    root = local_root(storage)
    if root is not None and (fault := missing_place(storage)):
        raise UserError(fault, hint=None if root.exists() else f"mkdir -p {quoted(root)}")
    place = open_storage(f"{storage.address}/crash-test-{secrets.token_hex(4)}")
    try:
        place.write("probe", b"x")
        place.delete(["probe"])
    except BaseException:
        if is_local(place):
            _remove(place)
        raise
    return place


def _remove(place: Storage) -> str:
    """Remove all that was written to a place; say how much that was."""
    root = local_root(place)
    if root is not None:
        num_files = sum(len(names) for _, _, names in os.walk(root))
        shutil.rmtree(root, ignore_errors=True)
        is_left = root.exists()
    else:
        keys = list(place.list_keys())
        num_files = len(keys)
        if isinstance(place, FsspecStorage):
            place.clear()
        else:
            place.delete(keys)
        is_left = any(place.list_keys())
    if is_left:
        raise CheckFailed(f"files are left in {place.url}", hint=f"remove it: {place.url}")
    uploads = abort_stale_uploads(place, older_than_s=ANY_AGE_S)
    aborted = f" and {len(uploads)} unfinished uploads" if uploads else ""
    return f"{num_files} files{aborted}; nothing is left of this test"


class _Child(Closing):
    """Another process that does an Order."""

    def __init__(self, order: Order) -> None:
        command, pipe = python_command("ckptkit.check.crash_child"), subprocess.PIPE
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(search_path())}
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, env=environment)
        self._pending = b""
        self.send(order.encode())

    @property
    def _output(self) -> IO[bytes]:
        assert self._process.stdout is not None, "a pipe"
        return self._process.stdout

    def send(self, line: str) -> None:
        """Send the process a line."""
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(line.encode())

    def receive(self) -> str:
        """Return its next line; CheckFailed if that is a failure, or none comes."""
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._output], [], [], ANSWER_WITHIN_S)
            data = os.read(self._output.fileno(), 1 << 16) if ready else b""
            if not data:
                how = "ended" if ready else f"did not answer within {ANSWER_WITHIN_S:.0f} s"
                raise CheckFailed(f"a process of the crash test {how}")
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        text = line.decode()
        if text.startswith("failed: "):
            raise CheckFailed(text.removeprefix("failed: "))
        return text

    def kill(self) -> list[str]:
        """Kill it, and return the lines that it had sent and nobody received."""
        self._process.kill()
        self._process.wait()
        return (self._pending + self._output.read()).decode().splitlines()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _races(place: Storage, num_races: int) -> str:
    """Let two processes write a key if absent at one moment, many times."""
    if not place.supports_if_absent:
        text = "this kind of storage cannot write once and only once: of two jobs that save one step both may commit"
        raise CheckFailed(text, hint=trials.ONE_WRITER)
    wins = 0
    with _Child(Order(place.address, "first")) as first, _Child(Order(place.address, "second")) as second:
        racers = {b"first": first, b"second": second}
        for racer in racers.values():
            word = racer.receive()
            assert word == READY, f"a racer said {word!r}, not that it is ready"
        for number in range(num_races):
            line = f"race-{number} {time.monotonic() + HEAD_START_S}\n"
            for racer in racers.values():
                racer.send(line)
            answers = {name: racer.receive() for name, racer in racers.items()}
            assert {*answers.values()} <= {WON, LOST}, f"{answers} are no ends of a race"
            won = [name for name, answer in answers.items() if answer == WON]
            trials.shows_the_winner(place, f"race-{number}", won)
            wins += won == [b"first"]
    return f"{num_races} keys written by two processes at once, one was acknowledged for each ({wins} times the first)"


def _kills(place: Storage, num_kills: int, size_bytes: int) -> str:
    """Kill a process in its saves, each at another moment; what it had acknowledged is there, all else whole or absent.

    The process saves the step that was cut off first, and is killed in the next.
    """
    rng, step, acknowledged, num_cut = random.Random(0), 1, set[int](), 0
    shortest_s = float("inf")
    for number in range(num_kills):
        with _Child(Order(place.address, "", step, size_bytes)) as writer:
            _expect(writer, SAVING, step)
            began = time.monotonic()
            _expect(writer, SAVED, step)
            shortest_s = min(shortest_s, time.monotonic() - began)
            acknowledged.add(step)
            _expect(writer, SAVING, step + 1)
            time.sleep(shortest_s * (number + rng.random()) / num_kills)
            lines = [line.split() for line in writer.kill()]
        acknowledged |= {int(last) for word, last in lines if word == SAVED}
        under_way = max([step + 1, *(int(last) for word, last in lines if word == SAVING)])
        committed = _check_steps(place, acknowledged, step, size_bytes)
        num_cut += under_way not in committed
        step = under_way if under_way not in committed else under_way + 1
    swept = prune(place, Retention(keep_last=2), orphans_older_than_s=ANY_AGE_S)
    committed = _check_steps(place, acknowledged - {*swept.deleted}, 0, size_bytes)
    if {*committed} & {*swept.deleted}:
        raise CheckFailed("a step is there after it was deleted", hint=trials.LATE)
    return (
        f"{num_kills} kills of a save of {size_bytes / MIB:.0f} MiB, {num_cut} before its commit; "
        f"{len(acknowledged)} acknowledged steps load, no other was there in part, each was saved again"
    )


def _expect(writer: _Child, word: str, step: int) -> None:
    line = writer.receive()
    assert line == f"{word} {step}", f"the writer said {line!r}, not {word} {step}"


def _check_steps(place: Storage, acknowledged: set[int], since: int, size_bytes: int) -> list[int]:
    """Return the committed steps; CheckFailed if an acknowledged one is not among them, or one does not load."""
    committed = committed_steps(place)
    if lost := sorted(acknowledged - {*committed}):
        raise CheckFailed(f"step {lost[0]} was acknowledged, and is not there after a kill", hint=trials.LATE)
    for step in committed:
        if step < since:
            continue
        values = np.empty(size_bytes // 4, np.float32)
        restore(place.address, step, pieces(values), tensors=table(size_bytes))
        if not np.array_equal(values, values_of(step, size_bytes)):
            raise CheckFailed(f"step {step} has other values than were saved")
    return committed


def _rates(place: Storage, size_bytes: int) -> tuple[str, dict[str, float]]:
    """Measure large and small writes and reads, durable ones as all are."""
    block = random.Random(0).randbytes(min(BLOCK_BYTES, size_bytes))
    count = max(size_bytes // len(block), 1)
    ranges = [(start * len(block), (start + 1) * len(block)) for start in range(count)]
    write_s = _seconds(lambda: place.write("large", (block for _ in range(count)), size_bytes=count * len(block)))
    keep_file(place, "large")  # so that the disk is read, not this machine's memory
    read_s = _seconds(lambda: place.read_ranges("large", ranges))
    small_write_s = _seconds(lambda: _write_small(place))
    figures = {
        "write_mb_per_s": count * len(block) / 1e6 / write_s,
        "read_mb_per_s": count * len(block) / 1e6 / read_s,
        "small_writes_per_s": NUM_SMALL / small_write_s,
        "listing_s": _seconds(lambda: list(place.list())),
    }
    text = (
        f"{count * len(block) / MIB:.0f} MiB written at {figures['write_mb_per_s']:,.0f} MB/s and read at "
        f"{figures['read_mb_per_s']:,.0f} MB/s; {figures['small_writes_per_s']:,.0f} small writes a second, one after "
        "the other"
    )
    return text, figures


def _write_small(place: Storage) -> None:
    for number in range(NUM_SMALL):
        place.write(f"small/{number}", b"x" * 1024)


def _flushes(place: Storage) -> tuple[str, dict[str, float]]:
    """Measure what a flush takes, and look at what the mount says of flushes."""
    place.write("any", b"x")
    root = local_root(place)
    assert root is not None, "a folder of this machine"
    mount, times = mount_of(root), []
    with (root / "flushed").open("wb", buffering=0) as file:
        for _ in range(NUM_FLUSHES):
            file.write(b"x" * 4096)
            times.append(_seconds(lambda: os.fsync(file.fileno())))
    flush_s = statistics.median(times)
    if ignored := [option for option in NO_BARRIER if option in mount.options]:
        text = f"the file system is mounted with {ignored[0]}: what was flushed may be lost with the power"
        raise CheckFailed(text, hint=f"mount it without {ignored[0]}")
    text = f"a flush of 4 KiB takes {flush_s * 1e3:.3g} ms on {mount.kind or 'an unknown file system'}"
    if mount.kind in MEMORY:
        text += ", which is memory: nothing of it outlives the machine"
    return text, {"flush_s": flush_s}


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return max(time.perf_counter() - began, 1e-9)
