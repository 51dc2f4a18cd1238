"""datakit: text corpus to token store to blended, packed, exactly resumable batches."""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Blend": "blend",
    "Cursor": "cursor",
    "HostBatch": "batch",
    "Loader": "loader",
    "Origin": "origins",
    "Recipe": "recipe",
    "TokenShard": "shard",
    "TokenStore": "store",
    "Tokenizer": "tokenizer",
    "archive": "archiving",
    "find_difference": "difference",
    "from_megatron": "megatron",
    "merge": "merging",
    "open_tokenizer": "tokenizer",
    "preprocess": "preprocessing",
    "statistics": "store_statistics",
    "to_megatron": "megatron",
    "train_tokenizer": "tokenizer_training",
    "unarchive": "unarchiving",
    "verify": "verification",
    "write_store": "store_writer",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that no part of datakit pays for another."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
