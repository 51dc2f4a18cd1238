"""Residence: the buckets of a block, of the embedding or of the head, and leases for those that ranks keep in parts.

While a pass reads the weights, or adds to their gradients, whole buckets are there. Who begins a residence's pass
begins the gather of the next one's, so that it is beside the arithmetic. Source: ZeRO (Rajbhandari et al., 2020).
"""

from collections.abc import Iterator

from torch import Tensor

from trainer.linear.weight import Access
from trainer.store.bucket import Bucket
from trainer.store.leases import Lease, Leases


class Residence:
    """Owned by the training thread; `following` and `previous` are what a pass gathers next, forward and backward.

    `is_read_backward` is False where backward passes only add to gradients.
    """

    def __init__(self, parameters: Leases, gradients: Leases, buckets: list[Bucket], access: Access) -> None:
        self.buckets, self.access, self.is_read_backward = buckets, access, False
        self.following: Residence | None = None
        self.previous: Residence | None = None
        self._parameters, self._gradients = parameters, gradients
        self._gathered = [bucket for bucket in buckets if bucket.cuts_parameters]
        self._summed = [bucket for bucket in buckets if bucket.cuts_gradients]
        by_group = dict[int, list[Bucket]]()
        for bucket in self._gathered:
            by_group.setdefault(id(bucket.inner), []).append(bucket)
        self._gathered_by_one_call = list(by_group.values())
        self._readers, self._adders = set[object](), set[object]()
        self._read: Lease | None = None
        self._added: Lease | None = None
        self._summing: Lease | None = None  # of the pass before

    @property
    def is_gathered(self) -> bool:
        """Return whether a pass gathers anything of it."""
        return bool(self._gathered)

    def use(self, reader: object) -> bool:
        """Let a unit read the values, which are up to date; return whether it is the first to do so."""
        is_first = not self._readers
        self._readers.add(reader)
        if is_first and self._gathered:
            self._read = self._gather()
            self._read.settle()
        for bucket in self.buckets:
            bucket.arrive()
        self.access.reads = True
        return is_first

    def release(self, reader: object) -> None:
        """End a unit's reading; one that has ended stays so."""
        self._readers.discard(reader)
        if self._readers:
            return
        self.access.reads = False
        if self._read is not None:
            self._parameters.give_back(self._read)
            self._read = None

    def prefetch(self) -> None:
        """Begin to gather what a pass will read, if there is memory for it."""
        size = size_of(self._gathered)
        if self._parameters.is_free(size) and not self._parameters.has(self):
            self._parameters.put_by(self._gather())

    def _gather(self) -> Lease:
        lease, is_there = self._parameters.take(size_of(self._gathered), self)
        for buckets in () if is_there else self._gathered_by_one_call:
            wholes = [whole for bucket, whole in parts_of(lease, self._gathered) if bucket in buckets]
            for bucket, whole in zip(buckets, wholes, strict=True):
                bucket.read_from(whole)
            shares = [bucket.parameters for bucket in buckets]
            lease.pending.append(buckets[0].inner.start_gathers(shares, wholes).wait)
        return lease

    def begin_adding(self, adder: object) -> None:
        """Let a unit add to gradients."""
        if not self._adders and self._summed:
            if self._summing is not None:  # there is one sum of a bucket at a time
                self._summing.settle()
            self._added, _ = self._gradients.take(size_of(self._summed), self)
            self._added.settle()
            for bucket, whole in parts_of(self._added, self._summed):
                bucket.begin_pass(whole)
        self._adders.add(adder)
        self.access.adds = True

    def end_adding(self, adder: object) -> None:
        """End it: with the last unit's all gradients of the micro-batch are in."""
        self._adders.discard(adder)
        if self._adders:
            return
        self.access.adds = False
        if self._added is not None:
            late = [name for bucket in self._summed for name in bucket.late]
            assert not late, f"a gradient of {', '.join(late)} has not come in its pass"
            self._added.pending = [bucket.finish_reduce for bucket in self._summed]
            self._gradients.give_back(self._added)
            self._summing, self._added = self._added, None


def size_of(buckets: list[Bucket]) -> int:
    """Return the elements of whole buckets."""
    return sum(sizes_of(buckets))


def sizes_of(buckets: list[Bucket]) -> list[int]:
    """Return the elements of each."""
    return [bucket.plan.size(bucket.group.size) for bucket in buckets]


def parts_of(lease: Lease, buckets: list[Bucket]) -> Iterator[tuple[Bucket, Tensor]]:
    """Return buckets, each with its part of a lease of their size."""
    return zip(buckets, lease.memory.split(sizes_of(buckets)), strict=True)
