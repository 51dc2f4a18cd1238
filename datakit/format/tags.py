"""Tags: names for parts of a corpus, given to source files by patterns; a document has the tag of its source file.

A store's settings hold the names and patterns, so a document's tag follows from its source's path: no byte a document.
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any

from datakit.files.remote_file import is_url
from datakit.format.manifest import Manifest
from datakit.text.folders import plain_path
from threefold.errors import CheckFailed, UserError, quoted


@dataclass(frozen=True, slots=True)
class Tag:
    """A name for the files that a pattern matches: a file, all below a folder, or a glob of either.

    Part by part of the path `*`, `?` and `[...]` match within a part, `**` any number of parts.
    """

    name: str
    pattern: str

    @classmethod
    def parse(cls, text: str) -> "Tag":
        """Return the tag of `NAME=GLOB`, its pattern in the form that paths of inputs have.

        ValueError if it is none.
        """
        name, _, pattern = text.partition("=")
        if not name or not pattern:
            raise ValueError(f"{text!r} is not a tag like code=corpus/code")
        return cls(name, pattern if is_url(pattern) else plain_path(pattern))

    def matches(self, path: str) -> bool:
        """Return whether a source file has this tag, where no earlier one matches it."""
        parts = path.split("/")
        reached = {0}  # how many parts of the path what was seen of the pattern may mean
        for pattern in self.pattern.split("/"):
            if pattern == "**":
                reached = set(range(min(reached), len(parts) + 1))
            else:
                reached = {at + 1 for at in reached if at < len(parts) and fnmatchcase(parts[at], pattern)}
            if not reached:
                return False
        return True


def tag_of(tags: Iterable[Tag], path: str) -> str | None:
    """Return the name of the first tag that matches a path."""
    return next((tag.name for tag in tags if tag.matches(path)), None)


def require_matches(tags: Sequence[Tag], paths: Sequence[str]) -> None:
    """Raise UserError if a tag matches none of these paths."""
    for tag in tags:
        if not any(map(tag.matches, paths)):
            raise UserError(
                f"tag {tag.name!r} matches no input file: {tag.pattern}",
                hint=f"--tag {quoted(f'{tag.name}={os.path.dirname(paths[0]) or paths[0]}')}",
            )


class StoreTags:
    """The tags of a store's source files; a merged store has those of each of its parts."""

    def __init__(self, manifest: Manifest, path: Path | str) -> None:
        """Read them from the settings of the manifest at `path`; CheckFailed if those are malformed."""
        try:
            parts = list(_parts(manifest.settings, (), len(manifest.shards)))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise CheckFailed(f"{path}: settings.tags or settings.merged is malformed: {error!r}") from error
        self._ends = list(accumulate(num_shards for num_shards, _ in parts))
        self._tags = [tags for _, tags in parts]
        if parts and self._ends[-1] != len(manifest.shards):
            raise CheckFailed(
                f"{path}: settings.merged speaks of {self._ends[-1]} shards, there are {len(manifest.shards)}"
            )

    def __bool__(self) -> bool:
        return any(self._tags)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tags, each once."""
        return tuple(dict.fromkeys(tag.name for tags in self._tags for tag in tags))

    def of(self, shard: int, path: str) -> str | None:
        """Return the tag of a source file of a shard, None if it has none."""
        return tag_of(self._tags[bisect_right(self._ends, shard)], path)


def _parts(settings: Any, inherited: tuple[Tag, ...], num_shards: int) -> Iterator[tuple[int, tuple[Tag, ...]]]:
    """Yield the tags of each run of shards; a merge keeps what its parts share once for all of them."""
    tags = tuple(_tag(*pair) for pair in settings["tags"]) if "tags" in settings else inherited
    if "merged" not in settings:
        yield num_shards, tags
    for part in settings.get("merged", ()):
        yield from _parts(part["settings"], tags, int(part["num_shards"]))


def _tag(name: Any, pattern: Any) -> Tag:
    if not isinstance(name, str) or not isinstance(pattern, str):
        raise TypeError(f"{name!r}, {pattern!r} are not texts")
    return Tag(name, pattern)
