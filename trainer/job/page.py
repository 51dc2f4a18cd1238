"""RankPage: what one rank does, in a fixed page of shared memory that every process of its host can read.

The rank packs one record of 40 bytes into a ring for each event: an action, a call of a group, a wait. A record is the
whole place, so the newest one says where the rank is. An event takes the host about a microsecond, and neither a system
call nor a lock. A rank that is stopped, or dead, is read as well as one that runs.
"""

import json
import mmap
import os
import secrets
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic_ns
from typing import Any, Protocol

from trainer.job.sight import (
    BEAT_AT,
    CALL_OF,
    COUNT,
    COUNTS,
    ENDS,
    HEAD,
    INFO,
    KIND_OF,
    MAGIC,
    MOST_GROUPS,
    NUM_BYTES,
    NUM_RECORDS,
    PHASE_OF,
    PHASES,
    RECORD,
    RING,
    Sight,
    label_of,
    parse,
)

FOLDER = "TRAINER_PAGES"  # of a node, which our launcher names: it reads the pages of ranks that are gone
MOST_PENDING = 4096  # passes and calls of a GPU: the oldest of more are forgotten


class Mark(Protocol):
    """A moment in the work of a device."""

    @property
    def is_past(self) -> bool: ...


class Calls:
    """The calls of one group on this rank, counted from 1; owned by the thread that makes them."""

    __slots__ = ("_page", "count", "index")

    def __init__(self, page: "RankPage", index: int) -> None:
        self._page, self.index, self.count = page, index, 0

    def begin(self, kind: str, *, waits: bool = False) -> int:
        """Note that this rank begins the next call, and maybe waits in it; return its number."""
        self.count = number = self.count + 1
        self._page.call(self.index, CALL_OF[kind], number, waits=waits)
        return number

    def wait(self, kind: str, number: int) -> None:
        """Note that this rank waits for a call that it began."""
        self._page.wait(self.index, CALL_OF[kind], number)

    def end(self, kind: str = "", number: int = 0, moment: "Mark | None" = None) -> None:
        """Note that it waits no more, and where in the work of its GPU the call ends."""
        self._page.go_on()
        if self._page.pending is not None and moment is not None:
            self._page.pending.append((moment, kind, self.index, number))


