"""Duplicates: against a set of all texts seen; hashes of items are of the texts that the rules keep, whole or none."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from datakit.dedup.duplicates import (
    FOLDER,
    Duplicates,
    ItemHasher,
    ItemHashes,
    Sizes,
    are_duplicates_of,
    find_repeats,
    read_hashes,
    write_duplicates,
)
from datakit.format.output import Output
from datakit.store.item_records import Progress
from datakit.text.documents import Document, DocumentRules, Documents
from datakit.text.inputs import WorkItem, cut, find_inputs
from tests.datakit.conftest import files_of, write_jsonl
from threefold.errors import UserError

FEW = st.integers(0, 3)
ROWS = st.lists(st.tuples(FEW, FEW) | st.tuples(st.integers(0, 2**64 - 1), FEW), max_size=80)


@given(ROWS)
def test_repeats_are_the_rows_seen_before(rows: list[tuple[int, int]]) -> None:
    found = find_repeats(np.array(rows, np.uint64).reshape(-1, 2))
    assert found.tolist() == [row in rows[:at] for at, row in enumerate(rows)]


def hashes_of(folder: Path, items: Sequence[Sequence[str]]) -> list[ItemHashes]:
    """Files of hashes, as the first pass makes them."""
    found = []
    for number, texts in enumerate(items):
        content = b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts)
        (folder / str(number)).write_bytes(content)
        found.append(ItemHashes(Output(str(folder)), str(number), len(texts), xxhash.xxh3_64_hexdigest(content)))
    return found


def documents_of(texts: Sequence[str]) -> Documents:
    return Documents.of([Document(text, 0, line, 1) for line, text in enumerate(texts)])


def naive(items: Sequence[Sequence[str]]) -> list[list[int]]:
    """The ordinals of the duplicates of each item."""
    seen: set[str] = set()
    ordinals: list[list[int]] = []
    for texts in items:
        ordinals.append([])
        for ordinal, text in enumerate(texts):
            if text in seen:
                ordinals[-1].append(ordinal)
            seen.add(text)
    return ordinals


ITEMS = st.lists(st.lists(st.sampled_from("abcdefgh") | st.text(max_size=3), max_size=25), min_size=1, max_size=8)
SIZES = st.integers(1, 300)


@given(ITEMS, SIZES, SIZES, SIZES, st.integers(1, 9), st.integers(1, 5))
def test_duplicates_are_all_but_the_first_of_each_text(
    items: list[list[str]], bucket: int, hash_run: int, place_run: int, group: int, block: int
) -> None:
    sizes = Sizes(max(bucket, 24), hash_run, place_run, group)
    with TemporaryDirectory() as name:
        output, expected = Output(name), naive(items)
        hashes = hashes_of(Path(name), items)
        assert not are_duplicates_of(output, hashes)
        assert write_duplicates(output, hashes, sizes) == sum(map(len, expected))
        assert are_duplicates_of(output, hashes)
        assert not are_duplicates_of(output, [*hashes, hashes[0]])
        opened = Duplicates(output, read_ordinals=block)
        for number, texts in enumerate(items):
            duplicates, documents = opened.of_item(number), documents_of(texts)
            half = len(documents) // 2  # an item's documents come slice by slice
            kept = [*duplicates.leave_out(documents[:half]), *duplicates.leave_out(documents[half:])]
            duplicates.require_all("a.jsonl")
            assert duplicates.num_left_out == len(expected[number])
            assert kept == [each for each in documents if each.line not in expected[number]]


def test_the_most_buckets_and_groups_are_not_exceeded(tmp_path: Path) -> None:
    items = [[str(i % 60) for i in range(50)], [], [str(i % 70) for i in range(101)]]
    output = Output(str(tmp_path))
    sizes = Sizes(bucket_bytes=24, group_documents=1, max_buckets=7)
    write_duplicates(output, hashes_of(tmp_path, items), sizes)
    opened = Duplicates(output)
    found = [opened.of_item(number) for number in range(3)]
    for duplicates, texts, expected in zip(found, items, naive(items), strict=True):
        kept = [each.line for each in duplicates.leave_out(documents_of(texts))]
        assert kept == sorted(set(range(len(texts))) - set(expected))


@pytest.mark.parametrize("count", [1, 3])
def test_input_that_changes_between_the_passes_is_told(tmp_path: Path, count: int) -> None:
    output = Output(str(tmp_path))
    write_duplicates(output, hashes_of(tmp_path, [["a", "a"]]))
    duplicates = Duplicates(output).of_item(0)
    list(duplicates.leave_out(documents_of(["a"] * count)))
    with pytest.raises(UserError, match=f"a.jsonl changed while it was read: 2 documents, then {count}"):
        duplicates.require_all("a.jsonl")


def item_of(folder: Path) -> WorkItem:
    [item] = cut(find_inputs([str(folder)]), 1 << 30, split_txt=False)
    return item


def output_in(folder: Path) -> Output:
    return Output(str(folder / "s"))


def hashes_in(output: Output, item: WorkItem) -> ItemHashes | None:
    [found] = read_hashes(output, [item])
    return found


def test_the_hashes_are_those_of_the_texts_that_are_kept(tmp_path: Path, texts: list[str]) -> None:
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"head": f"h{i}" if i % 3 else None, "body": text}) for i, text in enumerate(texts[:99])]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join([*lines, "no JSON"]))
    (tmp_path / "in" / "b.txt").write_text("größe")
    output, item, progress = output_in(tmp_path), item_of(tmp_path / "in"), list[Progress]()
    rules = DocumentRules("head,body", skip_invalid=True, skip_empty=True)
    assert hashes_in(output, item) is None
    ItemHasher(output, rules, block_bytes=160).seal(item, progress.append)
    joined = ["\n\n".join(filter(None, [f"h{i}" if i % 3 else "", text])) for i, text in enumerate(texts[:99])]
    kept_texts = [*(text for text in joined if text.strip()), "größe"]
    hashes = hashes_in(output, item)
    assert hashes is not None
    assert hashes.num_documents == len(kept_texts) < 100
    content = (tmp_path / "s" / hashes.key).read_bytes()
    assert content == b"".join(xxhash.xxh3_128_digest(text.encode()) for text in kept_texts)
    assert hashes.xxh3_64 == xxhash.xxh3_64_hexdigest(content)
    assert np.concatenate(list(hashes.blocks())).shape == (len(kept_texts), 2)
    assert len(progress) > 5
    assert progress == sorted(progress, key=lambda each: each.input_bytes)


def test_a_fault_in_the_last_line_leaves_nothing(tmp_path: Path, texts: list[str]) -> None:
    (tmp_path / "in").mkdir()
    file = write_jsonl(tmp_path / "in" / "a.jsonl", texts)
    file.write_bytes(file.read_bytes() + b"{")
    output, item = output_in(tmp_path), item_of(tmp_path / "in")
    with pytest.raises(UserError, match="line 301: invalid JSON"):
        ItemHasher(output, DocumentRules()).seal(item)
    assert files_of(tmp_path / "s") == {}


def test_hashes_of_other_input_or_without_their_file_do_not_count(tmp_path: Path, texts: list[str]) -> None:
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "a.jsonl", texts)
    output, item = output_in(tmp_path), item_of(tmp_path / "in")
    ItemHasher(output, DocumentRules()).seal(item)
    write_jsonl(tmp_path / "in" / "a.jsonl", texts[1:])
    assert hashes_in(output, item_of(tmp_path / "in")) is None
    found = hashes_in(output, item)
    assert found is not None
    file = tmp_path / "s" / found.key
    file.write_bytes(file.read_bytes()[16:])
    assert hashes_in(output, item) is None
    file.unlink()
    assert hashes_in(output, item) is None


@pytest.mark.parametrize("field", ["num_documents", "xxh3_64", "item"])
def test_a_damaged_record_does_not_count(tmp_path: Path, texts: list[str], field: str) -> None:
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "a.jsonl", texts)
    output, item = output_in(tmp_path), item_of(tmp_path / "in")
    ItemHasher(output, DocumentRules()).seal(item)
    record = tmp_path / "s" / FOLDER / "000000.json"
    content = json.loads(record.read_bytes())
    del content[field]
    record.write_text(json.dumps(content))
    assert hashes_in(output, item) is None
