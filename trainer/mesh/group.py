"""Group: ranks that communicate, whatever carries it. Every collective of the trainer goes through one.

So timing and the order of calls are here, and what carries the data is behind `Transport`: torch.distributed
between processes (trainer/mesh/processes.py), or threads of one process in the tests. A group of one rank has no
transport and its collectives do nothing. Source of the buffers' form: ZeRO (Rajbhandari et al., 2020).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from trainer.job.page import Calls
from trainer.mesh.clock import Clock, Moment, Span
from trainer.mesh.layout import Axes, Axis

Op = Literal["sum", "max"]
Tensors = Sequence[Tensor]
Sizes = Sequence[int] | None  # rows to each rank, or from it; None for as many everywhere


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> Any: ...


class Transport(Protocol):
    """Carries a group's calls for one rank; every rank of the group makes the same ones in the same order.

    With `is_async` a collective returns at once and its handle is waited for; else it is done on return. `share` is
    what this rank has of `flat`, which is there unless it is memory of its own. `source` and `to` are places in the
    group. A tensor that is sent may not change before its handle was waited for.
    """

    def all_reduce(self, tensor: Tensor, op: Op, *, is_async: bool) -> Handle | None: ...
    def broadcast(self, tensor: Tensor, source: int, *, is_async: bool) -> Handle | None: ...
    def reduce_scatter(self, flat: Tensor, share: Tensor | None = None, *, is_async: bool) -> Handle | None: ...
    def all_gather(self, flat: Tensor, share: Tensor | None = None, *, is_async: bool) -> Handle | None: ...
    def all_gather_coalesced(self, flats: Tensors, shares: Tensors, *, is_async: bool) -> Handle | None: ...
    def all_to_all(
        self, received: Tensor, flat: Tensor, to_each: Sizes = None, from_each: Sizes = None, *, is_async: bool
    ) -> Handle | None: ...
    def send(self, tensor: Tensor, to: int) -> Handle | None: ...
    def receive(self, tensor: Tensor, source: int) -> Handle | None: ...


class Network(Protocol):
    """Where the transports of one rank come from."""

    @property
    def world_size(self) -> int: ...

    def connect(self, name: str, ranks: Sequence[int]) -> Transport | None:
        """Build one group of two or more ranks; every rank of the world calls it, a rank outside gets None."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """A call of a group that is under way; it keeps its tensor, and another that the call reads or writes."""

    group: "Group"
    kind: str
    tensor: Tensor
    handle: Handle | None
    other: Tensor | None = None
    number: int = 0  # among the calls of the group, if they are counted

    def wait(self) -> Tensor:
        """Wait until the tensor may be used, and return it; on CUDA the current stream waits, not the host."""
        if self.handle is not None:
            calls = self.group.calls
            if calls is not None:
                calls.wait(self.kind, self.number)
            with self.group.waiting(self.kind) as is_timed:
                try:
                    self.handle.wait()
                except RuntimeError as error:
                    self.group.name_in(error, self.kind)
                    raise
            if calls is not None:
                calls.end(self.kind, self.number, self.group.end(is_timed=is_timed))
        return self.tensor


@dataclass(frozen=True, slots=True)
class Group:
    """Some ranks under a name; `index` is this rank's place among `ranks`, which differ along `axes`."""

    name: str
    ranks: tuple[int, ...]
    index: int
    clock: Clock
    transport: Transport | None = None
    axes: Axes = ()
    calls: Calls | None = None  # where this rank's page counts them

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def cause(self) -> str:
        """Return under which name the clock counts waits for it: by the axes that its ranks differ in."""
        return _cause_of(self.axes)

    def waiting(self, kind: str) -> Span:
        """Return the span of a wait for a call."""
        if kind in ("send", "receive"):
            return self.clock.span("bubble")
        return self.clock.span(self.cause, is_sampled=_is_in_passes(self.axes))

    def end(self, *, is_timed: bool) -> Moment:
        """Return where a call's wait ends in the device's work, whose span is over, or was not counted."""
        return self.clock.last if is_timed else self.clock.moment()

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        """Reduce in place over the group and return the tensor."""
        self._call("all_reduce", tensor, op)
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite in place with the tensor of the rank at place `source`, and return it."""
        self._call("broadcast", tensor, source)
        return tensor

    def share(self, whole: Tensor) -> Tensor:
        """Return this rank's equal share of a tensor's rows, a view."""
        return whole.chunk(self.size)[self.index]

    def all_gather_rows(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, [size, ...]."""
        return self.start_gather(tensor.unsqueeze(0)).wait()

    def start_gather(self, share: Tensor, whole: Tensor | None = None) -> Work:
        """Begin to gather the shares of all ranks; the work's tensor, `whole`, is their rows in the order of ranks."""
        share = share.contiguous()
        if self.transport is None:
            return Work(self, "all_gather", share if whole is None else whole.copy_(share), None)
        if whole is None:
            whole = share.new_empty(self.size * share.shape[0], *share.shape[1:])
        return self._work("all_gather", whole, self._call("all_gather", whole, share, is_async=True), share)

    def start_gathers(self, shares: Tensors, wholes: Tensors) -> Work:
        """Begin to gather the shares of all ranks into each of several tensors, by one call; they keep both."""
        if self.transport is None:
            for share, whole in zip(shares, wholes, strict=True):
                whole.copy_(share)
            return Work(self, "all_gather", wholes[0], None)
        if len(wholes) == 1:
            return self.start_gather(shares[0], wholes[0])
        handle = self._call("all_gather_coalesced", wholes, shares, is_async=True)
        return self._work("all_gather", wholes[0], handle)

    def start_scatter(self, whole: Tensor, share: Tensor | None = None) -> Work:
        """Begin to sum a tensor, which it overwrites; the work's tensor is this rank's rows of the sum, in `share`."""
        if self.transport is None:
            return Work(self, "reduce_scatter", whole if share is None else share.copy_(whole), None)
        share = torch.empty_like(self.share(whole)) if share is None else share
        handle = self._call("reduce_scatter", whole, share, is_async=True)
        return self._work("reduce_scatter", share, handle, whole)

    def start_exchange(self, flat: Tensor, to_each: Sizes = None, from_each: Sizes = None) -> Work:
        """Begin to hand each rank its share; the work's tensor is what the ranks have for this one, in their order.

        `to_each` are the rows to each rank, `from_each` those that come, if they are not equal shares.
        """
        if self.transport is None:
            return Work(self, "all_to_all", flat, None)
        received = torch.empty_like(flat) if from_each is None else flat.new_empty(sum(from_each), *flat.shape[1:])
        handle = self._call("all_to_all", received, flat, to_each, from_each, is_async=True)
        return self._work("all_to_all", received, handle, flat)

    def start(self, kind: str, tensor: Tensor, *arguments: Any) -> Work:
        """Begin `all_reduce` or `broadcast`, with that method's arguments, `reduce_scatter` or `all_gather`, in place.

        The latter two sum a tensor into the `share` of each rank, and fill one from these.
        The tensor may not be touched before `wait` returned it. On CUDA it runs beside the current stream.
        """
        return self._work(kind, tensor, self._call(kind, tensor, *arguments, is_async=True))

    def send(self, tensor: Tensor, to: int) -> Work:
        """Begin to send to the rank at place `to`."""
        return self._work("send", tensor, self._transfer("send", tensor, to))

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Begin to fill the tensor with the next one that the rank at place `source` sends."""
        return self._work("receive", tensor, self._transfer("receive", tensor, source))

    def name_in(self, error: RuntimeError, kind: str) -> None:
        """Add to an error which call of which group failed."""
        shown = ", ".join(map(str, self.ranks[:8])) + (" ..." if self.size > 8 else "")
        error.add_note(f"in {kind} of group {self.name}, ranks {shown}")

    def _call(self, kind: str, tensor: Tensor | Tensors, *arguments: Any, is_async: bool = False) -> Handle | None:
        if self.transport is None:
            return None
        call = getattr(self.transport, kind)
        number = self.calls.begin(kind, waits=not is_async) if self.calls is not None else 0
        try:
            if is_async:  # it is waited for later
                return call(tensor, *arguments, is_async=True)
            with self.waiting(kind) as is_timed:
                handle = call(tensor, *arguments, is_async=False)
        except RuntimeError as error:
            self.name_in(error, kind)
            raise
        if self.calls is not None:
            self.calls.end(kind, number, self.end(is_timed=is_timed))
        return handle

    def _transfer(self, kind: str, tensor: Tensor, peer: int) -> Handle | None:
        assert self.transport is not None, f"group {self.name}: rank {self.ranks[0]} alone has nobody to {kind}"
        if self.calls is not None:
            self.calls.begin(kind)
        try:
            return getattr(self.transport, kind)(tensor, peer)
        except RuntimeError as error:
            self.name_in(error, kind)
            raise

    def _work(self, kind: str, tensor: Tensor, handle: Handle | None, other: Tensor | None = None) -> Work:
        """Return the call that was begun last."""
        return Work(self, kind, tensor, handle, other, self.calls.count if self.calls is not None else 0)


@cache
def _cause_of(axes: Axes) -> str:
    if axes == (Axis.CP,):
        return "comm_cp"
    if axes in ((Axis.TP,), (Axis.KV,)):
        return "comm_tp"
    over_samples = {Axis.DP, Axis.EDP, Axis.SHARD, Axis.REPLICA}
    return "comm_world" if over_samples.isdisjoint(axes) else "comm_dp"


@cache
def _is_in_passes(axes: Axes) -> bool:
    """Return whether each pass has calls along these axes, as one of them has no samples of its own."""
    return {Axis.TP, Axis.KV, Axis.CP, Axis.EP}.issuperset(axes)
