"""ForeignStore: a store made of documents that other programs tokenized; every token is checked, none is changed.

Whoever knows a format names its files as `ForeignFile`s. Their samples become documents one by one, or are joined and
cut after the end-of-document token. Files are sealed in groups of about 256 MiB (whole streams where samples are
joined): a killed run continues after the last sealed group. Memory is one sample, one document and 24 bytes for each
document of a shard.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
import xxhash

from datakit.foreign.exact_reader import MAX_PIECE_BYTES
from datakit.format.fields import Fields
from datakit.format.manifest import FILE_NAME, WORK_FOLDER, Manifest, shard_entry
from datakit.format.output import ASSEMBLY_NOTE, Output
from datakit.format.shard import Tokens
from datakit.format.shard_entry import ShardEntry
from datakit.format.tokenizer_copy import digests_of, place_copy, tokenizer_copy
from datakit.store.claim import claim
from datakit.store.token_store import TokenStore, open_made
from datakit.store.writer import MAX_SHARD_DOCUMENTS, ShardSequence, store_dtype
from datakit.tokenization.identity import TokenizerIdentity
from datakit.tokenization.tokenizer import DEFAULT_EOD, identify, open_tokenizer
from threefold.errors import CheckFailed, UserError

TOKEN_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
AGAIN_HINT = "datakit preprocess INPUT... --output STORE --tokenizer tok.json"
_PROBED_SAMPLES, _MIN_EQUAL_SAMPLES, _MIN_ZEROS = 100, 16, 16
Fill = Callable[[Output, TokenizerIdentity], tuple[str, Sequence[ShardEntry]]]


@dataclass(frozen=True, slots=True)
class Pieces:
    """How much of a conversion is in memory, sealed together, or in one shard; the store's documents are the same."""

    window_documents: int = 1 << 16
    block_bytes: int = 8 << 20
    group_bytes: int = 256 << 20
    max_document_bytes: int = MAX_PIECE_BYTES
    max_shard_documents: int = MAX_SHARD_DOCUMENTS


@dataclass(frozen=True, slots=True)
class Choices:
    """What the user says of a conversion: the tokenizer's file and end-of-document token, and what the sources do not
    say: "items" (one document a sample), "eod" (one stream, cut after that token) or "auto"; the column; the dtype.
    """

    tokenizer: str
    eod_token: str = DEFAULT_EOD
    documents: str = "auto"
    column: str | None = None
    dtype: str | None = None
    pieces: Pieces = Pieces()


class ForeignFile(Protocol):
    """One file of samples."""

    @property
    def path(self) -> Path:
        """The file, as the documents' origins name it."""

    @property
    def stream(self) -> str:
        """Equal for files whose samples may be pieces of one stream."""

    @property
    def has_borders(self) -> bool:
        """Return whether its samples are documents, or rows; else they are blocks of one stream."""

    def samples(self) -> Iterator[tuple[Tokens, int]]:
        """Yield the tokens of each sample and the byte offset in the (uncompressed) file where they begin."""


@dataclass(frozen=True, slots=True)
class _Document:
    tokens: Tokens
    path: Path
    offset_bytes: int
    number: int  # in its file


def make_store(
    kind: str,
    files: Sequence[Path],
    output: str | os.PathLike[str],
    choices: Choices,
    fill: Fill,
    *,
    settings: dict[str, Any] | None = None,
) -> TokenStore:
    """Make the store of what these files hold; `fill` puts its shards into the output, and returns the dtype and them.

    The same call continues after a kill, and returns the store if that is complete.
    """
    identity, place = identify_tokenizer(choices), Output(os.fspath(output), ASSEMBLY_NOTE)
    stats = [file.stat() for file in files]
    sizes = [[str(file), stat.st_size] for file, stat in zip(files, stats)]
    settings = {
        "converted_from": kind,
        **(settings or {}),
        "input": {
            "num_files": len(files),
            "size_bytes": sum(stat.st_size for stat in stats),
            "xxh3_64": xxhash.xxh3_64_hexdigest(orjson.dumps(sizes)),
        },
    }
    complete = place.manifest()
    if complete and (complete.tokenizer, complete.settings) == (identity, settings):
        place.settle()
        return open_made(place.place, complete)
    made_of = {"settings": settings, "changed_ns": [stat.st_mtime_ns for stat in stats], "tokenizer": asdict(identity)}
    with claim(place, made_of):
        dtype, entries = fill(place, identity)
        copy = tokenizer_copy(choices.tokenizer, identity.fingerprint)
        place_copy(place, "", copy)
        manifest = Manifest(dtype, identity, tuple(entries), settings, tokenizer_files=digests_of(copy))
        place.commit({FILE_NAME: manifest.encode()})
    return open_made(place.place, manifest)


