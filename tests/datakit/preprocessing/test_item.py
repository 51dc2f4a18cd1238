"""Work items: whatever the documents are, their tokens are the library's own, in order, with an end where asked."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing

from datakit import Recipe, TokenShard
from datakit.format.output import Output
from datakit.preprocessing.recipe import RULES_VERSION
from datakit.preprocessing.task import ItemEncoder
from datakit.store.item_records import RECORDS_FOLDER, ItemRecord, Progress, read_records
from datakit.text.inputs import FileSlice, WorkItem, find_inputs
from datakit.tokenization.encoder import ReferenceEncoder
from datakit.tokenization.tokenizer import identify, open_tokenizer
from tests.datakit.conftest import files_of, write_jsonl
from threefold.errors import UserError


def seal(output: Path, source: Path, recipe: Recipe, **sizes: int) -> tuple[ItemRecord, list[Progress]]:
    """Seal a file as item 7, in this process."""
    tokenizer = open_tokenizer(recipe.tokenizer)
    identity = identify(tokenizer, recipe.tokenizer, recipe.eod_token, required=True)
    [file] = find_inputs([str(source)])
    item = WorkItem(7, (FileSlice(file, 0, file.size_bytes),))
    progress: list[Progress] = []
    sealing = ItemEncoder(Output(str(output)), recipe, ReferenceEncoder(tokenizer), identity, **sizes)
    sealing.seal(item, progress.append)
    [record] = read_records(Output(str(output)), [item])
    assert record is not None
    return record, progress


TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.just("<|endoftext|>"), min_size=1, max_size=30)


@settings(max_examples=25)
@given(texts=TEXTS, append_eod=st.booleans(), batch=st.integers(1, 40))
def test_tokens_are_the_librarys_document_by_document(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_path: str, texts: list[str], append_eod: bool, batch: int
) -> None:
    output = tmp_path_factory.mktemp("item")
    source = write_jsonl(output / "a.jsonl", texts)
    record, progress = seal(output, source, Recipe(tokenizer_path, append_eod=append_eod), batch_characters=batch)
    library = Library.from_file(tokenizer_path)
    expected = [library.encode(text).ids + [library.token_to_id("<|endoftext|>")] * append_eod for text in texts]
    [entry] = record.shards[""]
    shard = TokenShard(output / entry.name)
    assert [shard.document(i).tolist() for i in range(shard.num_documents)] == expected
    assert (record.num_lines, record.input_bytes) == (len(texts), source.stat().st_size)
    assert progress[-1].input_bytes == source.stat().st_size
    assert progress == sorted(progress, key=lambda each: each.input_bytes)


@pytest.mark.parametrize("ends_itself", [True, False])
def test_a_tokenizer_that_ends_documents_itself_has_one_end_token(
    tmp_path: Path, tokenizer_path: str, ends_itself: bool
) -> None:
    library = Library.from_file(tokenizer_path)
    end = library.token_to_id("<|endoftext|>")
    template = "$A <|endoftext|>" if ends_itself else "<|endoftext|> $A"
    library.post_processor = TemplateProcessing(single=template, special_tokens=[("<|endoftext|>", end)])
    library.save(str(tmp_path / "tok.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["the store", "", "<|endoftext|>"])
    recipe = Recipe(str(tmp_path / "tok.json"), append_eod=True)
    for name, version in (("now", RULES_VERSION), ("before", 1)):
        record, _ = seal(tmp_path / name, source, replace(recipe, rules_version=version))
        shard = TokenShard(tmp_path / name / record.shards[""][0].name)
        ends = [] if ends_itself and name == "now" else [end]
        expected = [library.encode(text).ids + ends for text in ("the store", "", "<|endoftext|>")]
        assert [shard.document(i).tolist() for i in range(3)] == expected


def test_a_fault_in_the_last_line_leaves_nothing_of_the_item(tmp_path: Path, tokenizer_path: str) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "good"}\n' * 2000 + b"{}\n")
    with pytest.raises(UserError, match="line 2001: no key 'text'"):
        seal(tmp_path, source, Recipe(tokenizer_path, split=(0.5, 0.5)))
    assert set(files_of(tmp_path)) == {"a.jsonl"}


@pytest.mark.parametrize("good", [["fine", "good"], []])
def test_texts_on_which_the_tokenizer_gives_up_are_invalid(
    tmp_path: Path, tokenizer_path: str, good: list[str]
) -> None:
    library = Library.from_file(tokenizer_path)
    library.add_tokens([AddedToken("<", lstrip=True, rstrip=True), AddedToken("\n", lstrip=True)])
    library.save(str(tmp_path / "tok.json"))
    hard = "<\n "
    source = write_jsonl(tmp_path / "a.jsonl", [hard, *good[:1], hard, hard, *good[1:], hard])
    with pytest.raises(UserError, match="the document at byte 0: tokenizers gives up") as caught:
        seal(tmp_path, source, Recipe(str(tmp_path / "tok.json")))
    assert "--skip-invalid" in str(caught.value.hint)
    record, _ = seal(tmp_path, source, Recipe(str(tmp_path / "tok.json"), skip_invalid=True))
    assert (record.skipped, record.num_lines) == ({"invalid": 4}, 4 + len(good))
    shards = [TokenShard(tmp_path / entry.name) for entry in record.shards[""]]
    found = [shard.document(i).tolist() for shard in shards for i in range(shard.num_documents)]
    assert found == [library.encode(text).ids for text in good]


def test_an_item_whose_shard_was_lost_or_whose_input_changed_is_not_sealed(tmp_path: Path, tokenizer_path: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    record, _ = seal(tmp_path, source, Recipe(tokenizer_path))
    output = Output(str(tmp_path))
    assert read_records(output, [record.item]) == [record]
    changed = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    [file] = find_inputs([str(changed)])
    assert read_records(output, [WorkItem(7, (FileSlice(file, 0, file.size_bytes),))]) == [None]
    (tmp_path / f"{record.shards[''][0].name}.idx").unlink()
    assert read_records(output, [record.item]) == [None]


DAMAGED = {
    "no JSON": b"{",
    "no object": b"[1]",
    "no item": b"{}",
    "shards": b'"shards":3',
    "an entry": b'"shards":{"":[7]}',
    "lines": b'"num_lines":"two"',
    "skipped": b'"skipped":{"empty":-1}',
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_an_item_whose_record_is_damaged_is_not_sealed(tmp_path: Path, tokenizer_path: str, fault: str) -> None:
    record, _ = seal(tmp_path, write_jsonl(tmp_path / "a.jsonl", ["one"]), Recipe(tokenizer_path))
    path = tmp_path / RECORDS_FOLDER / "000007.json"
    damaged = DAMAGED[fault]
    if damaged.startswith(b'"'):
        damaged = json.dumps(json.loads(path.read_bytes()) | json.loads(b"{%b}" % damaged)).encode()
    path.write_bytes(damaged)
    assert read_records(Output(str(tmp_path)), [record.item]) == [None]


def test_a_worker_loads_no_torch() -> None:
    program = "import datakit.preprocessing.worker, tokenizers, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert "torch" not in json.loads(done.stdout)
