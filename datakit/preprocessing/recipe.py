"""Recipe: all that decides, with the input, what bytes a store has; kept in the store, so that no rerun mixes two."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from datakit.files.remote_file import is_url
from datakit.format.tags import Tag
from datakit.text.documents import DocumentRules
from datakit.text.inputs import InputFile
from datakit.tokenization.identity import TokenizerIdentity
from datakit.tokenization.tokenizer import DEFAULT_EOD
from threefold.errors import UserError
from threefold.masking import masked

WHOLE, TRAIN, VALID = "", "train", "valid"
MOST_PROBED, PROBED_BYTES = 1024, 4096
RULES_VERSION = 2  # by version 1 a row of nulls was an empty document, and an end token that was there came twice


@dataclass(frozen=True, slots=True)
class Recipe:
    """How text becomes tokens: the tokenizer's file, its end-of-document token, and how documents are found and shared.

    `split` are the fractions of documents that go to the train and the valid store, by a hash of their text; None makes
    one store of all. `skip_invalid`, `skip_empty` and `max_chars` leave documents out (see documents.py), the first
    also those on which the tokenizer fails, `dedup` those whose text an earlier document of the input has (see
    duplicates.py). `tags` name parts of the input (see tags.py). `rules_version` says by which rules nulls and end
    tokens are written: a store is finished by those that it was begun under.
    """

    tokenizer: str
    eod_token: str = DEFAULT_EOD
    append_eod: bool = False
    text_key: str = "text"
    txt_split: str = "file"
    split: tuple[float, float] | None = None  # shares of the train and the valid store
    skip_invalid: bool = False  # leave out what cannot be read or tokenized
    skip_empty: bool = False  # leave out documents without a text
    max_chars: int | None = None  # leave out longer documents
    tags: tuple[Tag, ...] = ()  # names of parts of the input
    dedup: bool = False  # leave out texts that came before
    rules_version: int = RULES_VERSION

    def __post_init__(self) -> None:
        # so put that a NaN is refused too
        if self.split is not None and not (min(self.split) >= 0 and abs(sum(self.split) - 1) <= 1e-6):
            raise UserError(f"split fractions {self.split} do not sum to 1", hint="--split 0.99,0.01")
        if self.max_chars is not None and self.max_chars < 1:
            raise UserError(
                f"documents of at most {self.max_chars} characters: all would be left out", hint="--max-chars 1000000"
            )

    @property
    def rules(self) -> DocumentRules:
        """What the documents of the input are."""
        return DocumentRules(
            self.text_key,
            self.txt_split,
            self.skip_invalid,
            self.skip_empty,
            self.max_chars,
            nulls_are_empty=self.rules_version < 2,
        )

    def end(self, identity: TokenizerIdentity, after: Sequence[int]) -> tuple[int, ...]:
        """Return the ids to write after those of each document, which the tokenizer itself ends with `after`."""
        is_ended = self.rules_version >= 2 and tuple(after[-1:]) == (identity.eod_id,)
        return () if not self.append_eod or identity.eod_id is None or is_ended else (identity.eod_id,)

    @property
    def parts(self) -> tuple[str, ...]:
        """The folders, under the output, of the stores that come out."""
        return (WHOLE,) if self.split is None else (TRAIN, VALID)

    def part_of(self, text: str) -> str:
        """Return the store that a document goes to: its hash against the fraction, so equal texts go together."""
        if self.split is None:
            return WHOLE
        return TRAIN if xxhash.xxh3_64_intdigest(text.encode()) < self.split[0] * 2**64 else VALID

    def settings(self, part: str) -> dict[str, Any]:
        """Return what a store's manifest says of its making, paths and machine left out.

        Of options, only what is on.
        """
        options = {
            "skip_invalid": self.skip_invalid,
            "skip_empty": self.skip_empty,
            "max_chars": self.max_chars,
            "tags": [[tag.name, masked(tag.pattern)] for tag in self.tags],
            "dedup": self.dedup,
            "rules": self.rules_version if self.rules_version > 1 else None,
        }
        return {
            "append_eod": self.append_eod,
            "text_key": self.text_key,
            "txt_split": self.txt_split,
            "split": self.split and list(self.split),
            "part": part,
            **{name: value for name, value in options.items() if value},
        }


def rules_of(settings: Mapping[str, Any]) -> int:
    """Return the version of the rules by which a store of these settings is made."""
    version = settings.get("rules", 1)
    return version if isinstance(version, int) else RULES_VERSION


def input_digest(files: Sequence[InputFile]) -> str:
    """XXH3-64 over the paths and sizes of the input files."""
    return xxhash.xxh3_64_hexdigest(orjson.dumps([[masked(file.path), file.size_bytes] for file in files]))


def content_probe(files: Sequence[InputFile]) -> str:
    """XXH3-64 of what a glance shows of the content of the files: ETags, else their first and last bytes.

    Files of equal names and sizes on two machines may differ. Of many files some are looked at, evenly spread.
    """
    digest = xxhash.xxh3_64()
    for file in files[:: -(-len(files) // MOST_PROBED)]:
        digest.update(file.etag.encode() or _ends_of(file))
        digest.update(b"\0")
    return digest.hexdigest()


def _ends_of(file: InputFile) -> bytes:
    if is_url(file.path):  # without an ETag, and a request for each would take long
        return b""
    first = file.read_range(0, min(PROBED_BYTES, file.size_bytes))
    return first + file.read_range(max(file.size_bytes - PROBED_BYTES, 0), file.size_bytes)


def older_rules(recipe: Recipe) -> str:
    """Return what the rules of version 1 do otherwise with this recipe."""
    end = ", --append-eod writes an end token also after the tokenizer's own" if recipe.append_eod else ""
    return f"a row of nulls is an empty document{end}"


def require_same(
    place: str, old: tuple[TokenizerIdentity, dict[str, Any]], new: tuple[TokenizerIdentity, dict[str, Any]]
) -> None:
    """Raise UserError if what is at a place was made with another tokenizer or other settings."""
    if sentences := differences(*old, *new):
        raise UserError(
            f"{place} was made otherwise: {'; '.join(sentences)}",
            hint="rerun with what it was made with, or choose another --output",
        )


def differences(
    old: TokenizerIdentity, old_settings: dict[str, Any], new: TokenizerIdentity, new_settings: dict[str, Any]
) -> list[str]:
    """Sentences on what differs between two stores' tokenizers and settings."""
    sentences = []
    if old.fingerprint != new.fingerprint:
        sentences.append(f"its tokenizer is {old.fingerprint[:16]} ({old.vocab_size} tokens), "
                         f"this one {new.fingerprint[:16]} ({new.vocab_size})")  # fmt: skip
    elif old != new:
        sentences.append(f"its end-of-document token is {old.eod_token!r}, this one {new.eod_token!r}")
    changed = [name for name in new_settings | old_settings if old_settings.get(name) != new_settings.get(name)]
    return sentences + [
        f"its {name} is {old_settings.get(name)!r}, this one {new_settings.get(name)!r}" for name in changed
    ]
