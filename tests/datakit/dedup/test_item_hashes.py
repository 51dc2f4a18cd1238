"""Hashes of items: those of the texts that the rules keep, in order; half an item leaves nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
import xxhash

from datakit.dedup import duplicates as module
from datakit.dedup.duplicates import ItemHasher, ItemHashes, read_hashes
from datakit.format.output import Output
from datakit.store.item_records import Progress
from datakit.text.documents import DocumentRules
from datakit.text.inputs import WorkItem, cut, find_inputs
from tests.datakit.conftest import files_of, write_jsonl
from threefold.errors import UserError


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
    record = tmp_path / "s" / module.FOLDER / "000000.json"
    content = json.loads(record.read_bytes())
    del content[field]
    record.write_text(json.dumps(content))
    assert hashes_in(output, item) is None
