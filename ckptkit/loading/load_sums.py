"""LoadSums: what a load fills of each tensor is summed, and compared with the certificate of the save.

A tensor of which the ranks that load together hold each element is equal to what was saved, or an error: also where a
file and its checksums were both changed. Parts that several ranks hold count once. Bytes are added where they are
handed out, right after they were verified. Cost: one small exchange a load, and 0.02 to 0.05 CPU-seconds a GB.
"""

import numpy as np

from ckptkit.format.root import Root
from ckptkit.io.blocks import NOWHERE, SumPlaces
from ckptkit.io.sums import ChunkSums
from ckptkit.loading.chunk_source import ChunkSource
from ckptkit.loading.exchange import Exchange, agreed
from ckptkit.loading.targets import Read
from ckptkit.model.chunk_table import ChunkTable, Ints, TensorColumns
from ckptkit.model.tensor import MAX_DIMS
from ckptkit.plan.certificate import digest, is_readable
from ckptkit.plan.cover import box_weights, weights
from ckptkit.plan.load_plan import LoadPlan
from threefold.errors import CheckFailed, listed, quoted

# of every rank the same; whoever could choose boxes by them could change the root too
KEYS = tuple(np.random.default_rng(64).integers(0, 1 << 63, MAX_DIMS, np.uint64))


class LoadSums:
    """The sums of wanted chunks of the tensors of a root with a certificate, while they are filled.

    Several threads may add. One that `is_alone` adds nothing of tensors that it does not want whole.
    """

    def __init__(self, root: Root, chunks: ChunkTable, *, is_alone: bool) -> None:
        self._tensors = [root.tensors[name] for name in (chunks.names if is_alone else root.tensors)]
        self._certificate = root.certificate
        self._sums = ChunkSums(chunks, 0)
        numbers = {info.name: number for number, info in enumerate(self._tensors)}
        self._numbers = np.array([numbers[name] for name in chunks.names], np.int64)
        whole = ChunkTable.whole(chunks.tensors if is_alone else TensorColumns.of(self._tensors))
        num_dims = max(whole.offset.shape[1], 1)
        # elements and weight of each tensor: of all of it, and of what is held here
        weight = box_weights(whole.with_dims(num_dims), KEYS[:num_dims])
        self._whole = np.column_stack([whole.stop.astype(np.uint64), weight])
        self._held = np.zeros((len(chunks.names), 2), np.uint64)
        np.add.at(self._held[:, 0], chunks.tensor, (chunks.stop - chunks.start).astype(np.uint64))
        np.add.at(self._held[:, 1], chunks.tensor, weights(chunks.with_dims(num_dims), KEYS[:num_dims]))
        begins = np.cumsum(chunks.size_bytes) - chunks.size_bytes
        is_summed = (self._held == self._whole[self._numbers]).all(axis=1) | (not is_alone)
        self._begins = np.where(is_summed[chunks.tensor], begins, NOWHERE)

    def places(self, copies: LoadPlan) -> SumPlaces:
        """Return where copies of a plan begin among the chunks that are summed."""
        return SumPlaces(self._sums.address, (self._begins[copies.row] + copies.target).astype(np.uint64))

    def check(self, exchange: Exchange, url: str) -> int:
        """Return how many tensors the ranks hold whole and equal to what was saved.

        CheckFailed, on all ranks, names those that are not.
        """
        saved = self._certificate
        assert is_readable(saved), "a certificate"
        mine = np.column_stack([self._numbers.astype(np.uint64), self._held, self._sums.values])[self._held[:, 0] > 0]
        sent = agreed(exchange, mine.astype("<u8").tobytes)
        rows = np.concatenate([np.frombuffer(each, "<u8").reshape(-1, 4) for each in sent])
        held, first, same = np.unique(rows[:, :3], axis=0, return_index=True, return_inverse=True)
        is_wrong, sums = np.zeros(len(self._tensors), bool), np.zeros(len(self._tensors), np.uint64)
        is_wrong[rows[rows[:, 3] != rows[first, 3][same.reshape(-1)], 0].astype(np.int64)] = True
        numbers = held[:, 0].astype(np.int64)
        total = np.zeros_like(self._whole)
        np.add.at(total, numbers, held[:, 1:])
        np.bitwise_xor.at(sums, numbers, rows[first, 3])
        is_whole = (total == self._whole).all(axis=1)
        whole = np.unique(numbers[is_whole[numbers]])
        tensors = [self._tensors[number] for number in whole.tolist()]
        digests = map(digest, tensors, sums[whole].tolist())
        are_equal = [saved["tensors"].get(info.name) == found for info, found in zip(tensors, digests, strict=True)]
        is_wrong[whole] |= ~np.array(are_equal, bool)
        if is_wrong.any():
            names = [self._tensors[number].name for number in np.flatnonzero(is_wrong).tolist()]
            raise CheckFailed(
                f"what was read of {url} is not equal to what was saved, by the certificate of the save:"
                f"{listed(names)}",
                hint=f"ckptkit verify {quoted(url)}",
            )
        return sum(are_equal)


def fetching(source: ChunkSource, sums: LoadSums | None) -> Read:
    """Return what makes copies of a plan out of a source and adds them to sums, if there are any."""

    def read(copies: LoadPlan, addresses: Ints, num_threads: int | None = None, /) -> None:
        source.fetch(copies, addresses, None if sums is None else sums.places(copies), num_threads)

    return read
