"""Tokenizer: text to token ids, from a `tokenizer.json` (Hugging Face tokenizers), a sentencepiece `.model` or ranks
(a tiktoken file, or Mistral's tekken.json).

Ids are those of the libraries' own `encode`: special tokens that a tokenizer.json's post-processor adds are kept, its
truncation and padding are switched off. Special tokens that a text spells become their ids with tokenizers and, as
`allowed_special="all"`, with tiktoken, but not those of a tekken.json. The library is imported when a file of its kind
is opened.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from datakit.files.durable import reading, url_behind
from datakit.files.remote_file import is_url
from datakit.tokenization.encoded import Ids
from datakit.tokenization.identity import TokenizerIdentity
from datakit.tokenization.rank_file import RankFile, is_rank_file, is_tekken, read_rank_file, read_tekken, sidecar_path
from threefold.errors import UserError, listing, quoted
from threefold.packages import needed_for
from threefold.storage.hub import download_command, folder_of, is_hub_name
from threefold.storage.mistyped import refuse_mistyped

SUFFIXES = (".json", ".model", ".tiktoken")
NAMES = tuple(f"tokenizer{suffix}" for suffix in SUFFIXES)  # as model folders and token stores have them
TRAIN_HINT = "datakit train-tokenizer INPUT... --vocab-size 32768 --output tok.json"


def tokenizer_path(place: str | os.PathLike[str]) -> Path:
    """Return the path of a tokenizer's file: the one named, or that in a folder of a model or a store.

    UserError if there is none, with what was perhaps meant and how to come by it.
    """
    named = os.fspath(place)
    refuse_mistyped(named)
    path = Path(named)
    if url := url_behind(path):
        raise _not_here(named if is_url(named) else url)
    if path.is_dir():
        return _in_folder(path)
    if os.path.lexists(path) and path.suffix not in SUFFIXES:
        raise UserError(
            f"{path} is neither a tokenizer.json nor a sentencepiece .model file nor a .tiktoken file", hint=TRAIN_HINT
        )
    if path.suffix in SUFFIXES:
        return path
    name = named.removeprefix("hf:")
    if is_hub_name(name):
        raise _on_the_hub(named, name)
    raise UserError(f"no such tokenizer: {path}", hint=TRAIN_HINT)


def _in_folder(folder: Path) -> Path:
    file = next((folder / name for name in (*NAMES, "tekken.json") if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"the folder {folder} holds no {', '.join(NAMES)}", hint=listing(folder))
    return file


def _not_here(url: str) -> UserError:
    scheme, _, rest = url.partition("://")
    if scheme == "hf":
        return _on_the_hub(url, "/".join(rest.removesuffix("/tokenizer.json").split("/")[:2]))
    return UserError(
        f"a tokenizer is a file of this machine, and {url} is not",
        hint=f"copy it to a file tok.json first, then --tokenizer tok.json; {scheme}:// is for corpora and stores",
    )


def _on_the_hub(named: str, name: str) -> UserError:
    """Return the error for the name of a model, with the command that fetches its tokenizer."""
    file = quoted(f"{folder_of(name)}/tokenizer.json")
    return UserError(
        f"{named!r} is not a file here but a name on the Hugging Face Hub, and tokenizers are read from files",
        hint=f"{download_command(name, 'tokenizer.json')}, then --tokenizer {file}",
    )


DEFAULT_EOD = "<|endoftext|>"
MAX_FILE_BYTES = 1 << 30
_MAX_SHOWN = 8


class Tokenizer(Protocol):
    """What every kind of tokenizer offers."""

    kind: str
    fingerprint: str
    vocab_size: int

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, on one thread when TOKENIZERS_PARALLELISM is false."""

    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that are put before and after each text."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of ids."""

    def added_tokens(self) -> list[str]:
        """Return the tokens that are no parts of words.

        Found in text before it is cut into words, or by their ids alone.
        """

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, None if the vocabulary has none of this name."""


def open_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Open a tokenizer file, or the one in a folder of a model or store; UserError if it is none."""
    file = tokenizer_path(path)
    with reading(file):
        try:
            if (num_bytes := file.stat().st_size) > MAX_FILE_BYTES:
                raise UserError(
                    f"{file} has {num_bytes} bytes, more than a tokenizer's {MAX_FILE_BYTES}", hint=TRAIN_HINT
                )
            content = file.read_bytes()
        except FileNotFoundError:
            raise UserError(f"no such tokenizer: {file}", hint=TRAIN_HINT) from None
    if is_tekken(file, content):
        return TiktokenTokenizer(file, read_tekken(file, content))
    if is_rank_file(file, content):
        return TiktokenTokenizer(file, read_rank_file(file, content))
    if not content:
        raise UserError(f"{file} is empty", hint=TRAIN_HINT)
    kind = JsonTokenizer if file.suffix == ".json" else SentencePieceTokenizer
    try:
        return kind(content)
    except BaseException as error:  # the libraries raise bare Exceptions, RuntimeErrors or panics of their own
        if not gave_up(error):
            raise
        beside = file.with_name(NAMES[0])
        raise UserError(
            f"{file} cannot be read as a {kind.kind} tokenizer: {error}",
            hint=f"--tokenizer {quoted(beside)}" if beside != file and beside.is_file() else TRAIN_HINT,
        ) from error


