"""SourceSums: what an export reads of each tensor is summed and compared with the certificate of the save."""

from shlex import quote

from ckptkit.format.root import Root
from ckptkit.io.blocks import Bytes
from ckptkit.io.sums import ChunkSums
from ckptkit.model.box import Box
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.tensor import TensorInfo
from ckptkit.plan.certificate import digest, is_readable
from threefold.errors import CheckFailed


class SourceSums:
    """The sums of tensors that are read from begin to end, one range after the other; several may be under way."""

    def __init__(self, root: Root, url: str) -> None:
        self._saved = root.certificate if is_readable(root.certificate) else None
        self._url = url
        self._read: dict[str, tuple[int, int]] = {}  # how many elements were, and their sum
        self.num_certified = 0  # tensors that were read whole, or are empty, and are equal to what was saved
        for info in root.tensors.values() if self._saved is not None else ():
            if not info.numel and info.placement.tied_to is None:  # nothing of it is read
                self._compare(info, 0)

    def add(self, info: TensorInfo, start: int, stop: int, data: Bytes) -> None:
        """Add elements [start, stop); CheckFailed if they end a tensor that is not equal to what was saved."""
        if self._saved is None:
            return
        at, value = self._read.pop(info.name, (0, 0))
        if start != at:  # it is not read from its begin
            return
        sums = ChunkSums(ChunkTable.of([(info, Box((0,) * len(info.shape), info.shape), start, stop)]), 0)
        sums.add(data, 0)
        value ^= int(sums.values[0])
        if stop < info.numel:
            self._read[info.name] = stop, value
        else:
            self._compare(info, value)

    def _compare(self, info: TensorInfo, value: int) -> None:
        assert self._saved is not None, "a certificate"
        if self._saved["tensors"].get(info.name) != digest(info, value):
            text = f"{info.name} of {self._url} is not equal to what was saved, by the certificate of the save"
            raise CheckFailed(text, hint=f"ckptkit verify {quote(self._url)}")
        self.num_certified += 1
