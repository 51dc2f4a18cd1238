"""The store's copy of its tokenizer: made, carried, checked, read; and stores without one, as they ever were."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from datakit import Recipe, RemoteStore, TokenStore, archive, from_megatron, merge, preprocess, unarchive, verify
from datakit.format.manifest import Manifest
from datakit.tokenization.rank_file import sidecar_path
from datakit.tokenization.tokenizer import open_tokenizer
from datakit.tokenization.tokenizer_training import train_tokenizer
from tests.datakit.conftest import Cli, files_of, write_jsonl
from threefold.errors import CheckFailed, UserError

TEXTS = ["the first text", "größe 列車", "", "another one of some words"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", TEXTS)


def make(corpus: Path, output: Path | str, tokenizer: Path | str) -> TokenStore | None:
    preprocess([corpus], output, Recipe(str(tokenizer)), num_workers=1)
    return None if "://" in str(output) else TokenStore.open(output)


def without_copy(store: Path) -> None:
    """Make the store what it was before stores kept copies."""
    manifest = Manifest.read(store)
    for name in manifest.tokenizer_files:
        (store / name).unlink()
    replace(manifest, tokenizer_files={}).write(store)


def text_of(store: TokenStore) -> str:
    tokenizer = store.open_tokenizer()
    assert tokenizer is not None
    return tokenizer.decode(store.document(1))


def test_a_store_reads_its_own_text(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    store = make(corpus, tmp_path / "store", tokenizer_path)
    assert (tmp_path / "store" / "tokenizer.json").read_bytes() == Path(tokenizer_path).read_bytes()
    assert text_of(store) == TEXTS[1]
    assert verify(store.path) == []


def test_ranks_take_their_sidecar_along(tmp_path: Path, corpus: Path, rank_path: Path) -> None:
    store = make(corpus, tmp_path / "store", rank_path)
    assert list(store.manifest.tokenizer_files) == ["tokenizer.tiktoken", "tokenizer.tiktoken.json"]
    sidecar_path(rank_path).unlink()
    rank_path.unlink()
    assert text_of(store) == TEXTS[1]
    assert open_tokenizer(store.path).fingerprint == store.manifest.tokenizer.fingerprint


def test_sentencepiece_too(tmp_path: Path, corpus: Path, model_path: Path) -> None:
    store = make(corpus, tmp_path / "store", model_path)
    assert list(store.manifest.tokenizer_files) == ["tokenizer.model"]
    assert store.open_tokenizer().fingerprint == store.manifest.tokenizer.fingerprint


def test_every_way_of_a_store_carries_it(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    store = make(corpus, tmp_path / "store", tokenizer_path)
    old = tmp_path / "old"
    shutil.copytree(store.path, old)
    without_copy(old)
    merged = merge([old, store.path], tmp_path / "merged")
    archive(str(store.path), str(tmp_path / "archive"))
    unpacked = unarchive(str(tmp_path / "archive"), tmp_path / "unpacked")
    assert files_of(unpacked.path) == {k: v for k, v in files_of(store.path).items() if k != ".sources.json"}
    for made in (merged, unpacked):
        assert text_of(made) == TEXTS[1]
        assert verify(made.path) == []
    assert verify(tmp_path / "archive") == []
    assert merge([old, old], tmp_path / "plain").open_tokenizer() is None
    assert merge([old, store.path], tmp_path / "merged").manifest == merged.manifest  # complete already


def test_a_merge_takes_a_sound_copy(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    stores = [make(corpus, tmp_path / name, tokenizer_path).path for name in ("first", "second")]
    (stores[0] / "tokenizer.json").write_bytes(b"{}")
    assert verify(merge(stores, tmp_path / "merged").path) == []
    (stores[0] / "tokenizer.json").unlink()
    assert verify(merge(stores, tmp_path / "other").path) == []
    (stores[1] / "tokenizer.json").unlink()
    with pytest.raises(CheckFailed, match=r"first/tokenizer\.json, the store's copy of its tokenizer") as caught:
        merge(stores, tmp_path / "none")
    shutil.copyfile(tokenizer_path, stores[0] / "tokenizer.json")  # as the hint says
    assert f"cp FILE {stores[0]}/tokenizer.json" in caught.value.hint
    assert verify(merge(stores, tmp_path / "none").path) == []


def test_converted_stores_keep_it(tmp_path: Path, corpus: Path, tokenizer_path: str, cli: Cli) -> None:
    from datakit.foreign.foreign_store import Choices

    store = make(corpus, tmp_path / "store", tokenizer_path)
    made = from_megatron([store.path / "shard-000000-000"], tmp_path / "made", Choices(tokenizer_path))
    assert text_of(made) == TEXTS[1]
    assert cli("convert", store.path / "shard-000000-000", "--output", tmp_path / "again") == 0  # by the store's own
    assert text_of(TokenStore.open(tmp_path / "again")) == TEXTS[1]


def test_damage_is_found_and_named(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    store = make(corpus, tmp_path / "store", tokenizer_path)
    archive(str(store.path), str(tmp_path / "archive"))
    for place in (store.path, tmp_path / "archive"):
        file = place / "tokenizer.json"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + b"!")
        [fault] = verify(place)
        assert fault.file.endswith("tokenizer.json")
        file.unlink()
        [fault] = verify(place)
        assert "is missing" in fault.message
        file.write_bytes(content)
    (store.path / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(CheckFailed, match="copy of its tokenizer") as caught:
        store.open_tokenizer()
    assert "--tokenizer FILE" in caught.value.hint
    assert len(store.document(1))  # the tokens do not need it


def test_a_copy_is_checked_alike_where_it_is_opened_and_where_another_store_takes_it(
    tmp_path: Path, corpus: Path, rank_path: Path
) -> None:
    store = make(corpus, tmp_path / "store", rank_path)
    sidecar = store.path / "tokenizer.tiktoken.json"
    for act, what in ((lambda: sidecar.write_bytes(b"{}"), "is damaged"), (sidecar.unlink, "is missing")):
        act()
        for use, way_out in (
            (store.open_tokenizer, "does without it"),
            (lambda: make(corpus, "x", store.path), "is another"),
        ):
            with pytest.raises(CheckFailed, match=f"{sidecar}, the store's copy of its tokenizer, {what}") as caught:
                use()
            assert f"--tokenizer FILE {way_out}" in caught.value.hint


def test_a_manifest_names_no_other_files(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    store = make(corpus, tmp_path / "store", tokenizer_path)
    [digest] = store.manifest.tokenizer_files.values()
    replace(store.manifest, tokenizer_files={"../tok.json": digest}).write(store.path)
    with pytest.raises(CheckFailed, match="is not a name of a tokenizer's file"):
        TokenStore.open(store.path)


def test_an_older_manifest_has_its_older_bytes(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    store = make(corpus, tmp_path / "store", tokenizer_path)
    without_copy(store.path)
    raw = json.loads((store.path / "manifest.json").read_bytes())
    assert "tokenizer_files" not in raw
    assert TokenStore.open(store.path).fingerprint == store.fingerprint
    before = files_of(store.path)
    make(corpus, store.path, tokenizer_path)  # the same command: it is complete
    assert files_of(store.path) == before
    assert verify(store.path) == []


def test_a_tokenizer_that_changes_meanwhile_is_not_kept(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    from datakit.format.tokenizer_copy import tokenizer_copy

    with pytest.raises(UserError, match="changed while the store was made"):
        tokenizer_copy(tokenizer_path, "0" * 32)


def test_a_remote_store_fetches_it_when_it_is_asked_for(
    tmp_path: Path, corpus: Path, tokenizer_path: str, s3_url: str
) -> None:
    make(corpus, f"{s3_url}/store", tokenizer_path)
    store = RemoteStore.at(f"{s3_url}/store", cache=str(tmp_path / "cache"))
    assert text_of(store) == TEXTS[1]
    assert verify(f"{s3_url}/store") == []
    archive(str(unarchive(f"{s3_url}/store", tmp_path / "local").path), f"{s3_url}/archive")
    assert text_of(RemoteStore.at(f"{s3_url}/archive", cache=str(tmp_path / "cache"))) == TEXTS[1]


def test_verbs_do_without_a_flag(
    tmp_path: Path, corpus: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make(corpus, tmp_path / "store", tokenizer_path)
    assert cli("inspect", store.path, "--document", 1) == 0
    assert TEXTS[1] in capsys.readouterr().out
    assert cli("inspect", store.path, "--document", 1, "--ids") == 0
    assert capsys.readouterr().out.splitlines()[1] == " ".join(map(str, store.document(1)))
    train_tokenizer([str(corpus)], str(tmp_path / "other.json"), vocab_size=300)
    assert cli("inspect", store.path, "--document", 1, "--tokenizer", tmp_path / "other.json") == 2
    assert "leave --tokenizer out" in capsys.readouterr().err
    asked = ("--tokenizer", tmp_path / "other.json", "--any-tokenizer")
    assert cli("inspect", store.path, "--document", 1, *asked) == 0
    assert cli("preprocess", corpus, "--output", tmp_path / "again", "--tokenizer", store.path) == 0
    assert TokenStore.open(tmp_path / "again").fingerprint == store.fingerprint
    without_copy(store.path)
    assert cli("inspect", store.path, "--document", 1) == 0
    assert capsys.readouterr().out.splitlines()[1] == " ".join(map(str, store.document(1)))


def test_no_store_is_made_with_a_copy_that_is_damaged(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    """It may be sound JSON still, of other merges."""
    make(corpus, tmp_path / "store", tokenizer_path)
    make(corpus, tmp_path / "sound", tmp_path / "store")
    copy = tmp_path / "store" / "tokenizer.json"
    copy.write_text(copy.read_text() + " ")
    with pytest.raises(CheckFailed, match="checksum does not hold"):
        make(corpus, tmp_path / "other", tmp_path / "store")
    assert not (tmp_path / "other").exists()
