"""Duplicates: the documents whose text an earlier one has, found by 128-bit hashes of all documents of all work items.

The hashes are shuffled into buckets that fit into memory, each bucket's repeats are found, and these are shuffled back
into the order of the input: O(documents) of sequential reading and writing, 200 to 500 MiB of memory for any number of
documents and of repeats. What comes out is one file, which holds for each item the ordinals of its duplicates.

Workers make the hashes first, an item at a time: the XXH3-128 of the UTF-8 text of each document that the rules keep.
They are in a file of the item's own below `.work/hashes`, with a record that is written last: only that makes the item
done, so a kill costs at most one item's reading. Memory is 64 KiB and one document.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from datakit.dedup.shuffle import MAX_BUCKETS, Shuffle, UInt64s
from datakit.files.durable import durable_file, writing
from datakit.format.manifest import WORK_FOLDER
from datakit.format.output import Output
from datakit.format.shard import Int64s
from datakit.store.item_records import RECORDS_FOLDER, Progress, fields_of_record
from datakit.text.documents import DocumentReader, DocumentRules, Documents
from datakit.text.inputs import WorkItem
from threefold.errors import CheckFailed, UserError

HASH_BYTES = 16
FOLDER = f"{WORK_FOLDER}/hashes"
_NAME = "duplicates"
_KEY = f"{WORK_FOLDER}/{_NAME}"
_HEADER = Struct("<8sQQ")  # magic, identity of the hashes, number of items
_MAGIC = b"TFDUPLIC"
_ITEM = np.dtype([("begin", "<u8"), ("num_duplicates", "<u8"), ("num_documents", "<u8")])
_ROW_BYTES = 24  # a hash and the document's number in the corpus


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of the hashes, and of the places of duplicates, is in memory at once."""

    bucket_bytes: int = 48 << 20
    hash_run_bytes: int = 128 << 20
    place_run_bytes: int = 64 << 20
    group_documents: int = 1 << 22
    max_buckets: int = MAX_BUCKETS

    def groups(self, count: int, group: int) -> int:
        """Return how many groups of a size some things make, at least one and no more than a shuffle can have."""
        return min(max(-(-count // group), 1), self.max_buckets)


@dataclass(frozen=True, slots=True)
class ItemHashes:
    """The file of the XXH3-128 of an item's documents in order (16 bytes each), their number, and its XXH3-64."""

    output: Output
    key: str
    num_documents: int
    xxh3_64: str

    def blocks(self) -> Iterator[UInt64s]:
        """Yield the hashes in order, as rows of two numbers, some MiB at a time."""
        for block in self.output.blocks(self.key):
            yield np.frombuffer(block, "<u8").reshape(-1, 2)


def find_repeats(hashes: UInt64s) -> npt.NDArray[np.bool_]:
    """Return which rows (of two numbers) equal a row before them."""
    is_repeat = np.zeros(len(hashes), bool)
    first = np.ascontiguousarray(hashes[:, 0])
    order = np.argsort(first)
    tied = np.flatnonzero(first[order[1:]] == first[order[:-1]])
    suspects = is_repeat.copy()  # few, unless much repeats: only they are sorted by the whole row, and stably
    suspects[order[tied]] = suspects[order[tied + 1]] = True
    at = np.flatnonzero(suspects)
    rows = hashes[at]
    order = np.lexsort((rows[:, 1], rows[:, 0]))
    repeats = (rows[order[1:]] == rows[order[:-1]]).all(axis=1)
    is_repeat[at[order[1:][repeats]]] = True
    return is_repeat


def write_duplicates(output: Output, items: Sequence[ItemHashes], sizes: Sizes = Sizes()) -> int:
    """Write the file of the duplicates of these items, whole or not at all, and return how many there are in all."""
    with writing(output.scratch):
        output.scratch.mkdir(parents=True, exist_ok=True)
    starts = np.concatenate([[0], np.cumsum([item.num_documents for item in items], dtype=np.int64)])
    num_groups = sizes.groups(int(starts[-1]), sizes.group_documents)
    group_documents = np.uint64(max(sizes.group_documents, -(-int(starts[-1]) // num_groups)))
    path = output.scratch / _NAME
    with Shuffle(output.scratch, num_groups, 1, run_bytes=sizes.place_run_bytes) as places:
        for repeats in _repeats(output.scratch, items, starts, sizes):
            places.add(repeats // group_documents, repeats[:, None])
        places.finish()
        table = np.zeros(len(items), _ITEM)
        table["num_documents"] = np.diff(starts)
        with durable_file(path) as file:
            file.seek(_HEADER.size + table.nbytes)
            for group in range(num_groups):
                numbers = [rows[:, 0] for rows in places.read(group, sizes.place_run_bytes)]
                at = np.sort(np.concatenate(numbers)).astype(np.int64) if numbers else np.zeros(0, np.int64)
                owners = np.searchsorted(starts, at, side="right") - 1
                table["num_duplicates"] += np.bincount(owners, minlength=len(items)).astype(np.uint64)
                file.write((at - starts[owners]).astype("<u4").data)
            table["begin"][1:] = np.cumsum(table["num_duplicates"])[:-1]
            file.seek(0)
            file.write(_HEADER.pack(_MAGIC, _identity(items), len(items)) + table.tobytes())
    output.adopt(WORK_FOLDER, [path])
    return int(table["num_duplicates"].sum())


def are_duplicates_of(output: Output, items: Sequence[ItemHashes]) -> bool:
    """Return whether a file of duplicates is there, and of these hashes."""
    header = _HEADER.pack(_MAGIC, _identity(items), len(items))
    return (output.size_of(_KEY) or 0) >= len(header) and output.read_range(_KEY, 0, len(header)) == header


class Duplicates:
    """The file of duplicates that `write_duplicates` put into an output."""

    def __init__(self, output: Output, *, read_ordinals: int = 1 << 16) -> None:
        """Read its header; of an item's ordinals, this many are read at once."""
        self._output, self._read_ordinals = output, read_ordinals
        _, _, num_items = _HEADER.unpack(output.read_range(_KEY, 0, _HEADER.size))
        self._begin = _HEADER.size + num_items * _ITEM.itemsize

    def of_item(self, number: int) -> "ItemDuplicates":
        """Return the duplicates of one item, to be left out once."""
        at = _HEADER.size + number * _ITEM.itemsize
        row = np.frombuffer(self._output.read_range(_KEY, at, at + _ITEM.itemsize), _ITEM)[0]
        begin, num_duplicates, num_documents = row.tolist()
        return ItemDuplicates(self._ordinals(begin, begin + num_duplicates), num_documents)

    def _ordinals(self, begin: int, end: int) -> Iterator[int]:
        for first in range(begin, end, self._read_ordinals):
            start, stop = (self._begin + 4 * at for at in (first, min(first + self._read_ordinals, end)))
            yield from np.frombuffer(self._output.read_range(_KEY, start, stop), "<u4").tolist()


class ItemDuplicates:
    """Leaves the duplicates out of an item's documents, and counts them."""

    def __init__(self, ordinals: Iterator[int], num_documents: int) -> None:
        """`ordinals` are those of the duplicates among the item's documents, ascending."""
        self._ordinals, self._num_documents = ordinals, num_documents
        self._next = next(ordinals, None)
        self._passed = 0
        self.num_left_out = 0

    def leave_out(self, documents: Documents) -> Documents:
        """Return those of the item's next documents that are the first of their text."""
        begin, self._passed = self._passed, self._passed + len(documents)
        is_first = np.ones(len(documents), np.bool_)
        while self._next is not None and self._next < self._passed:
            is_first[self._next - begin] = False
            self.num_left_out += 1
            self._next = next(self._ordinals, None)
        return documents.where(is_first)

    def require_all(self, path: str) -> None:
        """Raise UserError if the documents were not as many as were hashed; `path` names the item."""
        if self._passed != self._num_documents:
            raise UserError(
                f"{path} changed while it was read: {self._num_documents} documents, then {self._passed}",
                hint="rerun the same command when the input is complete",
            )


def _repeats(folder: Path, items: Sequence[ItemHashes], starts: Int64s, sizes: Sizes) -> Iterator[UInt64s]:
    """Yield the numbers, in the whole corpus, of the documents that repeat an earlier one."""
    num_buckets = sizes.groups(int(starts[-1]), sizes.bucket_bytes // _ROW_BYTES)
    with Shuffle(folder, num_buckets, 3, run_bytes=sizes.hash_run_bytes) as shuffle:
        for item, start in zip(items, starts.tolist()):
            at = start
            for hashes in item.blocks():
                numbers = np.arange(at, at + len(hashes), dtype=np.uint64)
                # the high 32 bits of a hash, as a fraction, of the buckets
                buckets = ((hashes[:, 0] >> np.uint64(32)) * np.uint64(num_buckets)) >> np.uint64(32)
                shuffle.add(buckets, np.column_stack([hashes, numbers]))
                at += len(hashes)
        shuffle.finish()
        for bucket in range(num_buckets):
            firsts = np.empty((0, 3), np.uint64)
            for rows in shuffle.read(bucket, sizes.bucket_bytes * 5 // 4):  # again only where some text repeats a lot
                known = np.concatenate([firsts, rows]) if len(firsts) else rows
                is_repeat = find_repeats(known[:, :2])
                yield known[is_repeat, 2]
                firsts = known[~is_repeat]


def _identity(items: Sequence[ItemHashes]) -> int:
    return xxhash.xxh3_64_intdigest(orjson.dumps([[item.num_documents, item.xxh3_64] for item in items]))


class ItemHasher:
    """Hashes the documents of work items, in place of tokenizing them."""

    def __init__(self, output: Output, rules: DocumentRules, *, block_bytes: int = 64 << 10) -> None:
        self._output, self._rules, self._block_bytes = output, rules, block_bytes
        self._scratch = output.scratch / secrets.token_hex(8)

    def seal(self, item: WorkItem, report: Callable[[Progress], None] = lambda _: None) -> None:
        """Make the item's file of hashes and its record, or nothing."""
        file_name, record_key = _names(item)
        temporary, checksum, num_bytes = self._scratch / file_name, xxhash.xxh3_64(), 0
        with writing(temporary):
            self._scratch.mkdir(parents=True, exist_ok=True)
        with durable_file(temporary) as file:
            for block in self._blocks(item, report):
                file.write(block)
                checksum.update(block)
                num_bytes += len(block)
        self._output.adopt(FOLDER, [temporary])
        content = {"item": item, "num_documents": num_bytes // HASH_BYTES, "xxh3_64": checksum.hexdigest()}
        self._output.write(record_key, orjson.dumps(content))

    def _blocks(self, item: WorkItem, report: Callable[[Progress], None]) -> Iterator[bytearray]:
        """Yield the hashes of an item's documents, some at a time."""
        block, input_bytes = bytearray(), 0
        for number, part in enumerate(item.slices):
            report(Progress(input_bytes, 0, slice=number))
            for document in DocumentReader(part, self._rules):
                block += xxhash.xxh3_128_digest(document.text.encode())
                input_bytes += document.input_bytes
                if len(block) == self._block_bytes:
                    yield block
                    block = bytearray()
                    report(Progress(input_bytes, 0, slice=number))
        yield block
        report(Progress(input_bytes, 0))


def read_hashes(output: Output, items: Sequence[WorkItem]) -> list[ItemHashes | None]:
    """Return the hashes of items, None if an item's are not there, or of other input."""
    sizes = output.sizes(FOLDER)
    contents = output.read_many((record for _, record in map(_names, items)), sizes)
    return [_parse(content, output, item, sizes) for content, item in zip(contents, items, strict=True)]


def find_duplicates(
    output: Output,
    items: Sequence[WorkItem],
    hash_items: Callable[[list[WorkItem]], None],
    report: Callable[[str], None],
) -> None:
    """Note for all items of a run which of their documents are duplicates; `hash_items` makes items' hashes.

    Where an earlier run noted others, of input that has changed since, what it sealed is sealed no more.
    """
    if missing := [item for item, hashes in zip(items, read_hashes(output, items)) if hashes is None]:
        hash_items(missing)
    hashes = [of_item for of_item in read_hashes(output, items) if of_item]
    if len(hashes) < len(items):
        raise output.vanished(len(items) - len(hashes), len(items))
    if not are_duplicates_of(output, hashes):
        output.remove_folder(RECORDS_FOLDER)
        num_documents = sum(item.num_documents for item in hashes)
        report(f"{write_duplicates(output, hashes):,} of {num_documents:,} documents have the text of an earlier one")


def _parse(content: bytes | None, output: Output, item: WorkItem, sizes: dict[str, int]) -> ItemHashes | None:
    key, record = f"{FOLDER}/{_names(item)[0]}", fields_of_record(content, item)
    if record is None:
        return None
    try:
        hashes = ItemHashes(output, key, record.number("num_documents"), record.text("xxh3_64"))
    except CheckFailed:  # damaged: the item is hashed again
        return None
    return hashes if sizes.get(key) == HASH_BYTES * hashes.num_documents else None


def _names(item: WorkItem) -> tuple[str, str]:
    """Return the name of an item's file of hashes, and the key of its record."""
    return f"{item.number:06}.xxh3", f"{FOLDER}/{item.number:06}.json"
