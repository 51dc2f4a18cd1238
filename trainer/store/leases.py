"""Leases: memory for whole buckets, of which a rank keeps its own interval alone, for the time of a unit's pass.

A lease that was given back still has its content until another tenant takes the memory: what a pass ends with is often
what the next one begins with. What reads or writes the memory beside the passes is waited for before it is taken again.
The same takes and returns in a step have the same addresses in every step.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

LEASES = 2  # of a size: what a pass uses, and what it comes to next


class Lease:
    """Memory of one size; `tenant` is whose content it has, `pending` waits for what is under way with it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.tenant = memory, object()
        self.pending = list[Callable[[], object]]()

    def settle(self) -> None:
        """Wait for what is under way with the memory; on CUDA the current stream waits, not the host."""
        while self.pending:
            self.pending.pop(0)()


class Leases:
    """The leases of a rank, of each size as many as it has tenants, and `most` at most; `peak` counts those taken."""

    def __init__(self, sizes: Iterable[int], dtype: torch.dtype, device: torch.device, most: int) -> None:
        self._all = [
            Lease(torch.zeros(size, dtype=dtype, device=device))
            for size, count in sorted(lease_counts(sizes, most).items())
            for _ in range(count)
        ]
        self._free, self._num_taken, self.peak = dict[int, deque[Lease]](), 0, 0
        self.begin_step()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all of them."""
        return sum(lease.memory.nbytes for lease in self._all)

    def begin_step(self) -> None:
        """Let the takes of this step have the addresses of the last one's; all leases are back."""
        assert not self._num_taken, f"{self._num_taken} leases were not given back"
        self._free = {len(lease.memory): deque[Lease]() for lease in self._all}
        for lease in self._all:
            self._free[len(lease.memory)].append(lease)

    def settle(self) -> None:
        """Wait for what is under way with any; on CUDA the current stream waits, not the host."""
        for lease in self._all:
            lease.settle()

    def forget(self) -> None:
        """Let no tenant find its content again: it is out of date."""
        for lease in self._all:
            lease.tenant = object()

    def has(self, tenant: object) -> bool:
        """Return whether the content of a tenant is there."""
        return any(lease.tenant is tenant for lease in self._all)

    def take(self, size: int, tenant: object) -> tuple[Lease, bool]:
        """Return a lease and whether it has the tenant's content still; else it is the one given back longest ago."""
        free = self._free[size]
        assert free, f"no lease of {size} elements is free"
        lease = next((each for each in free if each.tenant is tenant), free[0])
        free.remove(lease)
        is_kept = lease.tenant is tenant
        if not is_kept:
            lease.settle()
            lease.tenant = tenant
        self._num_taken += 1
        self.peak = max(self.peak, self._num_taken)
        return lease, is_kept

    def is_free(self, size: int) -> bool:
        """Return whether a lease of this size can be taken."""
        return bool(self._free[size])

    def put_by(self, lease: Lease) -> None:
        """Let others take the memory, the latest of all: its tenant comes for the content."""
        self._free[len(lease.memory)].append(lease)
        self._num_taken -= 1

    def give_back(self, lease: Lease) -> None:
        """Let others take the memory, as its tenant has done with it."""
        self.put_by(lease)


def num_leased(sizes: Iterable[int], most: int) -> int:
    """Return the elements of all leases for tenants of these sizes, without making any."""
    return sum(size * count for size, count in lease_counts(sizes, most).items())


def lease_counts(sizes: Iterable[int], most: int) -> dict[int, int]:
    """Return how many leases of each size there are for tenants of these sizes, by size; none of 0."""
    return {size: min(count, most) for size, count in Counter(sizes).items() if size}
