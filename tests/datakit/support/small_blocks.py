"""Small blocks: a store of a test is less than one of the blocks that are fetched from a URL."""

import pytest

from datakit.shards import shard_tokens


def cut_blocks(patch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let tokens behind a URL be fetched in blocks of about so many bytes, in this process."""
    patch.setattr(shard_tokens, "BLOCK_BYTES", num_bytes)
