"""datakit: text corpus to token store to blended, packed, exactly resumable batches."""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Blend": "stream.blend",
    "Cursor": "stream.cursor",
    "HostBatch": "stream.batch",
    "Loader": "stream.loader",
    "Origin": "origins",
    "Recipe": "pipeline.recipe",
    "TokenShard": "shard",
    "TokenStore": "store",
    "Tokenizer": "tokenization.tokenizer",
    "archive": "archives.archiving",
    "find_difference": "difference",
    "from_megatron": "foreign.megatron",
    "merge": "merging",
    "open_tokenizer": "tokenization.tokenizer",
    "preprocess": "pipeline.preprocessing",
    "statistics": "store_statistics",
    "to_megatron": "foreign.megatron",
    "train_tokenizer": "tokenization.tokenizer_training",
    "unarchive": "archives.unarchiving",
    "verify": "verification",
    "write_store": "store_writer",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that no part of datakit pays for another."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
