"""Conversion: the format of sources is found out, and what fits no format or several is refused."""

import json
from pathlib import Path

import pytest

from datakit import TokenStore
from datakit.foreign import conversion
from datakit.foreign.conversion import convert_to_store, detect
from datakit.foreign.foreign_store import Choices
from tests.datakit.conftest import Cli, documents_of
from tests.datakit.foreign.test_datatrove import write_ds
from tests.datakit.foreign.test_litdata import write_litdata
from tests.datakit.foreign.test_megatron import write_dataset
from tests.datakit.foreign.test_mosaic import write_mds
from threefold.errors import UserError

DOCUMENTS = [[3, 1, 2], [5] * 40, [7]]


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    """The same documents in every format."""
    write_ds(tmp_path / "datatrove" / "a.ds", DOCUMENTS)
    return {
        "megatron": write_dataset(tmp_path / "d", DOCUMENTS),
        "datatrove": tmp_path / "datatrove",
        "mds": write_mds(tmp_path / "mds", {"tokens": "ndarray"}, [{"tokens": tokens} for tokens in DOCUMENTS]),
        "litdata": write_litdata(tmp_path / "litdata", DOCUMENTS),
    }


def test_every_format_is_found_out(tmp_path: Path, tokenizer_path: str, sources: dict[str, Path]) -> None:
    assert set(sources) == {"megatron", *conversion._READERS}
    for kind, source in sources.items():
        assert detect(source) == kind
        for source_format in (None, kind):
            store = convert_to_store(
                [source], tmp_path / f"{kind}-{source_format}", Choices(tokenizer_path), source_format=source_format
            )
            assert documents_of(store) == DOCUMENTS
            assert store.manifest.settings["converted_from"] == kind
    assert detect(f"{sources['megatron']}.bin") == "megatron"
    assert detect(sources["datatrove"] / "a.ds") == "datatrove"
    assert detect(sources["mds"] / "index.json") == "mds"
    with pytest.raises(UserError, match="is not a dataset"):
        detect(tmp_path)
    with pytest.raises(UserError, match="of several formats") as caught:
        convert_to_store([sources["mds"], sources["litdata"]], tmp_path / "s", Choices(tokenizer_path))
    assert caught.value.message.splitlines()[1:] == [f"  {sources[kind]}: {kind}" for kind in ("mds", "litdata")]


def test_the_verb_says_how_documents_were_cut(
    tmp_path: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [[4, 0, 2, 3]] * 20
    source = write_mds(tmp_path / "in", {"tokens": "ndarray:int32"}, [{"tokens": row} for row in rows])
    assert cli("convert", source, "--output", tmp_path / "s", "--tokenizer", tokenizer_path, "--json") == 0
    captured = capsys.readouterr()
    assert captured.err == "one stream, cut after each <|endoftext|>; --documents items keeps the samples\n"
    assert json.loads(captured.out)["num_documents"] == 21
    assert TokenStore.open(tmp_path / "s").document(1).tolist() == [2, 3, 4, 0]
    words = ["--documents", "items", "--column", "tokens", "--from", "mds"]
    assert cli("convert", source, "--output", tmp_path / "t", "--tokenizer", tokenizer_path, *words) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (f"{tmp_path / 't'}: 20 documents, 80 tokens, 1 shards\n", "")


@pytest.mark.parametrize(
    ("kind", "words", "fault"),
    [
        ("megatron", ["--dtype", "int32"], "indices say dtype"),
        ("megatron", ["--documents", "eod"], "indices say dtype"),
        ("megatron", ["--column", "a"], "--column is for mds and litdata"),
        ("datatrove", ["--column", "a"], "--column is for mds and litdata"),
        ("datatrove", ["--copy"], "--copy is for megatron"),
        ("mds", ["--dtype", "float32"], "'float32' is not a dtype of tokens"),
        ("mds", ["--from", "litdata"], "config is not a JSON object|chunks is None"),
        ("mds", ["--from", "megatron"], "PREFIX names the two files"),
        ("litdata", ["--from", "mds"], "version is None"),
        ("litdata", ["--from", "datatrove"], "nor a folder with any"),
        ("litdata", ["--documents", "eod", "--eod-token", "<none>"], "has no token '<none>'"),
        ("litdata", ["--to", "megatron"], "takes one store"),
    ],
)
def test_flags_that_do_not_fit_are_one_error_and_one_hint(
    tmp_path: Path,
    tokenizer_path: str,
    cli: Cli,
    capsys: pytest.CaptureFixture[str],
    sources: dict[str, Path],
    kind: str,
    words: list[str],
    fault: str,
) -> None:
    command = ["convert", sources[kind], "--output", tmp_path / "o", "--tokenizer", tokenizer_path, *words]
    assert cli(*command) in (1, 2)
    errors = capsys.readouterr().err
    assert errors.count("error: ") == errors.count("hint: ") == 1
    assert any(part in errors for part in fault.split("|"))
    assert not (tmp_path / "o").exists()
