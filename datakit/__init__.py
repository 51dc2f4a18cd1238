"""datakit: text corpus to token store to blended, packed, exactly resumable batches.

Programs import these names and no other submodule:
- from text to a store: preprocess, Recipe, write_store; tokenizers: train_tokenizer, TokenizerTraining, open_tokenizer,
  Tokenizer; what encodes fastest, for experts: choose_backend, open_encoder, Encoder;
- a store: TokenStore, TokenShard, Origin, store_tokenizer, verify, statistics, find_difference;
- stores of stores: merge, archive, unarchive, from_megatron, to_megatron;
- a store's documents in rows, without cutting the short ones: pack, and Packing, which TokenStore.open takes;
- names that TokenStore.open made older, for one release: RemoteStore, PackedStore, PackedRemoteStore;
- batches of a stream: Blend, Cursor, Loader, BatchSizes, HostBatch, BatchOptions; datakit.torch, which is imported by
  its own name, has datasets of them for PyTorch's DataLoader;
- from samples to documents and back: blame, where; the tags of their labels: LabelTags;
- a run's stream in its TOML file: RunStream, StreamConfig, MixtureConfig, BlendConfig, StepConfig;
- the order of samples of megatron-core's datasets: MegatronBlend, MegatronOrder;
- a stream that changes along the way: Segment, Mixture, StreamRecord, Recorded.

No folder imports one that comes later: files, text, tokenization, format, shards, store, rows, batches,
order, loading, config, dedup, preprocessing, foreign, reports.
"""

from threefold import __version__ as __version__
from threefold.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
