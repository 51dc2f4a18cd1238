"""Watch: a thread of each rank that sees when a run makes no progress, and has one report made of it.

Progress is an event in any rank's page, or a rank at work between events: a long compilation, a slow save or a slow
store take processor time, of the rank or of a process that it started. Waiting for others is none. Ranks read the pages
of their host; of each host the first rank that runs posts on the job's board what others need to know. Nothing of a
step waits for this thread, and a rank that is stopped is seen by the others.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.job.page import RankPage
from trainer.job.rendezvous import Board
from trainer.job.sight import Sight, read_beats, read_page
from trainer.job.stall import Stall

BUSY_SHARE = 0.005  # of a processor, over the time without events: less is what threads in the background take
LOOKS, LEAST_EVERY_S, MOST_EVERY_S = 20, 0.05, 2.0  # within the limit
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
WINDOWS = 4  # of work without an event, within the limit
STATES = {
    "T": "stopped (by SIGSTOP)",
    "t": "stopped (by a debugger)",
    "D": "in a system call that does not return (state D)",
    "Z": "gone",
}


@dataclass(frozen=True, slots=True)
class Berth:
    """Where one rank's page is."""

    rank: int
    host: str
    path: str
    pid: int


def this_host() -> str:
    """Return what processes have in common that see each other's pages and processes, with the host's name first."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "mnt")]
    return " ".join(parts)


class Watch:
    """What a rank sees of a job's progress; `on_stall` is called by its thread, on one rank a stall."""

    def __init__(
        self,
        page: RankPage,
        berths: Sequence[Berth],
        board: Board,
        on_stall: Callable[[Stall], None],
        *,
        stall_s: float,
        spins: bool = False,
        on_device: Callable[[], str] = lambda: "",
    ) -> None:
        """Begin to look; `spins` where the host takes processor time while it waits for a full queue of a GPU.

        `on_device` names the first pass or call that the GPU has not finished, if that is known.
        """
        self._page, self._board, self._on_stall, self._stall_s = page, board, on_stall, stall_s
        self._spins, self._on_device = spins, on_device
        here = next(berth.host for berth in berths if berth.rank == page.rank)
        self._local = [berth for berth in berths if berth.host == here]
        self._hosts = list(dict.fromkeys(berth.host for berth in berths))
        self._place = self._hosts.index(here)
        self._every_s = min(max(stall_s / LOOKS, LEAST_EVERY_S), MOST_EVERY_S)
        self._number, self._num_past, self._device, self._work = page.number, 0, "", Toil()
        self._first_step = 0
        self._beats: dict[int, int] = {}
        self._moved_s = time.monotonic()
        self._reported, self._num_posts = False, 0
        self._heard: dict[str, tuple[str, float]] = {}  # of other hosts: what they posted last, and when that changed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_always, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._every_s + 1)

    def stall(self) -> Stall:
        """Return how all ranks stand now, as far as this rank sees."""
        sights = {sight.rank: sight for sight in self._posted().values()}
        sights |= self._local_sights()
        return Stall(sights, self._page.world_size, time.monotonic() - self._moved_s)

    def _look_always(self) -> None:
        while not self._over.wait(self._every_s):
            with suppress(OSError, ValueError, RuntimeError):  # what is not seen now is seen at the next look
                self._look()

    def _look(self) -> None:
        if self._has_moved():
            self._page.beat()
        beats = {berth.rank: read_beats(berth.path) for berth in self._local}
        now_s = time.monotonic()
        if beats != self._beats:
            self._beats, self._moved_s, self._reported = beats, now_s, False
        idle_s = now_s - self._moved_s
        if len(self._hosts) > 1 and self._leads:
            self._post(idle_s)
        if idle_s >= self._stall_s / 2 and not self._reported:
            self._page.describe(device=self._device)
        others_move = any(self._moves(host) for host in self._hosts if idle_s >= self._stall_s / 4)
        # of several hosts the later ones leave the report to the first, unless it does not come
        due_s = self._stall_s + 2 * self._every_s * (self._place + (self._page.rank != self._local[0].rank))
        if self._reported or others_move or idle_s < due_s or not self._leads:
            return
        self._reported = True
        stall = self.stall()
        if self._board.claim(f"stall {stall.step} {sum(self._beats.values()) if len(self._hosts) == 1 else ''}"):
            self._on_stall(stall)

    @property
    def _leads(self) -> bool:
        """Return whether this is the first rank of its host that runs."""
        first = next((berth.rank for berth in self._local if not state_of(berth.pid)), self._page.rank)
        return first == self._page.rank

    def _has_moved(self) -> bool:
        """Return whether this rank has had an event, or worked, since the last time that it had."""
        page, number = self._page, self._page.number
        self._first_step = self._first_step or page.step
        self._device = self._on_device()
        if number != self._number or page.num_past != self._num_past:
            self._number, self._num_past = number, page.num_past
            self._work.stop()
            return True
        if page.waits or (self._spins and page.phase == "trains" and page.step != self._first_step):
            return False
        return self._work.is_done(self._stall_s / WINDOWS)

    def _local_sights(self) -> dict[int, Sight]:
        sights = {}
        for berth in self._local:
            if (sight := read_page(berth.path)) is not None and sight.pid == berth.pid:
                sights[berth.rank] = replace(sight, process=state_of(berth.pid), records=())
        return sights

    def _post(self, idle_s: float) -> None:
        self._num_posts += 1
        sights = self._local_sights().values() if idle_s >= self._stall_s / 4 else ()
        said = {"post": self._num_posts, "idle_s": idle_s, "sights": [sight.to_json() for sight in sights]}
        self._board.post(f"sights {self._place}", json.dumps(said))

    def _moves(self, host: str) -> bool:
        """Return whether another host says that it makes progress; one that says nothing for so long does not."""
        if host == self._hosts[self._place]:
            return False
        post, now_s = self._board.read(f"sights {self._hosts.index(host)}") or "", time.monotonic()
        before, changed_s = self._heard.get(host, ("", now_s))
        if post != before or host not in self._heard:
            self._heard[host] = post, now_s
            changed_s = now_s
        if now_s - changed_s >= self._stall_s / 2:
            return False
        return not post or json.loads(post)["idle_s"] < self._stall_s / 2

    def _posted(self) -> Mapping[int, Sight]:
        posts = [json.loads(said)["sights"] for said, _ in self._heard.values() if said]
        return {values["rank"]: Sight.from_json(values) for post in posts for values in post}


