"""NodeExchange: the processes of one host exchange bytes through memory, without torch and without /dev/shm.

They meet at a Unix socket in the abstract namespace, named by a job id: rank 0 listens, the others connect. Each hands
a memfd to all others (containers cap /dev/shm at 64 MB); a rank's bytes lie in its own memfd, and over the sockets go
only their sizes. Whoever is awaited longer than the deadline, or is gone, is named on every rank, and no call hangs.
Memory: what a rank sends in its largest call.
"""

import contextlib
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from typing import NoReturn

import numpy as np

from threefold.closing import Closing
from threefold.errors import StorageError, UserError
from threefold.storage import Buffer

MAX_RANKS = 250  # descriptors that one message can carry
RETRY_AFTER_S = 0.02
GRACE_S = 5.0  # that others wait longer than rank 0 does, which knows who is missing
_FRAME = struct.Struct("<?Q")  # whether the sender gave up, bytes that follow
_HELLO = struct.Struct("<qq")
_CREDENTIALS = struct.Struct("iII")


class NodeExchange(Closing):
    """One of `size` processes of a host; all name the same `job`, which no other job there has. Use it in a `with`."""

    def __init__(self, rank: int, size: int, job: str, *, deadline_s: float = 600.0) -> None:
        """Meet the others; StorageError names those that did not come within the deadline."""
        assert 0 <= rank < size, f"rank {rank} of {size}"
        if size > MAX_RANKS:
            raise UserError(f"{size} ranks cannot restore through one node's memory, at most {MAX_RANKS}")
        self.rank, self.size = rank, size
        self._deadline_s = deadline_s
        self._name = f"\0threefold-{os.getuid()}-{job}"
        self._broken = ""
        self._sockets: dict[int, socket.socket] = {}
        self._memory = [_Memory(os.memfd_create("ckptkit-exchange", os.MFD_CLOEXEC))]
        try:
            if rank == 0:
                self._gather_ranks()
            else:
                self._join_rank_0()
        except BaseException:
            self.close()
            raise

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in their order."""
        sizes = self._publish([data], [len(data)])
        return [bytes(self._memory[rank].view(0, size)) for rank, (size,) in enumerate(sizes)]

    def all_to_all(self, send: Sequence[Buffer]) -> list[Buffer]:
        """Give send[r] to each rank r; returns what each rank sent to this one, valid until the next call."""
        assert len(send) == self.size, "something for every rank"
        sizes = self._publish(send, [memoryview(buffer).nbytes for buffer in send])
        return [self._memory[rank].view(sum(given[: self.rank]), given[self.rank]) for rank, given in enumerate(sizes)]

    def close(self) -> None:
        """Let go of sockets and memory."""
        for connection in self._sockets.values():
            connection.close()
        for memory in self._memory:
            memory.close()
        self._sockets, self._memory = {}, []
        self._broken = self._broken or "it was closed"

    def _publish(self, buffers: Iterable[Buffer], sizes: list[int]) -> list[list[int]]:
        """Put buffers one after the other into this rank's memory; return the sizes that every rank has put."""
        self._sync([])  # nobody reads any more what the last call gave
        own = self._memory[self.rank]
        try:
            own.grow(sum(sizes))
        except OSError as error:
            self._give_up(f"rank {self.rank} has no memory for {sum(sizes)} bytes: {error.strerror}")
        at = 0
        for buffer, size in zip(buffers, sizes, strict=True):
            own.view(at, size)[:] = memoryview(buffer).cast("B")
            at += size
        given = self._sync(sizes)
        for memory, sizes_there in zip(self._memory, given, strict=True):
            memory.map(sum(sizes_there))
        return given

    def _sync(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of every rank; they come and go through rank 0."""
        if self._broken:
            raise StorageError(f"the ranks of this node cannot restore together any more: {self._broken}")
        deadline = time.monotonic() + self._deadline_s
        own = np.array(numbers, np.int64).tobytes()
        if self.rank:
            try:
                with contextlib.suppress(OSError):  # where rank 0 is gone it may have said why
                    _send(self._sockets[0], own)
                answer = _receive(self._sockets[0], deadline + GRACE_S)
            except (TimeoutError, OSError) as error:
                self._give_up(_why_no_answer([0], error, self._deadline_s, self.size))
        else:
            answer = b"".join([own, *self._received(deadline)])
            for other in self._sockets.values():
                with contextlib.suppress(OSError):  # who is gone is noticed by the next call
                    _send(other, answer)
        return [list(map(int, row)) for row in np.frombuffer(answer, np.int64).reshape(self.size, -1)]

    def _received(self, deadline: float) -> list[bytes]:
        """Return what every other rank sent to rank 0."""
        frames, late = [], []
        for rank, other in sorted(self._sockets.items()):
            try:
                frames.append(_receive(other, deadline))
            except TimeoutError:
                late.append(rank)
            except OSError as error:
                self._give_up(_why_no_answer([rank], error, self._deadline_s, self.size))
        if late:
            self._give_up(_why_no_answer(late, TimeoutError(), self._deadline_s, self.size))
        return frames

    def _give_up(self, why: str) -> NoReturn:
        """End this exchange for all ranks; the others send word to rank 0, which passes it on."""
        self._broken = why
        for other in self._sockets.values():
            with contextlib.suppress(OSError):
                _send(other, why.encode(), gave_up=True)
        raise StorageError(f"restoring together on one node failed: {why}")

    def _gather_ranks(self) -> None:
        deadline = time.monotonic() + self._deadline_s
        descriptors = {0: self._memory[0].fd}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(self._name)
            except OSError as error:
                raise StorageError(f"another process of this host holds the socket @{self._name[1:]}") from error
            listener.listen(self.size)
            while len(descriptors) < self.size:
                try:
                    listener.settimeout(max(deadline - time.monotonic(), 0.001))
                    other, _ = listener.accept()
                    rank, descriptor = self._welcome(other, deadline)
                except TimeoutError as error:
                    missing = [rank for rank in range(self.size) if rank not in descriptors]
                    self._give_up(_why_no_answer(missing, error, self._deadline_s, self.size))
                except OSError as error:
                    self._give_up(f"rank 0 cannot let the others join: {error}")
                self._sockets[rank], descriptors[rank] = other, descriptor
        self._memory += [_Memory(descriptors[rank]) for rank in range(1, self.size)]
        for rank, other in self._sockets.items():
            try:
                _send(other, b"")
                socket.send_fds(other, [b"m"], [memory.fd for memory in self._memory])
            except OSError as error:
                self._give_up(_why_no_answer([rank], error, self._deadline_s, self.size))

    def _welcome(self, other: socket.socket, deadline: float) -> tuple[int, int]:
        """Return the rank and the memory of a process that connected."""
        other.settimeout(max(deadline - time.monotonic(), 0.001))
        user = _user_of(other)
        hello, descriptors, _, _ = socket.recv_fds(other, _HELLO.size, 1)
        rank, size = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, -1)
        fits = user == os.getuid() and size == self.size and 0 < rank < size and rank not in self._sockets
        if not fits or len(descriptors) != 1:
            self._give_up(f"a process of user {user} came as rank {rank} of {size}, among {self.size}")
        return rank, descriptors[0]

    def _join_rank_0(self) -> None:
        deadline = time.monotonic() + self._deadline_s
        rank_0 = self._sockets[0] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        while True:
            try:
                rank_0.connect(self._name)
                break
            except ConnectionRefusedError as error:  # rank 0 is not there yet
                if time.monotonic() > deadline:
                    self._give_up(_why_no_answer([0], error, self._deadline_s, self.size))
                time.sleep(RETRY_AFTER_S)
        if _user_of(rank_0) != os.getuid():
            self._give_up(f"a process of user {_user_of(rank_0)} holds the socket @{self._name[1:]}")
        try:
            socket.send_fds(rank_0, [_HELLO.pack(self.rank, self.size)], [self._memory[0].fd])
            _receive(rank_0, deadline + GRACE_S)
            _, descriptors, _, _ = socket.recv_fds(rank_0, 1, self.size)
        except (TimeoutError, OSError) as error:
            self._give_up(_why_no_answer([0], error, self._deadline_s, self.size))
        self._memory[0].close()
        self._memory = [_Memory(descriptor) for descriptor in descriptors]
        if len(descriptors) != self.size:
            self._give_up(f"rank {self.rank} may have no {self.size} more files open (ulimit -n)")


class _GaveUp(OSError):
    """Rank 0 says why the exchange is over."""


class _Memory:
    """The memfd of one rank, mapped as far as it was needed."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._mapped = np.empty(0, np.uint8)

    def grow(self, size: int) -> None:
        """Make room for `size` bytes: for the rank whose memory it is."""
        if size > len(self._mapped):
            os.posix_fallocate(self.fd, 0, size)  # memory that is short is an error here, not a signal later
            self.map(size)

    def map(self, size: int) -> None:
        """Map at least `size` bytes, which are there."""
        if size > len(self._mapped):
            self._mapped = np.frombuffer(mmap.mmap(self.fd, os.fstat(self.fd).st_size), np.uint8)

    def view(self, offset: int, size: int) -> memoryview:
        """Return bytes [offset, offset + size), not copied."""
        return self._mapped[offset : offset + size].data

    def close(self) -> None:
        self._mapped = np.empty(0, np.uint8)
        os.close(self.fd)


def _user_of(peer: socket.socket) -> int:
    """Return the user whose process is at the other end."""
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _send(to: socket.socket, data: bytes, *, gave_up: bool = False) -> None:
    to.sendall(_FRAME.pack(gave_up, len(data)) + data)


def _receive(source: socket.socket, deadline: float) -> bytes:
    """Return one frame; TimeoutError past the deadline, ConnectionError where the other side is gone."""
    gave_up, size = _FRAME.unpack(_receive_bytes(source, _FRAME.size, deadline))
    data = _receive_bytes(source, size, deadline)
    if gave_up:
        raise _GaveUp(data.decode())
    return data


def _receive_bytes(source: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        source.settimeout(max(deadline - time.monotonic(), 0.001))
        part = source.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    return data


def _why_no_answer(ranks: Sequence[int], error: OSError, deadline_s: float, size: int) -> str:
    if isinstance(error, _GaveUp):
        return str(error)
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {size}"
    if isinstance(error, TimeoutError | ConnectionRefusedError):
        return f"nothing came within {deadline_s:g} s from {named}"
    return f"{named} {'are' if len(ranks) > 1 else 'is'} gone"
