"""Formats: what the name of a file says about its content, in any case of letters."""

import os

from threefold.errors import UserError, is_utf8, quoted

LINE_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".txt": "txt"}
COLUMN_KINDS = {".parquet": "parquet", ".arrow": "arrow"}  # compressed inside, never as a whole
COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".xz": "xz", ".bz2": "bz2"}
SHOWN_BY = {"": "cat", "gz": "zcat", "zst": "zstdcat", "xz": "xzcat", "bz2": "bzcat"}
NAMES_HINT = (
    f"name files like {' '.join(f'*{suffix}' for suffix in LINE_KINDS)}, plain or with {' '.join(COMPRESSIONS)}, "
    f"or {' '.join(f'*{suffix}' for suffix in COLUMN_KINDS)}"
)
PIPE_FORMAT = ("jsonl", "")


def format_of(name: str) -> tuple[str, str] | None:
    """Return the kind and the compression ("" for none) that a name says, None if files of that name are not read."""
    stem, suffix = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(suffix, "")
    kind = LINE_KINDS.get(os.path.splitext(stem)[1] if compression else suffix) or COLUMN_KINDS.get(suffix)
    return (kind, compression) if kind else None


def is_lines(kind: str) -> bool:
    """Return whether files of a kind are text of lines, not tables of columns."""
    return kind in LINE_KINDS.values()


def known_format(path: str, default: tuple[str, str] | None = None) -> tuple[str, str]:
    """Return the format of a file that is to be read, or `default`; UserError if there is none or it cannot be read."""
    known = format_of(path) or default
    if known is None:
        raise UserError(
            f"{path} is not text that can be read, by its name",
            hint=f"mv {quoted(path)} {quoted(path)}.jsonl, if that is what it holds; {NAMES_HINT}",
        )
    if not is_utf8(path):
        raise UserError(f"the name {path!r} is not UTF-8", hint=f"mv {quoted(path)} NEW{os.path.splitext(path)[1]}")
    return known


def other_kind(name: str) -> str:
    """Return the end of a name that is not read, by which such names are counted: ".csv.gz" or "no suffix"."""
    stem, suffix = os.path.splitext(os.path.basename(name).lower())
    before = os.path.splitext(stem)[1] if suffix in COMPRESSIONS else ""
    return before + suffix or "no suffix"
