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

__version__: str
