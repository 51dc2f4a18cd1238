"""datakit: text corpus to token store to blended, packed, exactly resumable batches.

Programs import these names and no submodule:
- from text to a store: preprocess, Recipe, write_store; tokenizers: train_tokenizer, open_tokenizer, Tokenizer; what
  encodes fastest, for experts: choose_backend, open_encoder, Encoder;
- a store: TokenStore, TokenShard, Origin, verify, statistics, find_difference;
- stores of stores: merge, archive, unarchive, from_megatron, to_megatron;
- batches of a stream: Blend, Cursor, Loader, HostBatch.

No folder imports one that comes later: files, text, tokenization, store, stream, dedup, preprocessing, archives,
foreign, reports.
"""

from threefold import __version__ as __version__
from threefold.lazy import lazy_names

TYPE_CHECKING = False

if TYPE_CHECKING:
    from datakit.archives.archiving import archive as archive
    from datakit.archives.unarchiving import unarchive as unarchive
    from datakit.foreign.megatron import from_megatron as from_megatron
    from datakit.foreign.megatron import to_megatron as to_megatron
    from datakit.preprocessing.preprocess import preprocess as preprocess
    from datakit.preprocessing.recipe import Recipe as Recipe
    from datakit.reports.difference import find_difference as find_difference
    from datakit.reports.statistics import statistics as statistics
    from datakit.reports.verification import verify as verify
    from datakit.store.merging import merge as merge
    from datakit.store.origins import Origin as Origin
    from datakit.store.shard import TokenShard as TokenShard
    from datakit.store.token_store import TokenStore as TokenStore
    from datakit.store.writer import write_store as write_store
    from datakit.stream.batch import HostBatch as HostBatch
    from datakit.stream.blend import Blend as Blend
    from datakit.stream.cursor import Cursor as Cursor
    from datakit.stream.loader import Loader as Loader
    from datakit.tokenization.encoder import Encoder as Encoder
    from datakit.tokenization.encoder import choose_backend as choose_backend
    from datakit.tokenization.encoder import open_encoder as open_encoder
    from datakit.tokenization.tokenizer import Tokenizer as Tokenizer
    from datakit.tokenization.tokenizer import open_tokenizer as open_tokenizer
    from datakit.tokenization.tokenizer_training import train_tokenizer as train_tokenizer
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Blend": "stream.blend",
            "Cursor": "stream.cursor",
            "Encoder": "tokenization.encoder",
            "HostBatch": "stream.batch",
            "Loader": "stream.loader",
            "Origin": "store.origins",
            "Recipe": "preprocessing.recipe",
            "TokenShard": "store.shard",
            "TokenStore": "store.token_store",
            "Tokenizer": "tokenization.tokenizer",
            "archive": "archives.archiving",
            "choose_backend": "tokenization.encoder",
            "find_difference": "reports.difference",
            "from_megatron": "foreign.megatron",
            "merge": "store.merging",
            "open_encoder": "tokenization.encoder",
            "open_tokenizer": "tokenization.tokenizer",
            "preprocess": "preprocessing.preprocess",
            "statistics": "reports.statistics",
            "to_megatron": "foreign.megatron",
            "train_tokenizer": "tokenization.tokenizer_training",
            "unarchive": "archives.unarchiving",
            "verify": "reports.verification",
            "write_store": "store.writer",
        },
    )
