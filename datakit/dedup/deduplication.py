"""Deduplication: the pass over all input that comes before tokenizing, where only the first of equal texts is kept.

Each item's documents are hashed by a worker, and then the duplicates among all items are found here. Both are kept
under `.work`, so that a rerun hashes only what is missing.
"""

from collections.abc import Callable, Sequence

from datakit.dedup.duplicates import are_duplicates_of, write_duplicates
from datakit.dedup.item_hashes import read_hashes
from datakit.store.item_records import RECORDS_FOLDER
from datakit.store.output import Output
from datakit.text.inputs import WorkItem


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
