"""datakit: text corpus to token store to blended, packed, exactly resumable batches."""

from threefold import __version__ as __version__
from threefold.lazy import lazy_names

TYPE_CHECKING = False

if TYPE_CHECKING:
    from datakit.archives.archiving import archive as archive
    from datakit.archives.unarchiving import unarchive as unarchive
    from datakit.difference import find_difference as find_difference
    from datakit.foreign.megatron import from_megatron as from_megatron
    from datakit.foreign.megatron import to_megatron as to_megatron
    from datakit.merging import merge as merge
    from datakit.origins import Origin as Origin
    from datakit.pipeline.preprocessing import preprocess as preprocess
    from datakit.pipeline.recipe import Recipe as Recipe
    from datakit.shard import TokenShard as TokenShard
    from datakit.store import TokenStore as TokenStore
    from datakit.store_statistics import statistics as statistics
    from datakit.store_writer import write_store as write_store
    from datakit.stream.batch import HostBatch as HostBatch
    from datakit.stream.blend import Blend as Blend
    from datakit.stream.cursor import Cursor as Cursor
    from datakit.stream.loader import Loader as Loader
    from datakit.tokenization.tokenizer import Tokenizer as Tokenizer
    from datakit.tokenization.tokenizer import open_tokenizer as open_tokenizer
    from datakit.tokenization.tokenizer_training import train_tokenizer as train_tokenizer
    from datakit.verification import verify as verify
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
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
        },
    )
