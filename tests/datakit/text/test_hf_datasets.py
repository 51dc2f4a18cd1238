"""Datasets of Hugging Face as inputs: their files are read, and those whose files are other rows are refused."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from datakit import Recipe, preprocess, train_tokenizer
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
    _indices: Any = None


def saved(folder: Path, **changed: Any) -> Dataset:
    paths = [folder / f"stream-{number}.arrow" for number in range(2)]
    for number, path in enumerate(paths):
        write_table(path, {"text": TEXTS[number::2]}, 3)
    values = {"num_rows": len(TEXTS), "cache_files": [{"filename": str(path)} for path in paths]}
    return Dataset(**(values | changed))


def test_a_dataset_is_its_files(tmp_path: Path, tokenizer_path: str) -> None:
    dataset = saved(tmp_path)
    files = [each["filename"] for each in dataset.cache_files]
    assert paths_of(["a", tmp_path / "b", dataset]) == ["a", str(tmp_path / "b"), *files]
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
        paths_of([saved(tmp_path, **changed)])
    assert "save_to_disk" in str(caught.value.hint)


def test_what_is_no_dataset_is_refused() -> None:
    with pytest.raises(UserError, match=r"builtins\.int, which is not a path"):
        paths_of([3])  # type: ignore[list-item]
    with pytest.raises(UserError, match="name one of train, test"):
        paths_of([{"train": 1, "test": 2}])  # type: ignore[list-item]


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
            paths_of([changed])
    with pytest.raises(UserError, match="is in memory"):
        paths_of([datasets.Dataset.from_dict({"text": TEXTS})])
    with pytest.raises(UserError, match="name one of train"):
        paths_of([datasets.DatasetDict(train=cached)])
