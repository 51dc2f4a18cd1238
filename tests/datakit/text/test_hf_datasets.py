"""Datasets of Hugging Face as inputs: their files are read, and those whose files hold something else are refused."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc

from datakit import Recipe, TokenStore, open_tokenizer, preprocess, train_tokenizer
from datakit.text.hf_datasets import paths_of
from tests.datakit.conftest import files_of, write_jsonl
from tests.datakit.text.test_columns import write_table
from threefold.errors import UserError

TEXTS = ["the store", "", "holds tokens", "of documents"] * 5


@dataclass
class Dataset:
    """What datakit uses of `datasets.Dataset`."""

    num_rows: int
    cache_files: list[dict[str, str]] = field(default_factory=list)
    data: Any = field(default_factory=lambda: pyarrow.table({}))
    format: Any = None
    _indices: Any = None


def saved(folder: Path, **changed: Any) -> Dataset:
    paths = [folder / f"stream-{number}.arrow" for number in range(2)]
    for number, path in enumerate(paths):
        write_table(path, {"text": TEXTS[number::2]}, 3)
    table = pyarrow.concat_tables([ipc.open_stream(path.read_bytes()).read_all() for path in paths])
    values = {"num_rows": len(TEXTS), "cache_files": [{"filename": str(path)} for path in paths], "data": table}
    return Dataset(**(values | changed))


def test_a_dataset_is_its_files(tmp_path: Path, tokenizer_path: str) -> None:
    dataset = saved(tmp_path)
    files = [each["filename"] for each in dataset.cache_files]
    assert paths_of(["a", tmp_path / "b", dataset], "text") == ["a", str(tmp_path / "b"), *files]
    preprocess([dataset], tmp_path / "one", Recipe(tokenizer_path))
    preprocess(files, tmp_path / "two", Recipe(tokenizer_path))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert train_tokenizer([dataset], str(tmp_path / "tok.json"), vocab_size=260).vocab_size > 256


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"num_rows": 19}, "of 19 rows was selected or shuffled"),
        ({"_indices": object()}, "of 20 rows was selected or shuffled"),
        ({"num_rows": 3, "cache_files": []}, "of 3 rows is in memory"),
    ],
)
def test_files_of_other_rows_are_refused(tmp_path: Path, changed: dict[str, Any], fault: str) -> None:
    with pytest.raises(UserError, match=fault) as caught:
        paths_of([saved(tmp_path, **changed)], "text")
    assert "save_to_disk" in str(caught.value.hint)


def changed_tables(table: Any) -> dict[str, Any]:
    """Tables beside the one of the files, by what they differ in."""
    texts, rows = table.column("text"), list(range(table.num_rows))
    one = [*texts.to_pylist()[:-1], "other"]
    return {
        "renamed": table.rename_columns(["body"]),
        "order": table.take(rows[::-1]),
        "a row": pyarrow.table({"text": one}),
        "kind": table.set_column(0, "text", pyarrow.array(rows)),
        "removed": pyarrow.table({"other": rows}),
        "a null": pyarrow.table({"text": [None, *texts.to_pylist()[1:]]}),
    }


def test_a_table_of_other_texts_is_refused_and_one_of_the_same_is_not(tmp_path: Path) -> None:
    dataset = saved(tmp_path)
    for what, table in changed_tables(dataset.data).items():
        for key in ("text", "body,text"):
            with pytest.raises(UserError, match=r"shows other texts as '(text|body)' than its files hold") as caught:
                paths_of([saved(tmp_path, data=table)], key)
            assert "save_to_disk" in str(caught.value.hint), what
    large = dataset.data.cast(pyarrow.schema({"text": pyarrow.large_string()}))
    beside = dataset.data.append_column("note", pyarrow.array(TEXTS))
    for table in (large, beside, dataset.data.combine_chunks()):
        assert len(paths_of([saved(tmp_path, data=table)], "text")) == 2
    with pytest.raises(UserError, match="shows other texts as 'note'"):
        paths_of([saved(tmp_path, data=beside)], "note")


def test_formats_that_show_something_else_are_refused(tmp_path: Path) -> None:
    formats = {"type": "custom", "columns": ["text"], "output_all_columns": False}
    with pytest.raises(UserError, match="shows what a transform makes"):
        paths_of([saved(tmp_path, format=formats)], "text")
    formats |= {"type": "torch", "columns": []}
    with pytest.raises(UserError, match="does not show its column 'text'"):
        paths_of([saved(tmp_path, format=formats)], "text")
    assert paths_of([saved(tmp_path, format=formats | {"output_all_columns": True})], "text")


def test_files_in_another_order_or_twice_are_refused(tmp_path: Path) -> None:
    dataset = saved(tmp_path)
    first, second = dataset.cache_files
    for files, fault in (([second, first], "reads .*1.arrow before others"), ([first, first], "more than once")):
        with pytest.raises(UserError, match=fault):
            paths_of([saved(tmp_path, cache_files=files)], "text")
    link = tmp_path / "link.arrow"
    link.symlink_to(first["filename"])
    with pytest.raises(UserError, match="more than once"):
        paths_of([saved(tmp_path, cache_files=[{"filename": str(link)}, first])], "text")


OPERATIONS: dict[str, tuple[str, Callable[[Any, Any, Any], Any]]] = {
    "as saved": ("text", lambda a, b, d: a),
    "rename swap": ("text", lambda a, b, d: a.rename_column("text", "old").rename_column("summary", "text")),
    "rename both": ("text", lambda a, b, d: a.rename_columns({"text": "summary", "summary": "text"})),
    "rename": ("content", lambda a, b, d: a.rename_column("text", "content")),
    "remove": ("text", lambda a, b, d: a.remove_columns(["text"]).rename_column("summary", "text")),
    "remove others": ("text", lambda a, b, d: a.remove_columns(["summary"])),
    "select columns": ("text", lambda a, b, d: a.select_columns(["summary", "text"])),
    "select all": ("text", lambda a, b, d: a.select(range(6))),
    "reversed": ("text", lambda a, b, d: a.select(range(5, -1, -1))),
    "select part": ("text", lambda a, b, d: a.select(range(3))),
    "a, b": ("text", lambda a, b, d: d.concatenate_datasets([a, b])),
    "b, a": ("text", lambda a, b, d: d.concatenate_datasets([b, a])),
    "swapped parts": ("text", lambda a, b, d: d.concatenate_datasets([a.select(range(3, 6)), a.select(range(3))])),
    "parts of two": ("text", lambda a, b, d: d.concatenate_datasets([a.select(range(2)), b.select(range(4))])),
    "a, a": ("text", lambda a, b, d: d.concatenate_datasets([a, a])),
    "b in memory beside a": ("text", lambda a, b, d: d.concatenate_datasets(
        [a.select_columns(["keep"]), d.Dataset.from_dict({"text": [f"new {n}" for n in range(6)]})], axis=1)),
    "columns of b beside a": ("text", lambda a, b, d: d.concatenate_datasets(
        [a.select_columns(["keep"]), b.select_columns(["text"])], axis=1)),
    "add column": ("note", lambda a, b, d: a.add_column("note", ["x"] * 6)),
    "map": ("text", lambda a, b, d: a.map(lambda row: {"text": row["text"].upper()})),
    "filter": ("text", lambda a, b, d: a.filter(lambda row: row["keep"] == 1)),
    "sort": ("text", lambda a, b, d: a.sort("summary", reverse=True)),
    "shard": ("text", lambda a, b, d: a.shard(1, 0)),
    "split": ("text", lambda a, b, d: a.train_test_split(0.5, seed=0)["train"]),
    "shuffled, flat": ("text", lambda a, b, d: a.shuffle(seed=1).flatten_indices()),
    "transform": ("text", lambda a, b, d: a.with_transform(lambda rows: {"text": [t.upper() for t in rows["text"]]})),
    "format": ("text", lambda a, b, d: a.with_format("numpy")),
    "hidden": ("text", lambda a, b, d: a.with_format("numpy", columns=["keep"])),
    "add item": ("text", lambda a, b, d: a.add_item({"text": "added", "summary": "s", "keep": 0})),
    "repeat": ("text", lambda a, b, d: a.repeat(2)),
    "take": ("text", lambda a, b, d: a.skip(0).take(6)),
    "large strings": ("text", lambda a, b, d: a.cast_column("text", d.Value("large_string"))),
    "interleave": ("text", lambda a, b, d: d.interleave_datasets([a, b])),
    "two keys, one renamed": ("text,note", lambda a, b, d: a.rename_column("summary", "note")),
}  # fmt: skip
REFUSED = {
    "rename swap", "rename both", "rename", "remove", "reversed", "select part", "b, a", "swapped parts",
    "parts of two", "a, a", "b in memory beside a", "columns of b beside a", "add column", "filter", "sort", "split",
    "transform", "hidden", "add item", "repeat", "interleave", "two keys, one renamed",
}  # fmt: skip


def shown(dataset: Any, key: str) -> list[str]:
    return ["\n\n".join(row[name] for name in key.split(",")) for row in dataset]


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_read_is_what_the_dataset_shows(name: str, tmp_path: Path, tokenizer_path: str) -> None:
    """Or it is refused, and what was saved after that is read."""
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    datasets.disable_progress_bars()
    for folder, size in (("a", 6), ("b", 6)):
        columns = {kind: [f"{kind} {folder} {n}" for n in range(size)] for kind in ("text", "summary")}
        datasets.Dataset.from_dict(columns | {"keep": [n % 2 for n in range(size)]}).save_to_disk(tmp_path / folder)
    key, change = OPERATIONS[name]
    a, b = (datasets.load_from_disk(str(tmp_path / folder)) for folder in "ab")
    dataset, recipe, is_refused = change(a, b, datasets), Recipe(tokenizer_path, text_key=key), name in REFUSED
    if is_refused:
        with pytest.raises(UserError) as caught:
            preprocess([dataset], tmp_path / "store", recipe)
        if name == "hidden":
            assert caught.value.hint == "dataset.reset_format()"
            dataset.reset_format()
        else:
            assert "save_to_disk(FOLDER), and preprocess datasets.load_from_disk(FOLDER)" in str(caught.value.hint)
            if name == "transform":
                dataset = a.map(lambda rows: {"text": [text.upper() for text in rows["text"]]}, batched=True)
            dataset.save_to_disk(str(tmp_path / "saved"))
            dataset = datasets.load_from_disk(str(tmp_path / "saved"))
    preprocess([dataset], tmp_path / "store", recipe)
    store, tokenizer = TokenStore.open(tmp_path / "store"), open_tokenizer(tokenizer_path)
    found = [tokenizer.decode(store.document(number).tolist()) for number in range(store.num_documents)]
    assert found == shown(dataset, key)


def test_what_is_no_dataset_is_refused() -> None:
    with pytest.raises(UserError, match=r"builtins\.int, which is not a path"):
        paths_of([3], "text")  # type: ignore[list-item]
    with pytest.raises(UserError, match="name one of train, test"):
        paths_of([{"train": 1, "test": 2}], "text")  # type: ignore[list-item]


def test_a_cached_dataset_of_the_package_offline(
    tmp_path: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    cached = datasets.load_dataset(
        "json", data_files=str(tmp_path / "a.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    preprocess([cached], tmp_path / "one", Recipe(tokenizer_path))
    preprocess([str(tmp_path / "a.jsonl")], tmp_path / "two", Recipe(tokenizer_path))
    tokens = [
        {name: data for name, data in files_of(tmp_path / name).items() if ".bin" in name} for name in ("one", "two")
    ]
    assert tokens[0] == tokens[1]
    for changed in (cached.select(range(3)), cached.select([2, 0]), cached.shuffle(seed=1)):
        with pytest.raises(UserError, match="was selected or shuffled"):
            paths_of([changed], "text")
    with pytest.raises(UserError, match="is in memory"):
        paths_of([datasets.Dataset.from_dict({"text": TEXTS})], "text")
    with pytest.raises(UserError, match="name one of train"):
        paths_of([datasets.DatasetDict(train=cached)], "text")
