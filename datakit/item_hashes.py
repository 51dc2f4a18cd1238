"""Hashes of a work item: the XXH3-128 of the UTF-8 text of each document that the rules keep, in order, 16 bytes each.

They lie in a file of the item's own under `.work/hashes`, with a record that is written last: only that makes the item
done, so a kill costs at most one item's reading. Memory is 64 KiB and one document.
"""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import xxhash

from datakit.documents import DocumentReader, DocumentRules
from datakit.duplicates import HASH_BYTES, ItemHashes
from datakit.inputs import WorkItem
from datakit.item import SCRATCH, Progress
from datakit.manifest import WORK_FOLDER, replace_durably
from datakit.shard import flush_to_disk, writing
from threefold.storage.local import sync_folder

_BLOCK_BYTES = 64 << 10


class ItemHasher:
    """Hashes the documents of work items, in place of tokenizing them."""

    def __init__(self, output: Path, rules: DocumentRules) -> None:
        self._output, self._rules = output, rules
        self._scratch = output / WORK_FOLDER / SCRATCH / secrets.token_hex(8)

    def seal(self, item: WorkItem, report: Callable[[Progress], None] = lambda _: None) -> None:
        """Make the item's file of hashes and its record, or nothing."""
        target, record = _paths(self._output, item.number)
        temporary, checksum, num_bytes = self._scratch / target.name, xxhash.xxh3_64(), 0
        with writing(target):
            self._scratch.mkdir(parents=True, exist_ok=True)
            target.parent.mkdir(exist_ok=True)
            try:
                with temporary.open("wb") as file:
                    for block in self._blocks(item, report):
                        file.write(block)
                        checksum.update(block)
                        num_bytes += len(block)
                    flush_to_disk(file)
                temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            sync_folder(target.parent)
        content = {"item": item, "num_documents": num_bytes // HASH_BYTES, "xxh3_64": checksum.hexdigest()}
        replace_durably(record, orjson.dumps(content), temporary=self._scratch / record.name)

    def _blocks(self, item: WorkItem, report: Callable[[Progress], None]) -> Iterator[bytearray]:
        """The hashes of an item's documents, some at a time."""
        block, input_bytes = bytearray(), 0
        for part in item.slices:
            for document in DocumentReader(part, self._rules):
                block += xxhash.xxh3_128_digest(document.text.encode())
                input_bytes += document.input_bytes
                if len(block) == _BLOCK_BYTES:
                    yield block
                    block = bytearray()
                    report(Progress(input_bytes, 0))
        yield block
        report(Progress(input_bytes, 0))


def read_hashes(output: Path, item: WorkItem) -> ItemHashes | None:
    """The hashes of an item, None where they are not there, or of other input."""
    path, record = _paths(output, item.number)
    try:
        raw = orjson.loads(record.read_bytes())
        size_bytes = path.stat().st_size
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None
    if raw["item"] != orjson.loads(orjson.dumps(item)) or size_bytes != HASH_BYTES * raw["num_documents"]:
        return None
    return ItemHashes(path, raw["num_documents"], raw["xxh3_64"])


def _paths(output: Path, number: int) -> tuple[Path, Path]:
    """Where an item's hashes and their record lie."""
    folder = output / WORK_FOLDER / "hashes"
    return folder / f"{number:06}.xxh3", folder / f"{number:06}.json"
