"""GroupExchange: bytes between the ranks of a torch.distributed group, by which they agree and may restore together."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ckptkit.loading.exchange import Alone, Exchange
from threefold.storage import Buffer


class GroupExchange:
    """All ranks of a group, by default of the job, exchange bytes in host memory; the group's CPU backend is gloo."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self._group = dist.get_rank(group), dist.get_world_size(group), group

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in their order."""
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)], device="cpu"), group=self._group)
        longest = max(int(size) for size in sizes)  # gloo gathers equal shapes only
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: len(data)] = _tensor(data)
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=self._group)
        return [each.numpy()[: int(size)].tobytes() for each, size in zip(gathered, sizes, strict=True)]

    def all_to_all(self, send: Sequence[Buffer]) -> list[Buffer]:
        """Send send[r] to each rank r, and return what each rank sent to this one."""
        sent_sizes = torch.tensor([memoryview(buffer).nbytes for buffer in send], device="cpu")
        sizes = torch.empty_like(sent_sizes)
        dist.all_to_all_single(sizes, sent_sizes, group=self._group)
        received = torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cpu")
        sent = torch.cat([_tensor(buffer) for buffer in send])
        dist.all_to_all_single(received, sent, sizes.tolist(), sent_sizes.tolist(), group=self._group)
        return [part.numpy().data for part in torch.split(received, sizes.tolist())]

    def close(self) -> None:
        """Leave the group, if torch.distributed is still there."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)


def open_exchange() -> Exchange:
    """Return the exchange of all ranks of the job, over a gloo group of its own, or of one process alone.

    All ranks call this together if torch.distributed is initialised.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Alone()
    return GroupExchange(dist.new_group(backend="gloo"))


def _tensor(data: Buffer) -> torch.Tensor:
    if not len(data):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
