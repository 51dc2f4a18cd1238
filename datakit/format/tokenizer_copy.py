"""TokenizerCopy: the files of its tokenizer that a store keeps, so that no later command has to name them.

They are small, lie beside the manifest, which has their checksums, and are read when text is asked for. A store without
them is read as ever, by a tokenizer that is named.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import xxhash

from datakit.files.durable import FileDigest, reading, temporary_folder
from datakit.format.manifest import FILE_NAME, Manifest
from datakit.format.output import Output, key_of
from datakit.tokenization.rank_file import is_rank_file, is_tekken, read_rank_file, sidecar_path
from datakit.tokenization.tokenizer import MAX_FILE_BYTES, Tokenizer, open_tokenizer, tokenizer_path
from threefold.errors import CheckFailed, UserError, quoted


def tokenizer_copy(path: str, fingerprint: str) -> dict[str, bytes]:
    """Return the files of a tokenizer as a store has them, by name; UserError if its fingerprint is another.

    `tok.json` is `tokenizer.json` there, and the sidecar of a rank file `tokenizer.model` is `tokenizer.model.json`.
    """
    file = tokenizer_path(path)
    with reading(file):
        content = file.read_bytes()
        files = {f"tokenizer{file.suffix}": content}
        is_ranks = is_rank_file(file, content) and not is_tekken(file, content)
        if is_ranks and sidecar_path(file).is_file():
            files[f"tokenizer{file.suffix}.json"] = sidecar_path(file).read_bytes()
    current = read_rank_file(file, content).fingerprint if is_ranks else xxhash.xxh3_128_hexdigest(content)
    if current != fingerprint:
        raise UserError(
            f"{file} changed while the store was made: its fingerprint is {current}, not {fingerprint}",
            hint="put the tokenizer back that the store was begun with, then rerun the same command",
        )
    return files


def checked_tokenizer(place: str) -> Path:
    """Return the file of a tokenizer that a user named; CheckFailed if it is a store's copy that is damaged."""
    file = tokenizer_path(place)
    if Path(place).is_dir() and (Path(place) / FILE_NAME).is_file():
        for name, digest in Manifest.read(Path(place)).tokenizer_files.items():
            _checked(place, name, digest, lambda name: _content(Path(place, name)), "--tokenizer FILE is another")
    return file


def digests_of(files: Mapping[str, bytes]) -> dict[str, FileDigest]:
    """Return the entry of a copy in a manifest."""
    return {name: FileDigest.of(content) for name, content in files.items()}


def place_copy(output: Output, part: str, files: Mapping[str, bytes]) -> None:
    """Put a copy into one of an output's stores, whose manifest is written later."""
    for name, digest in digests_of(files).items():
        if not output.has(key_of(part, name), digest):
            output.write(key_of(part, name), files[name])


def open_copy(place: str, files: Mapping[str, FileDigest], read: Callable[[str], bytes | None]) -> Tokenizer | None:
    """Return the tokenizer of a store by its own copy of these files, None if it keeps none.

    `read` returns the bytes of a file, None if it is missing. CheckFailed if one is missing or damaged.
    """
    if not files:
        return None
    with tempfile.TemporaryDirectory(prefix="datakit-", dir=temporary_folder()) as folder:
        for name, digest in files.items():
            Path(folder, name).write_bytes(_checked(place, name, digest, read))
        return open_tokenizer(Path(folder, next(iter(files))))


def _checked(
    place: str,
    name: str,
    digest: FileDigest,
    read: Callable[[str], bytes | None],
    way_out: str = "--tokenizer FILE does without it",
) -> bytes:
    """Return the bytes of a file of a copy, once they are those that the store was made with."""
    if digest.size_bytes > MAX_FILE_BYTES:
        what = f"has {digest.size_bytes} bytes, more than a tokenizer's {MAX_FILE_BYTES}"
        raise damaged(place, name, what, way_out)
    content = read(name)
    if content is None:
        raise damaged(place, name, "is missing", way_out)
    if FileDigest.of(content) != digest:
        raise damaged(place, name, "is damaged: its checksum does not hold", way_out)
    return content


def _content(path: Path) -> bytes | None:
    with reading(path):
        return path.read_bytes() if path.is_file() else None


def damaged(place: str, name: str, what: str, way_out: str) -> CheckFailed:
    """Return the error for a copy that does not hold, with a way out."""
    return CheckFailed(
        f"{place}/{name}, the store's copy of its tokenizer, {what}",
        hint=f"{way_out}; datakit verify {quoted(place)}",
    )