def store_of_files(
    kind: str, files: Sequence[ForeignFile], inputs: Sequence[Path], output: str | os.PathLike[str], choices: Choices
) -> TokenStore:
    """Make a store of the samples of these files; `inputs` are all files that decide them, the indices too."""
    if choices.dtype is not None:
        _refuse_narrow(files, choices.dtype)
    joins = _joins(files, choices)
    settings = {"documents": "eod" if joins else "items"}
    settings |= {name: value for name in ("column", "dtype") if (value := getattr(choices, name)) is not None}

    def fill(output: Output, identity: TokenizerIdentity) -> tuple[str, list[ShardEntry]]:
        streams = (list(stream) for _, stream in groupby(files, key=lambda file: file.stream))
        groups = streams if joins else _groups(files, choices.pieces.group_bytes)
        eod_id = identity.eod_id if joins else None
        return store_dtype(identity.vocab_size), [
            entry
            for number, group in enumerate(groups)
            for entry in _sealed(output, number, group, identity.vocab_size, eod_id, choices.pieces)
        ]

    return make_store(kind, inputs, output, choices, fill, settings=settings)


def identify_tokenizer(choices: Choices) -> TokenizerIdentity:
    """Return the tokenizer's entry in the manifest; raise UserError if it lacks the end-of-document token."""
    return identify(
        open_tokenizer(choices.tokenizer),
        choices.tokenizer,
        choices.eod_token,
        required=choices.eod_token != DEFAULT_EOD or choices.documents == "eod",
    )


def check_tokens(path: Path, document: int, tokens: Tokens, vocab_size: int) -> None:
    """CheckFailed if a token of a document is beyond the vocabulary."""
    if not len(tokens) or (int(tokens.max()) < vocab_size and int(tokens.min()) >= 0):
        return
    wrong = tokens[np.argmax((tokens >= vocab_size) | (tokens < 0))]
    raise CheckFailed(
        f"{path}: document {document} holds token {wrong}, beyond the vocabulary of {vocab_size}",
        hint="--tokenizer FILE, the one that made the tokens; of raw bytes also another --dtype",
    )


def _joins(files: Sequence[ForeignFile], choices: Choices) -> bool:
    """Return whether samples are joined and cut after the end-of-document token.

    Of its own accord only where the samples are blocks of a stream, or look like rows packed out of one: the first ones
    are all of one length, and that token is among them.
    """
    if choices.documents == "eod" or not files:
        return choices.documents == "eod"
    streams = [file.path for file in files if not file.has_borders]
    if 0 < len(streams) < len(files):  # a lost index looks like that
        raise UserError(
            f"{streams[0]} has no borders between documents, other sources have",
            hint="convert them apart and merge the stores, or choose --documents eod for all",
        )
    eod_id = identify_tokenizer(choices).eod_id if choices.documents == "auto" else None
    if eod_id is None:
        return False
    if streams:
        return True
    lengths, has_eod = [], False
    for tokens in _probed(files):
        lengths.append(len(tokens))
        has_eod = has_eod or bool((tokens == eod_id).any())
    return has_eod and len(lengths) >= _MIN_EQUAL_SAMPLES and len(set(lengths)) == 1


