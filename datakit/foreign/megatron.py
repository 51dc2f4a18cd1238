"""Megatron: indexed datasets as the shards of a store, and a store's shards as indexed datasets, linked or copied.

Into a store, every file is read once: its checksum is taken and its tokens are held against the vocabulary. Memory is
8 MiB of tokens or one document, and windows of the index. Out of a store costs a hard link a file, or a copy. Only
tokens of a dtype that a store has not, as int64, are written again.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from datakit.files.durable import FileDigest, digest_file, durable_file, reading, writing
from datakit.foreign.foreign_store import AGAIN_HINT, Choices, Pieces, check_tokens, make_store, store_of_files
from datakit.format.manifest import STORE_DTYPES, WORK_FOLDER
from datakit.format.origins import document_check, origins_head
from datakit.format.output import ASSEMBLY_NOTE, Output
from datakit.format.shard import HEADER, Int64s, Tokens, TokenShard
from datakit.format.shard_entry import ShardEntry
from datakit.store.claim import claim
from datakit.store.token_store import TokenStore
from datakit.tokenization.identity import TokenizerIdentity
from threefold.errors import CheckFailed, UserError, listed, listing, quoted


def from_megatron(
    prefixes: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], choices: Choices, *, copy: bool = False
) -> TokenStore:
    """Make a store of the datasets `<prefix>.bin` and `<prefix>.idx`, one shard each.

    A store has tokens of uint16 or int32: if one dataset has others, all are written again, in shards by size.
    UserError if a store cannot hold what they hold, CheckFailed if a token is beyond the vocabulary. The same call
    continues after a kill, and returns the store if that is complete.
    """
    datasets = [_Dataset.open(prefix, choices.pieces) for prefix in prefixes]
    files = [file for dataset in datasets for file in (dataset.shard.bin_path, dataset.shard.idx_path)]

    if any(dataset.shard.dtype.name not in STORE_DTYPES for dataset in datasets):
        return store_of_files("megatron", datasets, files, output, replace(choices, documents="items"))
    dtype = _common_dtype(datasets)

    def fill(output: Output, identity: TokenizerIdentity) -> tuple[str, list[ShardEntry]]:
        return dtype, [_add(output, number, dataset, identity, copy) for number, dataset in enumerate(datasets)]

    return make_store("megatron", files, output, choices, fill)


def to_megatron(path: str | os.PathLike[str], output: str | os.PathLike[str], *, copy: bool = False) -> list[Path]:
    """Put a store's shards into a folder or URL of indexed datasets and nothing else; return their prefixes, in order.

    The same call continues after a kill, and changes nothing if that is complete. `copy` is for a folder.
    """
    store, place = TokenStore.open(path), Output(os.fspath(output), ASSEMBLY_NOTE)
    prefixes = [Path(place.place) / entry.name for entry in store.manifest.shards]
    pairs = [pair for entry in store.manifest.shards for pair in store.files(entry)[:2]]
    sizes = {key: size for key, size in place.sizes().items() if not key.startswith(f"{WORK_FOLDER}/")}
    if sizes and sizes == {source.name: digest.size_bytes for source, digest in pairs}:
        place.settle()
        return prefixes
    with claim(place, {"to": "megatron", "shards": [asdict(entry) for entry in store.manifest.shards]}):
        for source, digest in pairs:
            place.place_file(source, source.name, digest, copy=copy)
        place.commit({})
    return prefixes


@dataclass(frozen=True, slots=True)
class _Dataset:
    """One Megatron dataset, of text alone."""

    prefix: str
    shard: TokenShard
    pieces: Pieces

    has_borders = True

    @classmethod
    def open(cls, path: str | os.PathLike[str], pieces: Pieces) -> "_Dataset":
        prefix = os.fspath(path).removesuffix(".bin").removesuffix(".idx")
        for file in (f"{prefix}.bin", f"{prefix}.idx"):
            if not os.path.isfile(file):
                raise UserError(
                    f"there is no {file}: PREFIX names the two files PREFIX.bin and PREFIX.idx", hint=listing(prefix)
                )
        shard = TokenShard(prefix)
        index = shard.index
        text_bytes = HEADER.size + 12 * index.num_sequences + 8 * (index.num_documents + 1)
        if index.path.stat().st_size != text_bytes:
            raise UserError(f"{index.path} has modes: it is multimodal, a store holds text alone", hint=AGAIN_HINT)
        if index.num_documents >= 1 << 32:
            raise UserError(
                f"{index.path} has {index.num_documents} documents, a shard holds below 2^32", hint=AGAIN_HINT
            )
        return cls(prefix, shard, pieces)

    @property
    def path(self) -> Path:
        """The file of its tokens."""
        return self.shard.bin_path

    @property
    def stream(self) -> str:
        """The dataset."""
        return self.prefix

    def samples(self) -> Iterator[tuple[Tokens, int]]:
        """Yield the tokens of each document and the byte offset in the file where they begin."""
        itemsize, at = self.shard.dtype.itemsize, 0
        for _, lengths in self.windows():
            for length in lengths.tolist():
                yield self.shard.tokens[at : at + length], at * itemsize
                at += length

    def windows(self) -> Iterator[tuple[int, Int64s]]:
        """Yield the first document and the lengths of windows of documents.

        Raise UserError if a document is not one sequence, CheckFailed if the index contradicts itself.
        """
        index, itemsize, window = self.shard.index, self.shard.dtype.itemsize, self.pieces.window_documents
        at_bytes = 0
        for start in range(0, max(index.num_documents, index.num_sequences), window):
            boundaries = index.document_index[start : start + window + 1]
            wrong = np.flatnonzero(boundaries != np.arange(start, start + len(boundaries)))
            if len(wrong) or index.num_documents != index.num_sequences:
                raise self._not_one_sequence(start + int(wrong[0]) - 1 if len(wrong) else None)
            lengths = index.lengths[start : start + window].astype(np.int64)
            ends = at_bytes + np.cumsum(lengths) * itemsize
            wrong = np.flatnonzero(
                (lengths < 0) | (index.pointers[start : start + len(lengths)] != ends - lengths * itemsize)
            )
            if len(wrong):
                raise CheckFailed(
                    f"{index.path}: document {start + int(wrong[0])} does not begin where the one before it ends",
                    hint=AGAIN_HINT,
                )
            yield start, lengths
            at_bytes = int(ends[-1])

    def _not_one_sequence(self, document: int | None) -> UserError:
        index = self.shard.index
        what = f"{index.num_sequences} sequences in {index.num_documents} documents"
        if document is not None and document >= 0:
            first, last = (int(boundary) for boundary in index.document_index[document : document + 2])
            what += f": document {document} has {last - first}"
        return UserError(f"{index.path} has {what}; a store's document is one sequence", hint=AGAIN_HINT)


def _common_dtype(datasets: Sequence[_Dataset]) -> str:
    """Return the dtype of all datasets, which a store has too; raise UserError if they differ."""
    dtypes = [dataset.shard.dtype.name for dataset in datasets]
    if len(set(dtypes)) == 1:
        return dtypes[0]
    lines = [f"{dataset.prefix}: {dtype}" for dataset, dtype in zip(datasets, dtypes)]
    raise UserError(
        f"the datasets' tokens must all be uint16 or all be int32:{listed(lines, most=len(lines))}",
        hint=f"convert those of one dtype at a time, or make them again: {AGAIN_HINT}",
    )


def _add(output: Output, number: int, dataset: _Dataset, identity: TokenizerIdentity, copy: bool) -> ShardEntry:
    """Read one dataset, write its `.origin`, and place its files."""
    name, shard = f"shard-{number:06}-000", dataset.shard
    origin = output.scratch / f"{name}.origin"
    with writing(origin):
        bin_digest, origin_digest = _read(dataset, identity.vocab_size, origin)
    entry = ShardEntry(
        name=name,
        num_documents=shard.num_documents,
        num_tokens=shard.num_tokens,
        first_line=0,
        bin=bin_digest,
        idx=digest_file(shard.idx_path),
        origin=origin_digest,
    )
    output.place_file(shard.bin_path, f"{name}.bin", entry.bin, copy=copy)
    output.place_file(shard.idx_path, f"{name}.idx", entry.idx, copy=copy)
    output.adopt("", [origin])
    return entry


def _read(dataset: _Dataset, vocab_size: int, origin: Path) -> tuple[FileDigest, FileDigest]:
    """Check all tokens of a dataset and write the `.origin` of its documents; the digests of `.bin` and `.origin`."""
    shard = dataset.shard
    bin_hash, origin_hash, size_bytes = xxhash.xxh3_64(), xxhash.xxh3_64(), 0
    with durable_file(origin) as file:

        def write(content: bytes) -> None:
            nonlocal size_bytes
            file.write(content)
            origin_hash.update(content)
            size_bytes += len(content)

        write(origins_head(shard.num_documents, [str(shard.bin_path)]))
        for start, lengths in dataset.windows():
            write(shard.index.pointers[start : start + len(lengths)].astype("<u8").tobytes())
        for _, lengths in dataset.windows():
            write(bytes(4 * len(lengths)))
        for start, lengths in dataset.windows():
            write(np.arange(start, start + len(lengths), dtype="<u4").tobytes())
        for block, checks in _blocks(dataset, vocab_size):
            bin_hash.update(block)
            write(np.array(checks, "<u4").tobytes())
    return (
        FileDigest(shard.num_tokens * shard.dtype.itemsize, bin_hash.hexdigest()),
        FileDigest(size_bytes, origin_hash.hexdigest()),
    )


def _blocks(dataset: _Dataset, vocab_size: int) -> Iterator[tuple[bytes, list[int]]]:
    """Yield the bytes of all tokens in blocks of whole documents, with the documents' checks."""
    shard, itemsize = dataset.shard, dataset.shard.dtype.itemsize
    with reading(shard.bin_path), shard.bin_path.open("rb") as file:
        for start, lengths in dataset.windows():
            ends = np.cumsum(lengths) * itemsize
            first = 0
            while first < len(lengths):
                begin = int(ends[first - 1]) if first else 0
                last = max(int(np.searchsorted(ends, begin + dataset.pieces.block_bytes, side="right")), first + 1)
                block = file.read(int(ends[last - 1]) - begin)
                _check_block(shard, block, start + first, ends[first:last] - begin, vocab_size)
                stops = (ends[first:last] - begin).tolist()
                pointers = shard.index.pointers[start + first : start + last].tolist()
                checks = [
                    document_check(block[at:stop], pointer, 0, line)
                    for line, (at, stop, pointer) in enumerate(zip([0, *stops], stops, pointers), start + first)
                ]
                yield block, checks
                first = last


def _check_block(shard: TokenShard, block: bytes, first: int, ends: Int64s, vocab_size: int) -> None:
    """CheckFailed if the documents from `first` on, which end at these bytes, hold a token beyond the vocabulary."""
    if len(block) != ends[-1]:
        raise CheckFailed(f"{shard.bin_path} was cut short while it was read", hint=f"ls -l {quoted(shard.bin_path)}")
    tokens = np.frombuffer(block, shard.dtype)
    if len(tokens) and (tokens.max() >= vocab_size or tokens.min() < 0):
        at = int(np.argmax((tokens >= vocab_size) | (tokens < 0)))
        document = first + int(np.searchsorted(ends, at * shard.dtype.itemsize, side="right"))
        check_tokens(shard.bin_path, document, tokens[at : at + 1], vocab_size)
