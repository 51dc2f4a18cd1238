"""Finding: the files, objects and pipes that arguments name, and a count of what is beside them and not read."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial

from datakit.files.remote_file import is_url, storage_of
from datakit.text.folders import Faults, entries_below, is_hidden, is_through_link, matches_of, plain_path
from datakit.text.formats import format_of, other_kind
from datakit.text.spool import is_pipe
from threefold.errors import UserError, listing, quoted
from threefold.storage import ObjectInfo
from threefold.storage.mistyped import url_meant
from threefold.storage.repeating import open_repeating

_NUM_NAMED_KINDS, _NUM_NAMED = 5, 3
_STEP = re.compile(r"step-[0-9]{9,15}")  # how ckptkit names the folder of a step
_NUM_REQUESTS = 64  # side by side, where many URLs are named


@dataclass
class Found:
    """Paths of local files, objects by their URLs, pipes; of folders and globs also the number of names not read.

    `led_to` has each way to a file, with the number of the argument that led there. `repeated` are paths and URLs that
    another argument leads to as well, `faults` what names nothing or cannot be looked into.
    """

    files: set[str] = field(default_factory=set)
    led_to: list[tuple[str, int]] = field(default_factory=list)
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    pipes: set[str] = field(default_factory=set)
    repeated: list[str] = field(default_factory=list)
    faults: Faults = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    num_hidden: int = 0

    def notice(self) -> str | None:
        """Return one line on what was not read, None if there is nothing to say."""
        kinds = [f"{kind} ({count:,})" for kind, count in self.unread.most_common(_NUM_NAMED_KINDS)]
        if more := len(self.unread) - len(kinds):
            kinds.append(f"{more} more kinds")
        others, num_hidden = self.unread.total(), self.num_hidden
        what = "file of other kinds was" if others == 1 else "files of other kinds were"
        unread = f"{others:,} {what} not read: {', '.join(kinds)}" if others else ""
        names = "name was" if num_hidden == 1 else "names were"
        hidden = f"{num_hidden:,} hidden {names} not read" if num_hidden else ""
        return "; ".join(filter(None, (unread, hidden))) or None

    def once_notice(self) -> str | None:
        """Return one line on what was named more than once, None if nothing was."""
        names = list(dict.fromkeys(self.repeated))
        more = f" and {len(names) - _NUM_NAMED:,} more" if len(names) > _NUM_NAMED else ""
        return f"read once, though named more than once: {', '.join(names[:_NUM_NAMED])}{more}" if names else None

    def sort_in(self, path: str, key: str, argument: int, info: ObjectInfo | None = None) -> None:
        """Take a file or object that a folder or glob led to, or count it as not read; `key` is what was below it."""
        if is_hidden(key):
            self.num_hidden += 1
        elif format_of(key) is None:
            self.unread[other_kind(key)] += 1
        elif info:
            self.add_object(path, info)
        else:
            self.led_to.append((path, argument))

    def add_object(self, url: str, info: ObjectInfo) -> None:
        """Take an object."""
        if url in self.objects:
            self.repeated.append(url)
        self.objects[url] = info


def find(arguments: Sequence[str], but: Sequence[str] = ()) -> Found:
    """Return what these files, folders, globs and URLs of such name.

    Folders are searched through and through, hidden names and the local paths of `but` left out; each real folder
    counts once.
    """
    inputs, folders = Found(), dict[str, int]()
    for number, argument in enumerate(arguments):
        if not is_url(argument):
            for folder in _find_local(argument, number, inputs):
                inputs.repeated += [folder] * (folders.setdefault(folder, number) != number)

    @cache
    def owner(folder: str) -> int:
        above = (path or "." for path in (folder, *_parents(folder)))
        return next((folders[path] for path in above if path in folders), -1)

    for entry in entries_below(folders, but, inputs.faults):
        if (entry.is_symlink() or not entry.is_file()) and is_pipe(entry.path):  # an ordinary file is not looked up
            inputs.unread["pipe or device"] += 1
        else:
            inputs.sort_in(entry.path.removeprefix("./"), entry.name, owner(os.path.dirname(entry.path)))
    inputs.repeated += _inside(folders)
    inputs.files = set(_once(inputs.led_to, inputs.repeated))
    urls = list(filter(is_url, arguments))
    inputs.repeated += (url for url, count in Counter(urls).items() if count > 1)
    with ThreadPoolExecutor(_NUM_REQUESTS) as threads:
        for folder, objects in threads.map(partial(_find_remote, faults=inputs.faults), dict.fromkeys(urls)):
            for key, info in objects.items():
                if key:
                    inputs.sort_in(f"{folder}/{key}", key, -1, info)
                else:
                    inputs.add_object(folder, info)
    return inputs


def checkpoint_in(folder: str) -> str | None:
    """Return in words which part of a run of checkpoints a folder is, None if it is none."""
    if os.path.isfile(f"{folder}/root.json"):
        return "a step of a run of checkpoints"
    with suppress(OSError):
        if any(map(_STEP.fullmatch, os.listdir(folder))):
            return "a run of checkpoints"
    return None


def _stored(folder: str) -> UserError | None:
    """Return the fault of a folder of tokens or tensors, whose records are no text, None for any other."""
    if checkpoint := checkpoint_in(folder):
        return UserError(f"{folder} is not text but {checkpoint}", hint=f"ckptkit inspect {quoted(folder)}")
    if os.path.isfile(f"{folder}/manifest.json") and glob.glob(f"{glob.escape(folder)}/shard-*.bin"):
        return UserError(
            f"{folder} is not text but a token store",
            hint=f"datakit inspect {quoted(folder)}; several stores become one with datakit merge",
        )
    return None


def _find_local(argument: str, number: int, inputs: Found) -> Iterator[str]:
    """Put files and pipes that an argument names into `inputs`, return its folders."""
    is_named = is_pipe(argument) or os.path.lexists(argument)
    matches = [argument] if is_named else matches_of(argument, inputs.faults) if glob.has_magic(argument) else []
    if not matches:
        url = url_meant(argument)
        what = f"no such input: {argument}" + (", and a URL has a colon" if url else "")
        inputs.faults.append(UserError(what, hint=quoted(url) if url else listing(argument)))
    for path in matches:
        if is_pipe(path):
            inputs.repeated += [path] * (path in inputs.pipes)
            inputs.pipes.add(path)
        elif not os.path.isdir(path):
            if is_named:
                inputs.led_to.append((plain_path(path), number))
            else:
                inputs.sort_in(plain_path(path), os.path.basename(path), number)
        elif fault := _stored(path):
            inputs.faults.append(fault)
        else:
            yield plain_path(path)


def _inside(folders: Mapping[str, int]) -> Iterator[str]:
    """Return those of some folders that are, or are below, one of another argument, and are so read with it."""
    arguments: dict[str, int] = {}
    for folder, number in folders.items():
        if arguments.setdefault(os.path.realpath(folder), number) != number:
            yield folder
    for folder, number in folders.items():
        place = os.path.realpath(folder)
        above = [parent for parent in _parents(place) if arguments.get(parent, number) != number]
        if any(not is_hidden(os.path.relpath(place, parent)) for parent in above):
            yield folder


def _parents(path: str) -> Iterator[str]:
    while path != (path := os.path.dirname(path)):
        yield path


def _once(files: Iterable[tuple[str, int]], repeated: list[str]) -> Iterator[str]:
    """Return the files without those that lead to the same name in the same real folder; one without links is kept.

    The others are put into `repeated` if another argument led to them.
    """
    real_folder, has_link = cache(os.path.realpath), cache(is_through_link)
    seen: dict[tuple[str, str], int] = {}
    for path, argument in sorted(files, key=lambda file: (has_link(os.path.dirname(file[0])), file)):
        folder, name = os.path.split(path)
        if (place := (real_folder(folder), name)) not in seen:
            seen[place] = argument
            yield path
        elif seen[place] != argument:
            repeated.append(path)


def _find_remote(url: str, faults: Faults) -> tuple[str, dict[str, ObjectInfo]]:
    """Return a folder and the objects below it that a URL names; for one object itself that, under the key "".

    What cannot be listed, and what is not there, goes into `faults`.
    """
    try:
        folder, objects = _listed(url)
    except UserError as error:
        faults.append(error)
        return url, {}
    if not objects:
        faults.append(UserError(f"no such input: {url}", hint="check the URL; a folder must hold text files"))
    return folder, objects


def _listed(url: str) -> tuple[str, dict[str, ObjectInfo]]:
    if not glob.has_magic(url):
        storage, name = storage_of(url)
        if name and not url.endswith("/") and (info := storage.info(name)):
            return url, {"": info}
        folder, pattern = url.rstrip("/"), re.compile("")  # which matches all
    else:
        folder = url[: re.search(r"[*?[]", url).start()].rpartition("/")[0]  # type: ignore[union-attr]  # has_magic
        pattern = _compiled(url[len(folder) + 1 :])
    return folder, {info.key: info for info in open_repeating(folder).list() if pattern.match(info.key)}


def _compiled(pattern: str) -> re.Pattern[str]:
    """Return what matches the keys of a glob, in which `*` stays within a folder and `**` does not."""
    from fsspec.utils import glob_translate

    try:
        return re.compile(glob_translate(pattern))
    except ValueError as error:
        raise UserError(f"{pattern} is not a glob: {error}", hint="write ** alone between slashes") from None
