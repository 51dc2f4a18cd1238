"""JobExchange: bytes between all ranks of a run, by which they agree and may restore together."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from threefold.storage import Buffer


class JobExchange:
    """All ranks of the job exchange bytes over gloo, in host memory; on CUDA runs too."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in their order."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        longest = max(int(size) for size in sizes)  # gloo gathers equal shapes only
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = _tensor(data)
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded)
        return [each.numpy()[: int(size)].tobytes() for each, size in zip(gathered, sizes, strict=True)]

    def all_to_all(self, send: Sequence[Buffer]) -> list[Buffer]:
        """Send send[r] to each rank r, and return what each rank sent to this one."""
        sent_sizes = torch.tensor([memoryview(buffer).nbytes for buffer in send])
        sizes = torch.empty_like(sent_sizes)
        dist.all_to_all_single(sizes, sent_sizes)
        received = torch.empty(int(sizes.sum()), dtype=torch.uint8)
        dist.all_to_all_single(
            received, torch.cat([_tensor(buffer) for buffer in send]), sizes.tolist(), sent_sizes.tolist()
        )
        return [part.numpy().data for part in received.split(sizes.tolist())]


def _tensor(data: Buffer) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
