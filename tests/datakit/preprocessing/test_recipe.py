"""Recipe: a store is finished by the rules that it was begun under, and says by which it was made."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing

from datakit import Recipe, TokenStore, preprocess
from datakit.preprocessing.preprocess import _Job
from datakit.preprocessing.recipe import RULES_VERSION
from tests.datakit.conftest import files_of
from threefold.errors import UserError


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Two files, of which each has a row without text."""
    for name in "ab":
        rows = pa.array(["the store", None, f"token {name}"], pa.string())
        parquet.write_table(pa.table({"text": rows}), tmp_path / f"{name}.parquet")
    return str(tmp_path / "*.parquet")


@pytest.fixture
def ending_path(tmp_path: Path, tokenizer_path: str) -> str:
    """The trained tokenizer with a post-processor that ends each text with the end-of-document token."""
    library = Library.from_file(tokenizer_path)
    end = ("<|endoftext|>", library.token_to_id("<|endoftext|>"))
    library.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    library.save(str(tmp_path / "ending.json"))
    return str(tmp_path / "ending.json")


def stop(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.ci
def test_a_store_is_finished_by_the_rules_that_it_was_begun_under(
    tmp_path: Path, table: str, ending_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Recipe(ending_path, append_eod=True, rules_version=1)
    preprocess([table], tmp_path / "whole", older, item_bytes=1)
    with monkeypatch.context() as patch:
        patch.setattr(_Job, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            preprocess([table], tmp_path / "s", older, item_bytes=1)
    (tmp_path / "s/.work/items/000001.json").unlink()  # one item is made by the program of now
    lines: list[str] = []
    summary = preprocess(
        [table], tmp_path / "s", Recipe(ending_path, append_eod=True), item_bytes=1, report=lines.append
    )
    assert (summary.num_items_done_before, summary.num_documents) == (summary.num_items - 1, 6)
    assert files_of(tmp_path / "s") == files_of(tmp_path / "whole")
    follows = [line for line in lines if "follows the rules that it was begun under" in line]
    assert len(follows) == 1
    assert not any("twice" in line for line in lines)
    again: list[str] = []
    preprocess([table], tmp_path / "s", Recipe(ending_path, append_eod=True), item_bytes=1, report=again.append)
    assert again == [*follows, f"{tmp_path / 's'} is complete already"]
    store = TokenStore.open(tmp_path / "s")
    assert "rules" not in store.manifest.settings
    assert store.document(1).tolist() == [0, 0]  # a null, and an end token after the tokenizer's own


def test_a_store_of_now_has_no_nulls_and_one_end_token_and_says_so(
    tmp_path: Path, table: str, ending_path: str
) -> None:
    recipe = Recipe(ending_path, append_eod=True, skip_invalid=True)
    lines: list[str] = []
    summary = preprocess([table], tmp_path / "s", recipe, report=lines.append)
    assert (summary.num_documents, summary.skipped) == (4, {"invalid": 2})
    assert "the tokenizer ends documents with '<|endoftext|>' itself: it is not written twice" in lines
    store, library = TokenStore.open(tmp_path / "s"), Library.from_file(ending_path)
    texts = ["the store", "token a", "the store", "token b"]
    assert [store.document(k).tolist() for k in range(4)] == [library.encode(text).ids for text in texts]
    assert store.manifest.settings["rules"] == RULES_VERSION


def test_a_store_by_rules_that_are_not_known_yet_is_refused(
    tmp_path: Path, table: str, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = Recipe(tokenizer_path, skip_invalid=True, rules_version=RULES_VERSION + 1)
    with monkeypatch.context() as patch:
        patch.setattr(_Job, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            preprocess([table], tmp_path / "s", newer)
    with pytest.raises(UserError, match=f"its rules is {RULES_VERSION + 1}, this one {RULES_VERSION}"):
        preprocess([table], tmp_path / "s", Recipe(tokenizer_path, skip_invalid=True))


@pytest.mark.parametrize("dedup", [False, True])
def test_a_null_is_left_out_before_duplicates_are_looked_for(
    tmp_path: Path, table: str, tokenizer_path: str, dedup: bool
) -> None:
    with pytest.raises(UserError, match="row 2: no text: 'text' is null"):
        preprocess([table], tmp_path / "refused", Recipe(tokenizer_path, dedup=dedup))
    summary = preprocess([table], tmp_path / "s", Recipe(tokenizer_path, skip_invalid=True, dedup=dedup))
    assert summary.skipped == ({"duplicate": 1, "invalid": 2} if dedup else {"invalid": 2})
