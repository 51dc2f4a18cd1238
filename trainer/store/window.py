"""Window: optimizer state in host memory, streamed through a ring of buffers on the device, piece by piece.

Pieces come in one order in each step. The first ones are loaded beside the passes. Behind the update of each its new
state goes back, and the piece that takes the same buffer next is loaded behind that. So a piece is loaded behind the
write of the step before: both ways have one lane each, which keeps its order. No step lets the host wait.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.config import Config
from trainer.mesh.mesh import ProcessMesh
from trainer.store.host_memory import locked_zeros, refuse_without_room
from trainer.store.numa import cores_of, node_of

NUM_BUFFERS = 16
ALIGNMENT = 64  # elements: where a part is cut, kernels go on as before
Copies = Sequence[tuple[Tensor, Tensor]]  # to, from
Mark = Any  # a place in what a lane, or the current stream, has to do


class Lanes(Protocol):
    """Two queues of copies beside the arithmetic, "in" to the device and "out" to the host; the host waits in none."""

    def copy(self, lane: str, copies: Copies, after: Mark | None) -> Mark:
        """Enqueue copies behind a mark, and return the mark at their end."""
        ...

    def mark(self) -> Mark:
        """Return the place that the arithmetic has come to."""
        ...

    def wait(self, mark: Mark) -> None:
        """Let the arithmetic that follows begin behind a mark."""
        ...

    def settle(self) -> None:
        """Let the host wait for all copies."""
        ...


class CudaLanes:
    """Lanes that are streams of a GPU; owned by the training thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {lane: torch.cuda.Stream(device) for lane in ("in", "out")}

    def copy(self, lane: str, copies: Copies, after: Mark | None) -> Mark:
        """Enqueue copies behind an event."""
        stream = self._streams[lane]
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            for to, source in copies:
                to.copy_(source, non_blocking=True)
        return stream.record_event()

    def mark(self) -> Mark:
        """Return an event of the current stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, mark: Mark) -> None:
        """Let the current stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def settle(self) -> None:
        """Wait for both streams."""
        for stream in self._streams.values():
            stream.synchronize()


@dataclass(frozen=True, slots=True)
class Streaming:
    """How state in host memory is streamed, in pieces of so many bytes.

    `reserve` is called with the bytes of all of it, before `new_state` makes the memory, of zeros.
    """

    lanes: Lanes
    new_state: Callable[[int, torch.dtype], Tensor]
    piece_bytes: int
    num_buffers: int = NUM_BUFFERS
    reserve: Callable[[int], object] = lambda num_bytes: None


def streaming_of(config: Config, mesh: ProcessMesh, *, with_optimizer: bool) -> Streaming | None:
    """Return how a run streams: a CPU has its state in the host's memory anyway."""
    if not (config.optim.offload and with_optimizer and mesh.device.type == "cuda"):
        return None
    option, less = "optim.offload", "--optim.moments bf16 takes less, and so do more ranks of dp"
    hint = f"{less}; or leave --optimizer-offload out"
    reserve = partial(refuse_without_room, world=mesh.world, device=mesh.device, option=option, hint=hint)
    new_state = partial(locked_zeros, cores=cores_of(node_of(mesh.device)), option=option)
    piece_bytes = (config.optim.offload_window_mib << 20) // NUM_BUFFERS
    return Streaming(CudaLanes(mesh.device), new_state, piece_bytes, reserve=reserve)


class Window:
    """The ring of a rank; owned by the training thread."""

    def __init__(self, pieces: Sequence[Sequence[Tensor]], streaming: Streaming, device: torch.device) -> None:
        """Take the pieces in the order of updates, each some parts of states."""
        self._pieces, self._lanes = pieces, streaming.lanes
        self._num_buffers = min(streaming.num_buffers, len(pieces))
        size = max((sum(map(_padded, parts)) for parts in pieces), default=0)
        self._memory = torch.zeros(self._num_buffers, size, dtype=torch.uint8, device=device)
        self._loaded = list[Mark]([None] * self._num_buffers)
        self._free = list[Mark]([None] * self._num_buffers)
        self.views = [self._views(number) for number in range(len(pieces))]

    @property
    def nbytes(self) -> int:
        """Return the bytes on the device."""
        return self._memory.nbytes

    def _views(self, number: int) -> list[Tensor]:
        """Return where the parts of a piece come to on the device."""
        buffer, first, views = self._memory[number % self._num_buffers], 0, []
        for part in self._pieces[number]:
            views.append(buffer[first : first + part.nbytes].view(part.dtype))
            first += _padded(part)
        return views

    def begin_step(self) -> None:
        """Begin to load what an update takes first: nobody writes the state until then."""
        for number in range(self._num_buffers):
            self._load(number)

    def _load(self, number: int) -> None:
        buffer = number % self._num_buffers
        copies = list(zip(self.views[number], self._pieces[number], strict=True))
        self._loaded[buffer] = self._lanes.copy("in", copies, self._free[buffer])

    @contextmanager
    def updating(self, number: int) -> Iterator[None]:
        """Enclose the update of a piece on the device; each of a step comes once, in their order."""
        buffer = number % self._num_buffers
        self._lanes.wait(self._loaded[buffer])
        yield
        copies = list(zip(self._pieces[number], self.views[number], strict=True))
        self._free[buffer] = self._lanes.copy("out", copies, self._lanes.mark())
        if number + self._num_buffers < len(self._pieces):
            self._load(number + self._num_buffers)

    def settle(self) -> None:
        """Let the host wait until it may read and write the state."""
        self._lanes.settle()


def cuts_of(num_elements: int, element_bytes: int, piece_bytes: int) -> list[tuple[int, int]]:
    """Return the ranges [start, stop) of elements in pieces of about so many bytes.

    For example 200 elements of 12 bytes in pieces of 1,600 bytes are cut at 128.
    """
    each = max(piece_bytes // element_bytes // ALIGNMENT, 1) * ALIGNMENT
    return [(start, min(start + each, num_elements)) for start in range(0, num_elements, each)]


def _padded(part: Tensor) -> int:
    return -(-part.nbytes // 256) * 256