def identify(tokenizer: Tokenizer, path: str, eod_token: str, *, required: bool) -> TokenizerIdentity:
    """Return the tokenizer's entry in a manifest; UserError if its end-of-document token is missing but required."""
    eod_id = tokenizer.token_id(eod_token)
    if eod_id is None and required:
        own = [token for token in tokenizer.added_tokens() if token]
        raise UserError(
            f"{path} has no token {eod_token!r} to end documents with"
            + (f"; of its own it has {', '.join(map(repr, own[:_MAX_SHOWN]))}" if own else "")
            + (f" and {len(own) - _MAX_SHOWN} more" if len(own) > _MAX_SHOWN else ""),
            hint=f"--eod-token {quoted(own[0] if len(own) == 1 else 'TOKEN')}" if own else TRAIN_HINT,
        )
    return TokenizerIdentity(
        kind=tokenizer.kind,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod_token=None if eod_id is None else eod_token,
        eod_id=eod_id,
    )


class JsonTokenizer:
    """A `tokenizer.json`, run by the `tokenizers` library."""

    kind = "tokenizers"

    def __init__(self, content: bytes) -> None:
        from tokenizers import Tokenizer as Library

        self.fingerprint = xxhash.xxh3_128_hexdigest(content)
        self._library: Any = Library.from_buffer(content)
        self._library.no_truncation()
        self._library.no_padding()
        self.vocab_size = 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        try:
            return [np.array(encoding.ids, np.uint32) for encoding in self._library.encode_batch_fast(list(texts))]
        except BaseException as error:
            if not gave_up(error):
                raise
        return [self._encode(number, text) for number, text in enumerate(texts)]

    def _encode(self, number: int, text: str) -> Ids:
        with _told(self.kind, number, text):
            return np.array(self._library.encode(text).ids, np.uint32)

    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        encoding = self._library.encode(_PLAIN)
        bare = [number for number, is_put in enumerate(encoding.special_tokens_mask) if not is_put]
        return (tuple(encoding.ids[: bare[0]]), tuple(encoding.ids[bare[-1] + 1 :])) if bare else ((), ())

    def added_tokens(self) -> list[str]:
        return [token.content for token in self._library.get_added_tokens_decoder().values()]

    def decode(self, ids: npt.ArrayLike) -> str:
        return str(self._library.decode(np.asarray(ids, np.uint32).tolist(), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        number = self._library.token_to_id(token)
        return None if number is None else int(number)


class SentencePieceTokenizer:
    """A sentencepiece `.model`; its text is what the model's own normaliser makes of the input."""

    kind = "sentencepiece"

    def __init__(self, content: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self.fingerprint = xxhash.xxh3_128_hexdigest(content)
        self._library: Any = SentencePieceProcessor(model_proto=content)
        self.vocab_size = int(self._library.vocab_size())

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(self._library.encode(text), np.uint32) for text in texts]

    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), ()

    def added_tokens(self) -> list[str]:
        library = self._library  # its user-defined symbols are pieces like any other
        return [
            str(library.id_to_piece(number))
            for number in range(self.vocab_size)
            if library.is_control(number) or library.is_unknown(number)
        ]

    def decode(self, ids: npt.ArrayLike) -> str:
        return str(self._library.decode(np.asarray(ids, np.uint32).tolist()))

    def token_id(self, token: str) -> int | None:
        found = int(self._library.piece_to_id(token))
        return found if self._library.id_to_piece(found) == token else None


class TiktokenTokenizer:
    """A rank file (see rank_file.py), run by the `tiktoken` library; special tokens in a text become their ids."""

    kind = "tiktoken"

    def __init__(self, path: Path, file: RankFile) -> None:
        with needed_for(f"{path}: reading ranks"):
            from tiktoken import Encoding
        self._path, self._file, self.fingerprint = path, file, file.fingerprint
        pattern, special_tokens = file.encoding.pattern, file.encoding.special_tokens
        try:
            self._library: Any = Encoding(
                path.name, pat_str=pattern, mergeable_ranks=file.ranks, special_tokens=special_tokens
            )
        except ValueError as error:
            raise UserError(
                f"tiktoken cannot split text by the pattern {pattern!r}: {error}",
                hint=f"cat {quoted(sidecar_path(path))}",
            ) from None
        self.vocab_size = 1 + int(self._library.max_token_value)
        [ids] = self.encode_batch([_EVERY_CLASS])
        if self.decode(ids) != _EVERY_CLASS:
            raise UserError(
                f"the pattern {pattern!r} leaves out parts of the text: {_EVERY_CLASS!r} becomes {self.decode(ids)!r}",
                hint=f"cat {quoted(sidecar_path(path))}",
            )

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self._encode(number, text) for number, text in enumerate(texts)]

    def _encode(self, number: int, text: str) -> Ids:
        with _told(self.kind, number, text):
            special = "all" if self._file.reads_special else set[str]()
            return np.asarray(self._library.encode_to_numpy(text, allowed_special=special, disallowed_special=()))

    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), ()

    def added_tokens(self) -> list[str]:
        return list(self._file.encoding.special_tokens)

    def decode(self, ids: npt.ArrayLike) -> str:
        try:
            return str(self._library.decode(np.asarray(ids, np.uint32).tolist()))
        except KeyError as error:
            raise UserError(f"{self._path}: {error.args[0]}", hint="was this made with another tokenizer?") from None

    def token_id(self, token: str) -> int | None:
        return self._file.encoding.special_tokens.get(token, self._file.ranks.get(token.encode()))


class TextFault(UserError):
    """A text that the tokenizer cannot take; `number` is its place in the batch."""

    def __init__(self, message: str, *, hint: str | None = None, number: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.number = number


@contextmanager
def _told(kind: str, number: int, text: str) -> Iterator[None]:
    """Raise a TextFault if a library fails, as at added tokens that overlap or at a million blanks in a row."""
    try:
        yield
    except BaseException as error:
        if not gave_up(error):
            raise
        raise TextFault(
            f"{kind} gives up on a text of {len(text):,} characters that begins {text[:40]!r}: "
            f"{' '.join(str(error).split())[:200]}",
            hint="--skip-invalid, or --tokenizer-backend gigatoken where that reads such a file",
            number=number,
        ) from None


def gave_up(error: BaseException) -> bool:
    """Return whether what a library raised is about what it was given to read: an Exception, or a panic of Rust."""
    is_panic = type(error).__name__ == "PanicException"  # it is not an Exception, and no module exports it
    return is_panic or (isinstance(error, Exception) and not isinstance(error, MemoryError))


_PLAIN = "a"
_EVERY_CLASS = "Aa's 12\t\n .,\r\n  é你\u0301🙂_\x00\u3000 \n"
