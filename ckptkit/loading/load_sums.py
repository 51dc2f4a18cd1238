"""LoadSums: what a load fills of each tensor is summed, and compared with the certificate of the save.

A tensor of which the ranks that load together hold each element is equal to what was saved, or an error: also where a
file and its checksums were both changed. Parts that several ranks hold count once. One small exchange a load; cost:
0.1 to 0.13 CPU-seconds a GB, a pass over host memory, or over the buffer of a device's while it is there.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ckptkit.format.root import Root
from ckptkit.io.blocks import Columns
from ckptkit.io.sums import ChunkSums
from ckptkit.loading.exchange import Exchange, agreed
from ckptkit.model.box import Box
from ckptkit.model.chunk_table import ChunkTable, Ints, cut
from ckptkit.model.tensor import MAX_DIMS, TensorInfo
from ckptkit.plan.certificate import digest, is_readable
from ckptkit.plan.cover import box_weights, weights
from threefold.errors import CheckFailed, listed

SUMMED_AT_ONCE = 64 << 20
# of every rank the same; whoever could choose boxes by them could change the root too
KEYS = tuple(np.random.default_rng(64).integers(0, 1 << 63, MAX_DIMS, np.uint64))


class LoadSums:
    """The sums of wanted chunks of the tensors of a root with a certificate, while they are filled.

    Several threads may add.
    """

    def __init__(self, root: Root, wanted: ChunkTable) -> None:
        self._root, self._wanted = root, wanted
        self._begins = np.cumsum(wanted.size_bytes) - wanted.size_bytes
        self._sums = ChunkSums(wanted, 0)

    def add(self, row: int, offset_bytes: int, address: int, size_bytes: int) -> None:
        """Add bytes of a wanted chunk, which begin at an offset in it."""
        self._sums.add_at(address, size_bytes, int(self._begins[row]) + offset_bytes)

    def add_whole(self, rows: Ints, addresses: Ints, num_threads: int) -> None:
        """Add whole chunks, each at its address."""
        held = rows[self._wanted.size_bytes[rows] > 0]
        source, offset, _, _, size = cut(self._wanted.size_bytes[held], SUMMED_AT_ONCE)
        jobs = zip(held[source].tolist(), offset.tolist(), (addresses[held[source]] + offset).tolist(), size.tolist())
        with ThreadPoolExecutor(num_threads) as pool:
            for _ in pool.map(lambda job: self.add(*job), jobs):
                pass

    def check(self, exchange: Exchange, url: str) -> int:
        """Return how many tensors the ranks hold whole and equal to what was saved.

        CheckFailed, on all ranks, names those that are not.
        """
        saved = self._root.certificate
        assert is_readable(saved), "a certificate"
        tensors = list(self._root.tensors.values())
        mine = self._held(tensors)
        rows = np.concatenate([np.frombuffer(each, "<u8").reshape(-1, 4) for each in agreed(exchange, mine.tobytes)])
        held, first, same = np.unique(rows[:, :3], axis=0, return_index=True, return_inverse=True)
        is_wrong, sums = np.zeros(len(tensors), bool), np.zeros(len(tensors), np.uint64)
        is_wrong[rows[rows[:, 3] != rows[first, 3][same.reshape(-1)], 0].astype(np.int64)] = True
        numbers = held[:, 0].astype(np.int64)
        num_held, weight = np.zeros_like(sums), np.zeros_like(sums)
        np.add.at(num_held, numbers, held[:, 1])
        np.add.at(weight, numbers, held[:, 2])
        np.bitwise_xor.at(sums, numbers, rows[first, 3])
        whole = ChunkTable.of([(info, Box((0,) * len(info.shape), info.shape), 0, info.numel) for info in tensors])
        num_dims = max(whole.offset.shape[1], 1)
        is_whole = (num_held == whole.stop) & (weight == box_weights(whole.with_dims(num_dims), KEYS[:num_dims]))
        num_certified = 0
        for number in np.unique(numbers[is_whole[numbers]]).tolist():
            is_equal = saved["tensors"].get(tensors[number].name) == digest(tensors[number], int(sums[number]))
            is_wrong[number] |= not is_equal
            num_certified += is_equal
        if is_wrong.any():
            names = [tensors[number].name for number in np.flatnonzero(is_wrong).tolist()]
            text = (
                f"what was read of {url} is not equal to what was saved, by the certificate of the save:{listed(names)}"
            )
            raise CheckFailed(text, hint=f"ckptkit verify {url}")
        return num_certified

    def _held(self, tensors: Sequence[TensorInfo]) -> Columns:
        """Return a row for each tensor that is held here: its number, elements, weight and sum."""
        chunks, names = self._wanted, {info.name: number for number, info in enumerate(tensors)}
        num_dims = max((len(info.shape) for info in tensors), default=0) or 1
        rows = np.zeros((len(chunks.names), 4), "<u8")
        rows[:, 0] = [names[name] for name in chunks.names]
        np.add.at(rows[:, 1], chunks.tensor, (chunks.stop - chunks.start).astype(np.uint64))
        np.add.at(rows[:, 2], chunks.tensor, weights(chunks.with_dims(num_dims), KEYS[:num_dims]))
        rows[:, 3] = self._sums.values
        return rows[rows[:, 1] > 0]