class RankPage:
    """The page of this rank; its training thread writes, and a watching thread the beats.

    Where no file can be made it is memory of this process, which nobody else reads.
    """

    def __init__(self, rank: int, world_size: int, *, on_gpu: bool = False) -> None:
        """Make the page in the folder that the launcher names, else where memory is shared, or temporary files are."""
        # passes and calls that a GPU may not have finished, of which the host is ahead, and how many it has
        self.num_past = 0
        self.pending: deque[tuple[Mark, str, int, int]] | None = deque(maxlen=MOST_PENDING) if on_gpu else None
        self.rank, self.world_size, self.path = rank, world_size, ""
        self._buffer = self._open()
        self._number = self.beats = 0
        self._step = self._phase = self._kind = self._stage = self._microbatch = 0
        self._call = self._waits = self._group = self._sequence = 0
        self._info: dict[str, Any] = {"host": socket.gethostname(), "groups": [], "folder": "", "device": ""}
        HEAD.pack_into(self._buffer, 0, MAGIC, rank, world_size, os.getpid(), 0, 0, monotonic_ns())
        self._write_info()
        self._put()

    def _open(self) -> mmap.mmap:
        for folder in (os.environ.get(FOLDER, ""), "/dev/shm", tempfile.gettempdir()):
            if folder and os.path.isdir(folder):
                path = os.path.join(folder, f"trainer-page-{self.rank:05}-{secrets.token_hex(8)}")
                with suppress(OSError):
                    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                    try:
                        os.posix_fallocate(descriptor, 0, NUM_BYTES)  # a page without room would end the process
                        buffer = mmap.mmap(descriptor, NUM_BYTES)
                    except OSError:
                        os.unlink(path)
                        raise
                    finally:
                        os.close(descriptor)
                    self.path = path
                    return buffer
        return mmap.mmap(-1, NUM_BYTES)

    def note(self, step: int, phase: str) -> None:
        """Note a step, counted from 1, and a part of it."""
        self._step, self._phase = step, PHASE_OF[phase]
        self._kind = self._call = self._waits = 0
        self._put()

    def act(self, kind: str, stage: int = 0, microbatch: int = 0) -> None:
        """Note the action that begins, or with "" that none does."""
        self._kind, self._stage, self._microbatch = KIND_OF[kind], stage, microbatch
        self._call = self._waits = 0
        self._put()

    def call(self, group: int, kind: int, number: int, *, waits: bool) -> None:
        """Note a call of a group."""
        self._call, self._waits, self._group, self._sequence = kind, waits, group, number
        COUNT.pack_into(self._buffer, COUNTS + COUNT.size * group, number)
        self._put()

    def wait(self, group: int, kind: int, number: int) -> None:
        """Note a wait for a call."""
        self._call, self._waits, self._group, self._sequence = kind, 1, group, number
        self._put()

    def go_on(self) -> None:
        """Note the end of a wait."""
        self._call = self._waits = 0
        self._put()

    def _put(self) -> None:
        number = self._number = self._number + 1
        RECORD.pack_into(
            self._buffer,
            RING + RECORD.size * (number % NUM_RECORDS),
            number,
            monotonic_ns(),
            self._step,
            self._phase,
            self._kind,
            self._stage,
            self._microbatch,
            self._call,
            self._waits,
            self._group,
            self._sequence,
            number & 0xFFFFFFFF,
        )

    @property
    def number(self) -> int:
        """Return how many events there were."""
        return self._number

    @property
    def step(self) -> int:
        """Return the step that this rank is in."""
        return self._step

    @property
    def phase(self) -> str:
        """Return the part of the step."""
        return PHASES[self._phase]

    @property
    def waits(self) -> bool:
        """Return whether this rank waits: for others in a call, or for its device."""
        return bool(self._waits) or PHASES[self._phase] == "waits for its device"

    def group(self, name: str, ranks: Sequence[int]) -> Calls:
        """Return the calls of a group of ranks, under a label that is the same on all of them."""
        groups = self._info["groups"]
        index = min(len(groups), MOST_GROUPS - 1)
        groups.append(label_of(name, ranks))
        self._write_info()
        return Calls(self, index)

    def describe(self, *, folder: str | None = None, device: str | None = None) -> None:
        """Note where reports go, and what is known of the device."""
        texts = {name: text for name, text in (("folder", folder), ("device", device)) if text is not None}
        if any(self._info[name] != text for name, text in texts.items()):
            self._info.update(texts)
            self._write_info()

    def mark(self, moment: Mark, kind: str, stage: int, microbatch: int) -> None:
        """Note where in the work of its GPU a pass ends."""
        if self.pending is not None:
            self.pending.append((moment, kind, stage, microbatch))

    def first_pending(self) -> str:
        """Return the first pass or call that the GPU has not finished, if there is one; the watching thread asks.

        `num_past` counts those that it has: a step of many micro-batches takes long, and the host is ahead of it.
        """
        while self.pending:
            moment, kind, place, number = self.pending[0]
            if not moment.is_past and kind in KIND_OF:
                return f"the end of {kind} of stage {place}, micro-batch {number}"
            if not moment.is_past:
                return f"the end of {kind} #{number} of group {self._info['groups'][place]}"
            self.pending.popleft()
            self.num_past += 1
        return ""

    def beat(self) -> None:
        """Note that this rank has made progress; the watching thread alone does."""
        self.beats += 1
        struct.pack_into("<Qq", self._buffer, BEAT_AT, self.beats, monotonic_ns())

    def end(self, how: str) -> None:
        """Note how this rank ended, one of ENDS."""
        COUNT.pack_into(self._buffer, BEAT_AT - COUNT.size, ENDS.index(how))

    def sight(self) -> Sight:
        """Return what others would read."""
        sight = parse(bytes(self._buffer))
        assert sight is not None, "this process wrote it"
        return sight

    def close(self) -> None:
        """Take the file away, unless the launcher does."""
        if self.path and os.path.dirname(self.path) != os.environ.get(FOLDER):
            with suppress(OSError):
                os.unlink(self.path)

    def _write_info(self) -> None:
        data = json.dumps(self._info).encode()
        if len(data) > RING - INFO - COUNT.size:
            data = json.dumps({**self._info, "groups": []}).encode()
        COUNT.pack_into(self._buffer, INFO, 0)
        self._buffer[INFO + COUNT.size : INFO + COUNT.size + len(data)] = data
        COUNT.pack_into(self._buffer, INFO, len(data))
