"""PackedRemoteStore: a store behind a URL that is read through a packing index, in a local folder or behind a URL too.

An index behind a URL is fetched whole into the cache when the store is opened, and checked: 12 bytes a piece and 8 a
row. Rows of best fit hold documents from all over a window of the index, so a cache has to hold some windows, or the
same bytes are fetched again and again: `datakit pack --window-documents` makes them smaller.
"""

from functools import partial
from typing import Any

import xxhash

from datakit.packing.packed_store import PackedStore
from datakit.packing.packing_index import (
    MAX_RECORD_BYTES,
    RECORD_NAME,
    PackingIndex,
    PackingRecord,
    checked,
    column_file,
    default_name,
)
from datakit.remote.remote_store import RemoteStore
from datakit.shards.holdings import Kind
from datakit.shards.shard_tokens import content_name
from datakit.store.token_store import TokenStore
from threefold.errors import CheckFailed, UserError, quoted
from threefold.storage import Storage
from threefold.storage.repeating import open_repeating
from threefold.storage.second_look import read_checked

_READ_BYTES = 8 << 20


class PackedRemoteStore(PackedStore, RemoteStore):
    """Tokens are the remote store's, rows the index's; as safe to share as a RemoteStore."""

    @classmethod
    def packed_at(
        cls, url: str, *, packing: str, seq_length: int, cache: str, cache_mib: int = 10240, index: str | None = None
    ) -> "PackedRemoteStore":
        """Open the store or archive at a URL with its index, by default the one in the store.

        UserError if there is none, or it is of another store, packing or length; CheckFailed if it is damaged.
        """
        store = cls.at(url, cache=cache, cache_mib=cache_mib)
        assert isinstance(store, cls), "at makes what it is called on"
        place = f"{url}/{default_name(packing, seq_length)}" if index is None else index
        store.index = _open_index(place, store, packing=packing, seq_length=seq_length)
        store.fingerprint = store.index.fingerprint
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as places; whoever unpickles it opens store and index there, and checks that they are the same."""
        record, place = self.index.record, self._cache_place
        rows = {"packing": record.packing, "seq_length": record.seq_length, "index": str(self.index.folder)}
        return partial(_reopen, self._url, self.fingerprint, **place, **rows), ()

    def in_rows_of(self, seq_length: int) -> TokenStore:
        """Return the store with the index in it that has rows of so many tokens; errors as of `packed_at`."""
        record = self.index.record
        if seq_length == record.seq_length:
            return self
        return type(self).packed_at(self._url, packing=record.packing, seq_length=seq_length, **self._cache_place)

    @property
    def _cache_place(self) -> dict[str, Any]:
        return {"cache": str(self.cache.place.absolute()), "cache_mib": self.cache.max_bytes >> 20}


def _open_index(place: str, store: RemoteStore, *, packing: str, seq_length: int) -> PackingIndex:
    storage = open_repeating(place)
    read = read_checked(storage, f"{storage.url}/{RECORD_NAME}", _read_record)
    record = checked(read, storage.url, store, packing=packing, seq_length=seq_length)

    def map_column(name: str) -> memoryview:
        digest = record.files[name]
        place = f"{storage.url}/{column_file(name)}"
        fetch = partial(read_checked, storage, place, partial(_fetch, name=name, record=record))
        return store.cache.memory(content_name(digest), digest.size_bytes, fetch, Kind.SHARED).data

    return PackingIndex(storage.url, record, map_column)


def _read_record(storage: Storage) -> PackingRecord | None:
    info = storage.info(RECORD_NAME)
    if info is None:
        return None
    path = f"{storage.url}/{RECORD_NAME}"
    if info.size_bytes > MAX_RECORD_BYTES:
        raise CheckFailed(f"{path} has {info.size_bytes} bytes, more than the {MAX_RECORD_BYTES} it may have")
    return PackingRecord.parse(path, bytes(storage.read_ranges(RECORD_NAME, [(0, info.size_bytes)])[0]))


def _fetch(storage: Storage, name: str, record: PackingRecord) -> bytes:
    """Return a column; CheckFailed if it is not there, or not as it was written."""
    key, digest = column_file(name), record.files[name]
    info = storage.info(key)
    found = None if info is None else info.size_bytes
    if found != digest.size_bytes:
        what = "is missing" if found is None else f"has {found} bytes"
        raise CheckFailed(f"{storage.url}/{key} {what}, its record says {digest.size_bytes} bytes")
    ranges = [(at, min(at + _READ_BYTES, digest.size_bytes)) for at in range(0, digest.size_bytes, _READ_BYTES)]
    content = b"".join(bytes(part) for each in ranges for part in storage.read_ranges(key, [each]))
    if xxhash.xxh3_64_hexdigest(content) != digest.xxh3_64:
        raise CheckFailed(f"{storage.url}/{key} is damaged: its checksum does not hold")
    return content


def _reopen(url: str, fingerprint: str, **place: Any) -> PackedRemoteStore:
    store = PackedRemoteStore.packed_at(url, **place)
    if store.fingerprint != fingerprint:
        raise UserError(f"{store.index.folder} is not the index that was pickled", hint=f"datakit verify {quoted(url)}")
    return store