def _refuse_narrow(files: Sequence[ForeignFile], dtype: str) -> None:
    """UserError if a dtype that the user gave is narrower than the tokens: every second one is then 0."""
    num_zeros, has_others = 0, False
    for tokens in _probed(files):
        if tokens[1::2].any():
            return
        num_zeros += len(tokens) // 2
        has_others = has_others or bool(tokens.any())
    if has_others and num_zeros >= _MIN_ZEROS:
        raise UserError(f"{files[0].path} holds no {dtype}: every second token is 0", hint="--dtype of twice the size")


def _probed(files: Sequence[ForeignFile]) -> Iterator[Tokens]:
    """Yield the first samples, one at a time."""
    samples = chain.from_iterable(file.samples() for file in files)
    return (tokens for tokens, _ in islice(samples, _PROBED_SAMPLES))


def _groups(files: Sequence[ForeignFile], group_bytes: int) -> Iterator[list[ForeignFile]]:
    """Files in their order, together about `group_bytes`; the cut depends on their sizes alone."""
    group: list[ForeignFile] = []
    size_bytes = 0
    for file in files:
        group.append(file)
        size_bytes += file.path.stat().st_size
        if size_bytes >= group_bytes:
            yield group
            group, size_bytes = [], 0
    if group:
        yield group


def _sealed(
    output: Output, number: int, group: Sequence[ForeignFile], vocab_size: int, eod_id: int | None, pieces: Pieces
) -> list[ShardEntry]:
    """Put the shards of one group into the output, then note them; those that an earlier run noted are kept."""
    note = f"{WORK_FOLDER}/group-{number:06}.json"
    if found := output.read(note):
        with suppress(CheckFailed):  # a damaged note: the group is made again
            kept = [shard_entry(fields) for fields in Fields.parse(note, found).tables("shards")]
            if all(output.has(name, digest) for entry in kept for name, digest in entry.files().items()):
                return kept
    max_bytes = pieces.max_document_bytes
    documents = _joined(group, eod_id, max_bytes) if eod_id is not None else _single(group, max_bytes)
    dtype = store_dtype(vocab_size)
    name = f"shard-{number:06}-{{:03}}".format
    with ShardSequence(output.scratch, dtype, name, pieces.max_shard_documents) as shards:
        for document in documents:
            check_tokens(document.path, document.number, document.tokens, vocab_size)
            tokens = document.tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
            shards.current().add(tokens, str(document.path), document.offset_bytes, document.number)
        entries = shards.finish()
    output.adopt("", [output.scratch / name for entry in entries for name in entry.files()])
    output.write(note, orjson.dumps({"shards": [asdict(entry) for entry in entries]}))
    return entries


def _single(group: Iterable[ForeignFile], max_bytes: int) -> Iterator[_Document]:
    """One document a sample; a file without borders is one document."""
    for file in group:
        if not file.has_borders:
            yield from _joined([file], None, max_bytes)
            continue
        for number, (tokens, offset_bytes) in enumerate(file.samples()):
            yield _Document(tokens, file.path, offset_bytes, number)


def _joined(group: Iterable[ForeignFile], eod_id: int | None, max_bytes: int) -> Iterator[_Document]:
    """All samples as one stream, cut after each end-of-document token; what follows the last is a document too."""
    parts: list[Tokens] = []
    begin: tuple[Path, int, int] = Path(), 0, 0
    size_bytes = 0
    for file in group:
        number = 0
        for tokens, offset_bytes in file.samples():
            ends = [] if eod_id is None else (np.flatnonzero(tokens == eod_id) + 1).tolist()
            for start, end in zip([0, *ends], [*ends, len(tokens)]):
                if start == end:
                    continue
                if not parts:
                    begin, number = (file.path, offset_bytes + start * tokens.itemsize, number), number + 1
                parts.append(tokens[start:end])
                size_bytes += parts[-1].nbytes
                if size_bytes > max_bytes:
                    raise CheckFailed(
                        f"{begin[0]}: document {begin[2]} has more than {max_bytes} bytes of tokens",
                        hint="name the token that ends documents with --eod-token, or --documents items",
                    )
                if tokens[end - 1] == eod_id:
                    yield _Document(np.concatenate(parts), *begin)
                    parts, size_bytes = [], 0
    if parts:
        yield _Document(np.concatenate(parts), *begin)
