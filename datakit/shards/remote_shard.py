"""RemoteShard: the index of a shard behind a URL; of its tokens single documents are fetched."""

from collections.abc import Callable
from pathlib import Path

from datakit.format.shard import ShardIndex, Tokens, TokenShard


class RemoteShard(TokenShard):
    """A shard whose tokens are not mapped."""

    def __init__(self, index: ShardIndex, bin_path: Path, num_tokens: int, read: Callable[[int, int], Tokens]) -> None:
        """Take what messages name its tokens by, how many they are, and what returns those in bytes [start, stop)."""
        self._bin, self.index, self._num_tokens, self._read = bin_path, index, num_tokens, read
        self.dtype, self.num_documents = index.dtype, index.num_documents

    @property
    def num_tokens(self) -> int:
        """How many tokens the shard holds."""
        return self._num_tokens

    def _sequence(self, number: int) -> Tokens:
        start = int(self.index.pointers[number])
        return self._read(start, start + int(self.index.lengths[number]) * self.dtype.itemsize)
