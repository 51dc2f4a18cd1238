"""Names of stores from before TokenStore opened them all; kept for one release, with `isinstance` and their pickles.

A store has one class. What these were is its shards and rows, so `isinstance` asks those.
"""

import os
from typing import Any

from datakit.rows.packed_rows import Packing
from datakit.shards.cached_shards import CACHE_MIB, CachedShards
from datakit.shards.folder_shards import FolderShards, Reading
from datakit.store.token_store import TokenStore
from threefold.errors import CheckFailed, quoted


class _OlderName(type):
    """Classes that a TokenStore is an instance of by what it is read through."""

    is_remote = is_packed = False

    def __instancecheck__(cls, value: Any) -> bool:
        return (
            type(value) is TokenStore
            and (not cls.is_remote or value.cache is not None)
            and (not cls.is_packed or value.packing != "concat")
        )


class RemoteStore(metaclass=_OlderName):
    """A TokenStore behind a URL: `TokenStore.open(url, cache=...)` opens it."""

    is_remote = True

    @classmethod
    def at(cls, url: str, *, cache: str, cache_mib: int = CACHE_MIB) -> TokenStore:
        """Open the store or archive at a URL, or in a folder, with a cache of so many MiB in the folder `cache`."""
        return TokenStore(CachedShards.open(url, cache, cache_mib))


class PackedStore(metaclass=_OlderName):
    """A TokenStore in rows of a packing index: `TokenStore.open(place, rows=Packing(...))` opens it."""

    is_packed = True

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        packing: str,
        seq_length: int,
        index: str | os.PathLike[str] | None = None,
        reading: Reading = "mmap",
    ) -> TokenStore:
        """Open a store with the index that `datakit pack` made of it, there or in the folder `index`."""
        return TokenStore(FolderShards.open(path, reading), Packing(packing, seq_length, index))


class PackedRemoteStore(PackedStore, RemoteStore):
    """A TokenStore behind a URL in rows of a packing index."""

    @classmethod
    def packed_at(
        cls,
        url: str,
        *,
        packing: str,
        seq_length: int,
        cache: str,
        cache_mib: int = CACHE_MIB,
        index: str | None = None,
    ) -> TokenStore:
        """Open the store or archive at a URL with its index, by default the one in the store."""
        return TokenStore(CachedShards.open(url, cache, cache_mib), Packing(packing, seq_length, index))


def reopen_packed(
    path: str, folder: str, packing: str, seq_length: int, fingerprint: str, reading: Reading = "mmap"
) -> TokenStore:
    """Return a packed store that an older release pickled."""
    return _same(TokenStore(FolderShards.open(path, reading), Packing(packing, seq_length, folder)), fingerprint)


def reopen_remote(
    url: str, fingerprint: str, *, cache: str, cache_mib: int, packing: str = "", seq_length: int = 0, index: str = ""
) -> TokenStore:
    """Return a store behind a URL, packed if `packing` says so, that an older release pickled."""
    shards = CachedShards.open(url, cache, cache_mib)
    return _same(TokenStore(shards, Packing(packing, seq_length, index) if packing else None), fingerprint)


def _same(store: TokenStore, fingerprint: str) -> TokenStore:
    if store.fingerprint != fingerprint:
        raise CheckFailed(
            f"{store.place} is not the store that was pickled: its fingerprint is {store.fingerprint}, not "
            f"{fingerprint}",
            hint=f"datakit inspect {quoted(store.place)}",
        )
    return store
