"""InputTable: what shows that a store's input changed since: ETags, times, and digests of what local files held.

The record is a hidden file beside the manifest and outside of all that is digested: no byte of a store depends on it,
and without it a change that keeps a file's size goes unseen. It holds columns in the order of the sorted input, whose
paths and sizes the manifest's digest of the input covers.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import orjson

from datakit.format.fields import Fields
from datakit.format.output import Output
from datakit.store.item_records import ItemRecord
from datakit.text.blocks import digest_of
from datakit.text.inputs import InputFile
from threefold.errors import CheckFailed, StorageError, UserError

FILE_NAME = ".sources.json"
_VERSION, _NUM_THREADS = 1, 8


@dataclass(frozen=True, slots=True)
class InputTable:
    """Columns over the sorted input files: times of change, ETags, and the slices that were read.

    Slice i of a file ends at byte `stops[i]` and had the XXH3-64 `digests[i]`; a file that has an ETag has none.
    """

    num_items: int
    modified_ns: list[int]
    etags: list[str]
    stops: list[list[int]]
    digests: list[list[str]]

    @classmethod
    def of(cls, files: Sequence[InputFile], records: Sequence[ItemRecord]) -> "InputTable":
        """Return what the items of these files read."""
        stops: dict[str, list[int]] = {file.path: [] for file in files}
        digests: dict[str, list[str]] = {file.path: [] for file in files}
        for record in records:
            for part, digest in zip(record.item.slices, record.digests):
                if digest:
                    stops[part.file.path].append(part.stop)
                    digests[part.file.path].append(digest)
        times, etags = [file.modified_ns for file in files], [file.etag for file in files]
        return cls(len(records), times, etags, list(stops.values()), list(digests.values()))

    @classmethod
    def parse(cls, place: str, content: bytes) -> "InputTable":
        """Read the content of the record at `place`; CheckFailed if it is damaged."""
        columns = dict(Fields.parse(place, content).raw)
        try:
            if (version := columns.pop("version", None)) != _VERSION:
                raise ValueError(f"version {version}, this program reads version {_VERSION}")
            sources = cls(**columns)
            lengths = {len(column) for column in (sources.modified_ns, sources.etags, sources.stops, sources.digests)}
            if len(lengths) != 1:
                raise ValueError(f"columns of {sorted(lengths)} files")
        except (TypeError, ValueError) as error:
            raise CheckFailed(
                f"{place} is damaged: {error}", hint="remove it: changes that keep the size of a file then go unseen"
            ) from None
        return sources

    def write(self, output: Output) -> None:
        """Put the record into an output."""
        output.write(FILE_NAME, orjson.dumps({"version": _VERSION, **asdict(self)}) + b"\n")

    def with_marks_of(self, files: Sequence[InputFile]) -> "InputTable":
        """Return the record with the times and ETags of files whose content is the same."""
        return replace(self, modified_ns=[file.modified_ns for file in files], etags=[file.etag for file in files])

    def touched(self, files: Sequence[InputFile]) -> list[int]:
        """Return the numbers of the files whose time or ETag is another one."""
        marks = zip(files, self.modified_ns, self.etags, strict=True)
        return [
            number
            for number, (file, modified_ns, etag) in enumerate(marks)
            if file.differs_from(replace(file, modified_ns=modified_ns, etag=etag))
        ]

    def changed(self, files: Sequence[InputFile], touched: Sequence[int]) -> list[InputFile]:
        """Return those of the touched files that hold other bytes, or of which that is not known; reads them."""
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            same = threads.map(lambda number: self._is_same(files[number], number), touched)
            return [files[number] for number, is_same in zip(touched, same) if not is_same]

    def _is_same(self, file: InputFile, number: int) -> bool:
        stops, digests = self.stops[number], self.digests[number]
        slices = zip(pairwise([0, *stops]), digests, strict=True)
        return stops[-1:] == [file.size_bytes] and all(digest_of(file, *ends) == digest for ends, digest in slices)


def require_unchanged(output: Output, files: Sequence[InputFile], report: Callable[[str], None]) -> InputTable | None:
    """Return the record of complete stores; UserError if one of its files, still as large, holds other bytes now.

    Files whose time alone is another one are read for that, which `report` says. None without a record.
    """
    content = output.read(FILE_NAME)
    if content is None:  # made before there were such records, or removed
        return None
    sources = InputTable.parse(f"{output.place}/{FILE_NAME}", content)
    if touched := sources.touched(files):
        report(f"of {len(files):,} source files {len(touched):,} were touched since: comparing them with what was read")
        if changed := sources.changed(files, touched):
            names = ", ".join(file.path for file in changed[:3]) + ", ..." * (len(changed) > 3)
            raise UserError(
                f"{output.place} was made of other content: of {len(files):,} source files {len(changed):,} changed "
                f"since: {names}",
                hint="choose another --output, or remove this one first",
            )
        with suppress(StorageError):  # it may be where nothing can be written; they are compared again then
            sources.with_marks_of(files).write(output)
    return sources