class Toil:
    """Processor time of this process, the calling thread apart, and of those that it started, in windows of time."""

    def __init__(self) -> None:
        self._since_s, self._own_s, self._others = 0.0, 0.0, dict[int, float]()

    def stop(self) -> None:
        """Look no more: the next call of `is_done` begins a window."""
        self._since_s = 0.0

    def is_done(self, window_s: float) -> bool:
        """Return whether, at the end of a window, more of it was spent than threads in the background take."""
        now_s = time.monotonic()
        if self._since_s and now_s - self._since_s < window_s:
            return False
        own_s, others = time.process_time() - time.thread_time(), others_s(os.getpid())
        began_s, self._since_s = self._since_s, now_s
        spent_s = (
            own_s - self._own_s + sum(max(other_s - self._others.get(pid, 0.0), 0.0) for pid, other_s in others.items())
        )
        self._own_s, self._others = own_s, others
        return bool(began_s) and spent_s >= BUSY_SHARE * (now_s - began_s)


def state_of(pid: int) -> str:
    """Return what is unusual about a process of this host, empty if nothing is."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return STATES.get(state, "")


def others_s(pid: int) -> dict[int, float]:
    """Return the processor time of each process that one started, and of those that they did."""
    children: dict[int, list[tuple[int, float]]] = {}
    for entry in os.scandir("/proc"):
        with suppress(OSError, IndexError, ValueError):
            stat = Path(entry.path, "stat").read_text().rpartition(")")[2].split() if entry.name.isdecimal() else []
            spent_s = (int(stat[11]) + int(stat[12])) * TICK_S
            children.setdefault(int(stat[1]), []).append((int(entry.name), spent_s))
    times, parents = dict[int, float](), [pid]
    while parents:
        own = children.get(parents.pop(), [])
        times.update(own)
        parents += [child for child, _ in own]
    return times
