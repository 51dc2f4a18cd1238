"""Shards: where the bytes of a store's shards are, one of three: in a folder, behind a URL and a cache, or gone.

Each is pickled as the place to open, and safe to use from several threads. Shard k has the tokens [token_starts[k],
token_starts[k + 1]) of the store, and its documents likewise. `place` is what was opened, `path` what messages name
files by. Rows of shards that are `is_mapped` are read out of memory, of others out of `file_pieces`. Those that may be
fetched ahead are their own `cached`. A further kind needs their common members, and its name here.
"""

from datakit.shards.cached_shards import CachedShards
from datakit.shards.folder_shards import FolderShards
from datakit.shards.gone_shards import GoneShards

Shards = FolderShards | CachedShards | GoneShards
