"""The verbs `archive` and `unarchive`, and `verify` and `inspect` of what is no local store."""

import json
from pathlib import Path

import pytest

from tests.datakit.conftest import Cli, files_of
from tests.datakit.support.archived import make_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "s").path


def test_there_and_back(tmp_path: Path, store: Path, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["archive", store, "--output", tmp_path / "a", "--workers", 2, "--level", 5]
    assert cli(*words, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["num_files"] == 9
    assert summary["size_bytes"] > summary["packed_bytes"] > 0
    assert cli(*words) == 0
    assert f"{tmp_path / 'a'}: 9 files, 9 of them kept, 0.0 MB in 0.0 MB" in capsys.readouterr().out
    assert cli("unarchive", tmp_path / "a", "--output", tmp_path / "u", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["num_shards"]) == (str(tmp_path / "u"), 3)
    assert files_of(tmp_path / "u") == files_of(store)
    assert cli("unarchive", f"file://{store}", "--output", tmp_path / "u") == 0
    assert "7 documents" in capsys.readouterr().out


def test_verify_and_inspect_where_it_lies(
    tmp_path: Path, store: Path, cli: Cli, capsys: pytest.CaptureFixture[str], s3_url: str
) -> None:
    assert cli("archive", store, "--output", s3_url) == 0
    assert cli("archive", store, "--output", tmp_path / "a") == 0
    assert cli("inspect", store, "--json") == 0
    expected = json.loads(capsys.readouterr().out)
    for place in (str(tmp_path / "a"), s3_url, f"file://{store}"):
        assert cli("verify", place) == 0
        assert f"{place}: all checksums hold" in capsys.readouterr().out
        assert cli("verify", place, "--json") == 0
        assert json.loads(capsys.readouterr().out) == {"ok": True, "faults": []}
        assert cli("inspect", place, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found.pop("path") == place.removeprefix("file://")
        record = found.pop("archive", None)
        assert record is None if place.startswith("file:") else record["level"] == 3
        assert found == {name: value for name, value in expected.items() if name != "path"}
        assert cli("inspect", place) == 0
        assert ("zstd level 3" in capsys.readouterr().out) == (record is not None)
        for flags in (["--document", 0], ["--sample", 0, "--seq-length", 4]):
            assert cli("inspect", place, *flags) == 2
            assert f"hint: datakit unarchive {place} --output STORE" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["archive.json", "manifest.json", "shard-000001-000.bin.zst"])
def test_damage_is_a_failed_check_that_names_the_file(
    tmp_path: Path, store: Path, cli: Cli, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert cli("archive", store, "--output", tmp_path / "a") == 0
    file = tmp_path / "a" / name
    content = bytearray(file.read_bytes())
    content[60] ^= 1
    file.write_bytes(content)
    assert cli("verify", tmp_path / "a") == 1
    errors = capsys.readouterr().err
    assert errors.count("error: ") == 1
    assert str(file) in errors
    assert cli("verify", tmp_path / "a", "--json") == 1
    [fault] = json.loads(capsys.readouterr().out)["faults"]
    assert fault["file"] == str(file)
    assert cli("unarchive", tmp_path / "a", "--output", tmp_path / "u") == 1
    assert str(file) in capsys.readouterr().err


FAULTS = {
    "no store": (["archive", "nothing", "--output", "a"], 2, "is not a token store"),
    "no level": (["archive", "s", "--output", "a", "--level", 0], 2, "there is no level 0"),
    "no workers": (["archive", "s", "--output", "a", "--workers", 0], 2, "0 workers"),
    "full place": (["archive", "s", "--output", "s"], 2, "is not empty"),
    "no place": (["archive", "s", "--output", "nosuch://x"], 2, "cannot open nosuch://x"),
    "no bucket": (["archive", "s", "--output", "s3://"], 2, "names no bucket"),
    "no source": (["unarchive", "nothing", "--output", "u"], 2, "is not a token store or archive"),
    "output is a file": (["unarchive", "s", "--output", "s/manifest.json"], 2, "is not a folder"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_input_is_one_error_one_hint_and_an_exit_code(
    store: Path, cli: Cli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    words, code, message = FAULTS[fault]
    monkeypatch.chdir(store.parent)
    before = files_of(store)
    assert cli(*words) == code
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("error: ") == errors.count("hint: ") == 1
    assert files_of(store) == before
