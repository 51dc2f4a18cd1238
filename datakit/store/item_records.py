"""Records of sealed work items, below `.work/items` while a store is unfinished: what a rerun need not do again."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from datakit.format.fields import Fields
from datakit.format.manifest import WORK_FOLDER, shard_entry
from datakit.format.output import Output, key_of
from datakit.format.shard_entry import ShardEntry
from datakit.text.inputs import WorkItem
from threefold.errors import CheckFailed

RECORDS_FOLDER = f"{WORK_FOLDER}/items"


@dataclass(frozen=True, slots=True)
class ItemRecord:
    """What a sealed item gave: the lines it read, its input bytes, its shards by store, what it skipped by reason.

    `num_replaced` documents had lone surrogates; `digests` are those of the slices as they were read, "" if unknown.
    """

    item: WorkItem
    num_lines: int
    input_bytes: int
    shards: dict[str, list[ShardEntry]]
    skipped: dict[str, int] = field(default_factory=dict)
    num_replaced: int = 0
    digests: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an item is, and in which of its slices; so many documents went to the reference, not the fast engine."""

    input_bytes: int
    num_tokens: int
    num_by_reference: int = 0
    slice: int = 0


def read_records(output: Output, items: Sequence[WorkItem]) -> list[ItemRecord | None]:
    """Return the records of items, None if one is not sealed, or was from other input or with a lost shard."""
    sizes = output.sizes()
    contents = output.read_many(map(record_key, items), sizes)
    return [_parse_record(content, item, sizes) for content, item in zip(contents, items, strict=True)]


def record_key(item: WorkItem) -> str:
    return f"{RECORDS_FOLDER}/{item.number:06}.json"


def _parse_record(content: bytes | None, item: WorkItem, sizes: dict[str, int]) -> ItemRecord | None:
    record = fields_of_record(content, item)
    if record is None:
        return None
    try:
        stores = record.table("shards")
        shards = {part: [shard_entry(entry) for entry in stores.tables(part)] for part in stores.raw}
        sealed = ItemRecord(
            item, record.number("num_lines"), record.number("input_bytes"), shards, record.counts("skipped"),
            record.number("num_replaced") if "num_replaced" in record.raw else 0,
            record.texts("digests") if "digests" in record.raw else [""] * len(item.slices),
        )  # fmt: skip
    except CheckFailed:  # damaged: the item is made again
        return None
    files = {
        key_of(part, name): digest.size_bytes
        for part, entries in shards.items()
        for entry in entries
        for name, digest in entry.files().items()
    }
    return sealed if files.items() <= sizes.items() else None


def fields_of_record(content: bytes | None, item: WorkItem) -> Fields | None:
    """Return what the record of an item says, None if it is missing or damaged, or of another item or other input."""
    if not content:
        return None
    try:
        record = Fields.parse("record", content)
        return record if WorkItem.parse(record.raw["item"]) == item else None
    except (CheckFailed, KeyError, TypeError):
        return None
