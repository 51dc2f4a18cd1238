"""Processes: torch.distributed as what carries groups. On GPUs a group is NCCL alone, on CPUs gloo.

Each group has the run's timeout, else torch's default would apply, and a description, by which torch's log names it.
The calls that each pass makes go to torch's group itself: its functions take as long to check and log a call as NCCL
takes to start it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

from trainer.mesh.group import Handle, Op, Sizes, Tensors

# torch 2.13 renames these
_all_gather: Any = getattr(dist.ProcessGroup, "all_gather_single", None) or dist.ProcessGroup._allgather_base
_all_gathers: Any = (
    getattr(dist.ProcessGroup, "all_gather_single_coalesced", None) or dist.ProcessGroup.allgather_into_tensor_coalesced
)
_reduce_scatter: Any = (
    getattr(dist.ProcessGroup, "reduce_scatter_single", None) or dist.ProcessGroup._reduce_scatter_base
)
_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Processes:
    """The processes that torch.distributed joined; this one alone if it joined none."""

    def __init__(self, device: torch.device, *, timeout_s: float) -> None:
        """Prepare groups of tensors on `device`; what the others do not join within `timeout_s` fails."""
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._timeout = timedelta(seconds=timeout_s)

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def connect(self, name: str, ranks: Sequence[int]) -> "Channel | None":
        """Build one group; every rank of the world calls this, in the same order."""
        handle = dist.new_group(list(ranks), timeout=self._timeout, backend=self._backend, group_desc=name)
        return Channel(handle, ranks.index(dist.get_rank())) if dist.get_rank() in ranks else None


@dataclass(frozen=True, slots=True)
class Channel:
    """One group's process group."""

    handle: dist.ProcessGroup
    index: int

    def all_reduce(self, tensor: Tensor, op: Op, *, is_async: bool) -> Handle | None:
        options = AllreduceOptions()
        options.reduceOp, options.asyncOp = _OPS[op], is_async
        return _begun(self.handle.allreduce([tensor], options), is_async=is_async)

    def broadcast(self, tensor: Tensor, source: int, *, is_async: bool) -> Handle | None:
        return dist.broadcast(tensor, group=self.handle, group_src=source, async_op=is_async)

    def reduce_scatter(self, flat: Tensor, share: Tensor | None = None, *, is_async: bool) -> Handle | None:
        place = self._share(flat)
        if flat.is_cuda:
            options = ReduceScatterOptions()
            options.reduceOp, options.asyncOp = _OPS["sum"], is_async
            to = place if share is None else share
            return _begun(_reduce_scatter(self.handle, to, flat, options), is_async=is_async)
        # gloo's all-reduce is 2-3 times as fast as its reduce-scatter, with equal bits
        summing = self.all_reduce(flat, "sum", is_async=is_async)
        if share is None:
            return summing
        copying = Copying(summing, place, share)
        if is_async:
            return copying
        copying.wait()
        return None

    def all_gather(self, flat: Tensor, share: Tensor | None = None, *, is_async: bool) -> Handle | None:
        if share is None:
            place = self._share(flat)
            share = place if flat.is_cuda else place.clone()  # NCCL takes it where it is
        options = AllgatherOptions()
        options.asyncOp = is_async
        return _begun(_all_gather(self.handle, flat, share, options), is_async=is_async)

    def all_gather_coalesced(self, flats: Tensors, shares: Tensors, *, is_async: bool) -> Handle | None:
        options = AllgatherOptions()
        options.asyncOp = is_async
        return _begun(_all_gathers(self.handle, list(flats), list(shares), options), is_async=is_async)

    def all_to_all(
        self, received: Tensor, flat: Tensor, to_each: Sizes = None, from_each: Sizes = None, *, is_async: bool
    ) -> Handle | None:
        return dist.all_to_all_single(received, flat, from_each, to_each, group=self.handle, async_op=is_async)

    def send(self, tensor: Tensor, to: int) -> Handle | None:
        return dist.isend(tensor, group=self.handle, group_dst=to)

    def receive(self, tensor: Tensor, source: int) -> Handle | None:
        return dist.irecv(tensor, group=self.handle, group_src=source)

    def _share(self, flat: Tensor) -> Tensor:
        return flat.chunk(self.handle.size())[self.index]


@dataclass(frozen=True, slots=True)
class Copying:
    """A call under way, after which a part of its tensor is copied."""

    handle: Handle | None
    part: Tensor
    to: Tensor

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()
        self.to.copy_(self.part)


def _begun(handle: Handle | None, *, is_async: bool) -> Handle | None:
    """Return the handle of a call, or wait for it."""
    if is_async:
        return handle
    if handle is not None:
        handle.wait()
    return None
