"""Deduplication: the pass over all input that comes before tokenizing, where only the first of equal texts is kept.

Each item's documents are hashed by a worker, and then the duplicates among all items are found here. Both are kept
under `.work`, so that a rerun hashes only what is missing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from datakit.duplicates import are_duplicates_of, duplicates_path, write_duplicates
from datakit.inputs import WorkItem
from datakit.item import record_path
from datakit.item_hashes import read_hashes
from datakit.shard import writing
from threefold.storage.local import sync_folder


def find_duplicates(
    output: Path,
    items: Sequence[WorkItem],
    hash_items: Callable[[list[WorkItem]], None],
    report: Callable[[str], None],
) -> None:
    """Note for all items of a run which of their documents are duplicates; `hash_items` makes items' hashes.

    Where an earlier run noted others, of input that has changed since, what it sealed is sealed no more.
    """
    if missing := [item for item in items if read_hashes(output, item) is None]:
        hash_items(missing)
    hashes = [found for item in items if (found := read_hashes(output, item))]
    assert len(hashes) == len(items), "every work item is hashed"
    path = duplicates_path(output)
    if not are_duplicates_of(path, hashes):
        _unseal(record_path(output, 0).parent)
        num_documents = sum(item.num_documents for item in hashes)
        report(f"{write_duplicates(path, hashes):,} of {num_documents:,} documents have the text of an earlier one")


def _unseal(records: Path) -> None:
    with writing(records):
        for record in records.iterdir():
            record.unlink()
        sync_folder(records)
