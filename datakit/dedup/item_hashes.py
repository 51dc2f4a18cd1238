"""Hashes of a work item: the XXH3-128 of the UTF-8 text of each document that the rules keep, in order, 16 bytes each.

They are in a file of the item's own below `.work/hashes`, with a record that is written last: only that makes the item
done, so a kill costs at most one item's reading. Memory is 64 KiB and one document. `find_duplicates` is the pass over
all items that comes before tokenizing: workers make the hashes that are missing, then the repeats among all are noted.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence

import orjson
import xxhash

from datakit.dedup.duplicates import HASH_BYTES, ItemHashes, are_duplicates_of, write_duplicates
from datakit.files.durable import durable_file, writing
from datakit.format.manifest import WORK_FOLDER
from datakit.format.output import Output
from datakit.store.item_records import RECORDS_FOLDER, Progress, fields_of_record
from datakit.text.documents import DocumentReader, DocumentRules
from datakit.text.inputs import WorkItem
from threefold.errors import CheckFailed

FOLDER = f"{WORK_FOLDER}/hashes"


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
    return [
        _parse(content, output, item, sizes) if content else None for content, item in zip(contents, items, strict=True)
    ]


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
    hashes = [found for found in read_hashes(output, items) if found]
    if len(hashes) < len(items):
        raise output.vanished(len(items) - len(hashes), len(items))
    if not are_duplicates_of(output, hashes):
        output.remove_folder(RECORDS_FOLDER)
        num_documents = sum(item.num_documents for item in hashes)
        report(f"{write_duplicates(output, hashes):,} of {num_documents:,} documents have the text of an earlier one")


def _parse(content: bytes, output: Output, item: WorkItem, sizes: dict[str, int]) -> ItemHashes | None:
    key, record = f"{FOLDER}/{_names(item)[0]}", fields_of_record(content, item)
    if record is None:
        return None
    try:
        found = ItemHashes(output, key, record.number("num_documents"), record.text("xxh3_64"))
    except CheckFailed:  # damaged: the item is hashed again
        return None
    return found if sizes.get(key) == HASH_BYTES * found.num_documents else None


def _names(item: WorkItem) -> tuple[str, str]:
    """Return the name of an item's file of hashes, and the key of its record."""
    return f"{item.number:06}.xxh3", f"{FOLDER}/{item.number:06}.json"
