"""The rendezvous of a job's processes: one store that all of them reach, and one sentence about a start that fails.

Each rank notes that it is there, so that those who wait can name who is not.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from threefold.errors import StorageError, UserError
from trainer.job.roll_call import RollCall, name_of

RESOLVE_WITHIN_S = 60.0  # a new node's name may be known only after a while
ANSWERS_WITHIN_S = 2.0  # beyond the time that torch has
ALL_HERE, NUM_HERE = "all are here", "ranks here"
MOST_NAMED = 8
LOOKS_EVERY_S = 0.1  # at most: the last rank that comes is waited for


class Board:
    """Notes by key; one that cannot be left or read is as if it were not there. Any thread may use it."""

    def __init__(self, store: Store | None) -> None:
        """Use the store of a job; a process alone has none, and nobody to leave notes for."""
        self._store = store

    def post(self, key: str, text: str) -> None:
        """Leave a note, in place of one under the same key."""
        with suppress(RuntimeError):  # the process that has the store is gone
            if self._store is not None:
                self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """Return a note that is there; does not wait for one."""
        with suppress(RuntimeError):
            if self._store is not None and self._store.check([key]):
                return self._store.get(key).decode()
        return None

    def claim(self, key: str) -> bool:
        """Return whether this is the first call with a key; True if that cannot be known."""
        with suppress(RuntimeError):
            return self._store is None or bool(self._store.add(key, 1) == 1)
        return True


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where ranks meet, by the variables that launchers set, and who meets; a name and no resolved address."""

    rank: int
    world_size: int
    host: str
    port: int
    timeout_s: float
    is_hosted: bool  # by torchrun's agent, whose store outlives the ranks; else rank 0 is the host

    @classmethod
    def of_environment(cls, rank: int, world_size: int, timeout_s: float) -> "Rendezvous":
        """Read MASTER_ADDR and MASTER_PORT; UserError if one of them is missing or is not what it should be."""
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if not host or not (port.isdecimal() and 0 < int(port) < 1 << 16):
            export = f"export MASTER_ADDR={socket.gethostname()} MASTER_PORT=29500 on all ranks"
            raise UserError(
                f"rank {rank} of {world_size}: MASTER_ADDR is {host!r} and MASTER_PORT {port!r}",
                hint=f"trainer launch sets both; or {export}",
            )
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(rank, world_size, host, int(port), timeout_s, is_hosted)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def join(self, backend: str) -> Board:
        """Join the process group of all ranks; return the job's board. StorageError if that fails or takes too long."""
        timeout = timedelta(seconds=self.timeout_s)
        if unknown := last_error(self._look_up, min(RESOLVE_WITHIN_S, self.timeout_s), pause_s=0.5):
            hint = f"getent hosts {self.host}; MASTER_ADDR is the host of rank 0, or its address"
            self._raise(f"MASTER_ADDR {self.host} has no address: {unknown.strerror}", hint, unknown)
        # torch would print the frames of each try to connect that fails
        if not self._is_host and (silent := last_error(self._connect, self.timeout_s, pause_s=0.05)):
            self._raise(
                f"nobody answers at {self.address} within {self.timeout_s:g} s: {silent.strerror or silent}",
                f"is rank 0 there, and its port open to this host? nc -vz {self.host} {self.port}",
                silent,
            )
        try:
            store = opened_within(
                lambda: TCPStore(
                    self.host, self.port, self.world_size, is_master=self._is_host, timeout=timeout,
                    wait_for_workers=False, multi_tenant=self._is_host,
                ),
                self.timeout_s,
            )  # fmt: skip
        except RuntimeError as error:
            self._refuse(error)
        job = self._await_all(store)
        try:
            dist.init_process_group(
                backend, store=PrefixStore("group", job), rank=self.rank,
                world_size=self.world_size, timeout=timeout,
            )  # fmt: skip
        except RuntimeError as error:
            self._raise(
                f"all ranks are there, but cannot be connected: {_first_line(error)}",
                "GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0, the network card that the nodes share; ip -br addr",
                error,
            )
        return Board(job)

    @property
    def _is_host(self) -> bool:
        return self.rank == 0 and not self.is_hosted

    def _look_up(self, _left_s: float) -> None:
        socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)

    def _connect(self, left_s: float) -> None:
        socket.create_connection((self.host, self.port), timeout=max(left_s, 0.1)).close()

    def _await_all(self, store: Store) -> Store:
        """Return the part of the store that this start of the job has, once all ranks are there."""
        own: Store | None = None
        try:
            call = RollCall(store, self.rank, self.world_size)
            deadline, pause_s = time.monotonic() + self.timeout_s, 0.01
            while True:  # `wait` holds the store, and prints its own story
                if own is None and (start := call.start()):
                    own = PrefixStore(f"trainer/{start}", store)
                    own.set(f"rank {self.rank}", socket.gethostname())
                    if own.add(NUM_HERE, 1) == self.world_size:
                        own.set(ALL_HERE, "")
                call.answer()
                if own is not None and own.check([ALL_HERE]):
                    return own
                if time.monotonic() >= deadline:
                    raise RuntimeError("not all ranks came")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LOOKS_EVERY_S)
        except RuntimeError as error:
            board = Board(own)
            absent = [rank for rank in range(self.world_size) if board.read(f"rank {rank}") is None]
            if own is None and Board(store).read(name_of(self.rank)) is not None:
                absent = [0]  # who alone knows of the others
            if not absent or self.rank in absent:
                self._raise(f"the place to meet, {self.address}, is gone: {_first_line(error)}", _LOOK, error)
            shown = ", ".join(map(str, absent[:MOST_NAMED])) + (" ..." if len(absent) > MOST_NAMED else "")
            self._raise(
                f"rank{'s' if len(absent) > 1 else ''} {shown} did not come to {self.address} within "
                f"{self.timeout_s:g} s",
                "their logs say why, if they were started; else start them, or ask for fewer ranks. "
                "--parallel.timeout-s waits longer",
                error,
            )

    def _refuse(self, error: RuntimeError) -> NoReturn:
        text = str(error)
        if "EADDRINUSE" in text or "address already in use" in text:
            self._raise(
                f"port {self.port} of this host is in use by another program",
                f"MASTER_PORT={self.port % 65535 + 1} on all ranks; ss -ltnp 'sport = :{self.port}' names the program",
                error,
            )
        if self._is_host:
            self._raise(
                f"cannot listen on {self.address}: {_first_line(error)}",
                f"MASTER_ADDR={socket.gethostname()} on all ranks, if rank 0 is here",
                error,
            )
        self._raise(f"{self.address} does not answer as the place to meet: {_first_line(error)}", _LOOK, error)

    def _raise(self, what: str, hint: str, cause: Exception) -> NoReturn:
        raise StorageError(f"rank {self.rank} of {self.world_size}: {what}", hint=hint) from cause


def last_error(action: Callable[[float], None], within_s: float, *, pause_s: float) -> OSError | None:
    """Repeat an action, which takes the seconds left, until it succeeds; return its error if time is over before."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            action(deadline - time.monotonic())
            return None
        except OSError as error:
            if time.monotonic() + pause_s >= deadline:
                return error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)


def opened_within(open_store: Callable[[], TCPStore], timeout_s: float) -> TCPStore:
    """Return the store that a call opens; RuntimeError if that takes longer than `timeout_s` and a little more.

    torch itself waits without an end for an answer of a program that has none.
    """
    stores: list[TCPStore] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            stores.append(open_store())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="open-store", daemon=True)
    thread.start()
    thread.join(timeout_s + ANSWERS_WITHIN_S)
    if errors:
        raise errors[0]
    if not stores:
        raise RuntimeError(f"no answer within {timeout_s:g} s")
    return stores[0]


_LOOK = "what ended rank 0, or the launcher that hosts it, is in its log; start all ranks again"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].removeprefix("[c10d] ")
