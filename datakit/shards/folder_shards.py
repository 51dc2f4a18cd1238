"""FolderShards: the shards of a store in a folder, mapped, or read from open files.

Opening checks that all files have the sizes of the manifest: O(shards), whatever these are. If there are more than
`CHECKED_AT_ONCE`, a thread does so beside the first reads; a later read raises what it found. Shards are mapped at
first use, without a descriptor. All stores of a process together keep at most `OPEN_SHARDS.most` of them mapped, so
that any number of stores of any size fits its limits. With `reading="pread"` the rows of batches are read from open
files instead, of which `OPEN_FILES.most` are kept; indices and single documents stay mapped.
"""

import os
import threading
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from datakit.files.durable import reading as reading_file
from datakit.files.durable import url_behind
from datakit.format.manifest import Manifest, is_plain_folder, require_folder
from datakit.format.origins import Origins
from datakit.format.shard import Tokens, TokenShard
from datakit.format.shard_entry import ScannedShards
from datakit.shards.document_places import IndexedPlaces
from datakit.shards.kept_open import Bound, KeptOpen
from datakit.shards.shard_file import OPEN_FILES, FilePiece, ShardFile
from threefold.errors import CheckFailed, StorageError, UserError, quoted
from threefold.storage.file_systems import is_remote

OPEN_SHARDS = Bound(8192)  # two mappings each; Linux allows a process 65,530
Reading = Literal["auto", "mmap", "pread"]  # auto: pread on file systems of other machines
CHECKED_AT_ONCE = 1024  # shards, about 2 ms
OPEN_ORIGINS = Bound(8)  # their tables of sources, once read, may be large


class FolderShards:
    """The shards in a folder; safe to use from several threads."""

    is_gone, cached = False, None

    def __init__(self, path: Path, manifest: Manifest, reading: Reading = "mmap") -> None:
        """Wrap a manifest that was read from `path`; `FolderShards.open` is the usual way."""
        self.path, self.manifest, self.reading = path, manifest, reading
        self.is_mapped = reading == "mmap" or (reading == "auto" and not is_remote(path))
        self.token_starts = [0, *accumulate(manifest.shard_tokens)]
        self.document_starts = [0, *accumulate(manifest.shard_documents)]
        self._faults: list[UserError] = []  # of files' sizes, if they are looked at beside what the store is used for
        self._shards: KeptOpen[int, TokenShard] = KeptOpen(OPEN_SHARDS)
        self._origins: KeptOpen[int, Origins] = KeptOpen(OPEN_ORIGINS)
        self._files: KeptOpen[int, ShardFile] = KeptOpen(OPEN_FILES)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], reading: Reading = "mmap", checked_at_once: int = CHECKED_AT_ONCE
    ) -> "FolderShards":
        """Open a folder; UserError if it has no store, CheckFailed or StorageError if it is damaged."""
        folder = Path(path)
        shards = cls(folder, Manifest.read(folder), reading)
        if len(shards.manifest.shards) <= checked_at_once:
            check_sizes(folder, shards.manifest)
        else:
            threading.Thread(
                target=partial(_find_faults, folder, shards.manifest, shards._faults), name="datakit-sizes", daemon=True
            ).start()
        return shards

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a path, which is opened again."""
        return FolderShards.open, (os.path.abspath(self.path), self.reading)

    @property
    def place(self) -> str:
        """The folder's path, or the URL of a store that was made behind it."""
        return url_behind(self.path) or str(self.path)

    def shard(self, number: int) -> TokenShard:
        """Return an open shard; the most recently used ones stay mapped."""
        if self._faults:
            raise self._faults[0]
        return self._shards.get(number, self._open_shard)

    def origins(self, number: int) -> Origins:
        """Return the origins of one shard's documents; few stay open."""
        return self._origins.get(number, self._open_origins)

    def tokens(self, number: int, start: int, stop: int) -> Tokens:
        """Return the tokens [start, stop) of a shard, as a view."""
        return self.shard(number).tokens[start:stop]

    def file_pieces(self, number: int, start: int, stop: int) -> list[FilePiece]:
        """Return the piece of an open file that is bytes [start, stop) of a shard's tokens."""
        if self._faults:
            raise self._faults[0]
        return [FilePiece(self._files.get(number, self._open_file), start, stop - start)]

    def read_small(self, name: str) -> bytes | None:
        """Return a small file beside the manifest, None if it is missing."""
        require_folder(self.path)
        with reading_file(self.path / name):
            return (self.path / name).read_bytes() if (self.path / name).is_file() else None

    def in_stretches_of(self, num_tokens: int) -> "FolderShards":
        """Return these shards, which nobody fetches."""
        return self

    def document_places(self) -> IndexedPlaces:
        """Return where all documents are, by the mapped indices."""
        return IndexedPlaces(self.shard, self.token_starts, self.document_starts)

    def damaged(self, what: str) -> CheckFailed:
        """Return the error of a store that is not as it was written."""
        return CheckFailed(what, hint=f"datakit verify {quoted(self.path)}")

    def _open_origins(self, number: int) -> Origins:
        require_folder(self.path)
        entry = self.manifest.shards[number]
        origins = Origins(self.path / f"{entry.name}.origin", entry.first_line)
        if origins.num_documents != entry.num_documents:
            raise self.damaged(
                f"{origins.path} has {origins.num_documents} documents, its manifest says {entry.num_documents}"
            )
        return origins

    def _open_shard(self, number: int) -> TokenShard:
        require_folder(self.path)
        entry = self.manifest.shards[number]
        shard = TokenShard(f"{self.path}/{entry.name}")
        found = shard.dtype.name, shard.num_documents, shard.index.num_sequences, shard.num_tokens
        expected = self.manifest.dtype, entry.num_documents, entry.num_documents, entry.num_tokens
        if found != expected:
            raise self.damaged(
                f"{shard.idx_path} has dtype, documents, sequences, tokens {found}, its manifest says {expected}"
            )
        return shard

    def _open_file(self, number: int) -> ShardFile:
        require_folder(self.path)
        entry = self.manifest.shards[number]
        return ShardFile.open(self.path / f"{entry.name}.bin", entry.bin.size_bytes)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise StorageError or CheckFailed if a file of a shard is not there or has another size than in the manifest."""
    shards, prefix = manifest.shards, f"{folder}/"  # a Path for each file would be half of the time
    for entry in shards.misfits(prefix) if isinstance(shards, ScannedShards) else shards:
        for name, digest in entry.files().items():
            try:
                size_bytes = os.stat(prefix + name).st_size
            except OSError as error:
                verb = "verify {}" if is_plain_folder(str(folder)) else "unarchive {} --output STORE"
                hint = f"datakit {verb.format(quoted(folder))}"
                raise StorageError(f"cannot read {folder / name}: {error.strerror}", hint=hint) from error
            if size_bytes != digest.size_bytes:
                raise CheckFailed(
                    f"{folder / name} has {size_bytes} bytes, its manifest says {digest.size_bytes}",
                    hint=f"datakit verify {quoted(folder)}",
                )


def _find_faults(folder: Path, manifest: Manifest, faults: list[UserError]) -> None:
    """Put what `check_sizes` raises into a list, on a thread that leaves processors to others."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    try:
        check_sizes(folder, manifest)
    except UserError as error:
        faults.append(error)
