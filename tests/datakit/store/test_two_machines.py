"""Two machines, whose locks do not see each other, make one output behind a URL: one corpus is there whole, or both."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from datakit import Recipe, TokenStore, archive, merge, preprocess, verify
from datakit.foreign.megatron import to_megatron
from datakit.format import output as outputs
from datakit.format.output import Output
from tests.datakit.conftest import write_jsonl
from tests.support.interrupted import interrupted
from threefold.errors import UserError
from threefold.storage import open_storage

Verb = Callable[[Path, str], object]
VERBS: dict[str, Verb] = {
    "preprocess": lambda store, url: preprocess([f"{store}.jsonl"], url, Recipe(str(store.parent / "tok.json"))),
    "preprocess --dedup": lambda store, url: preprocess(
        [f"{store}.jsonl"], url, Recipe(str(store.parent / "tok.json"), dedup=True)
    ),
    "merge": lambda store, url: merge([store, store], url),
    "convert": to_megatron,
    "archive": lambda store, url: archive(store, url),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, texts: list[str], tokenizer_path: str) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("stores")
    (folder / "tok.json").write_bytes(Path(tokenizer_path).read_bytes())
    for name, some in (("a", texts[:40]), ("b", texts[40:60])):
        write_jsonl(folder / f"{name}.jsonl", some)
        preprocess([str(folder / f"{name}.jsonl")], folder / name, Recipe(tokenizer_path))
    return folder / "a", folder / "b"


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Be one of several machines, by its name."""

    def be(name: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.setattr(outputs, "temporary_folder", lambda: tmp_path / name)

    be("first")
    return be


def objects_of(url: str) -> dict[str, bytes]:
    storage = open_storage(url)
    return {info.key: storage.read(info.key) for info in storage.list() if info.key != ".sources.json"}


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_of_two_runs_of_other_input_the_second_ends_with_the_name_of_the_first(
    s3_url: str, stores: tuple[Path, Path], machines: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, verb: Verb
) -> None:
    faults: list[str] = []

    def other() -> None:
        machines("second")
        with pytest.raises(UserError, match=r"was begun from other (input|sources or in another way) by run \S+:\d+"):
            verb(stores[1], f"{s3_url}/out")
        faults.append("refused")
        machines("first")

    interrupted(monkeypatch, Output, "commit", other)
    verb(stores[0], f"{s3_url}/out")
    assert faults == ["refused"]
    verb(stores[0], f"{s3_url}/alone")
    assert objects_of(f"{s3_url}/out") == objects_of(f"{s3_url}/alone")


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_a_run_that_looked_before_another_was_complete_leaves_that_as_it_is(
    s3_url: str, stores: tuple[Path, Path], machines: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, verb: Verb
) -> None:
    def other() -> None:
        machines("second")
        verb(stores[1], f"{s3_url}/out")
        machines("first")

    interrupted(monkeypatch, Output, "begin", other)
    with pytest.raises(UserError, match="is taken: another run writes it or has just completed it"):
        verb(stores[0], f"{s3_url}/out")
    verb(stores[1], f"{s3_url}/alone")
    assert objects_of(f"{s3_url}/out") == objects_of(f"{s3_url}/alone")


def test_a_run_that_begins_while_another_looks_is_no_other_thing_that_is_there(
    s3_url: str, machines: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, place = Output.read, Output(f"{s3_url}/out")

    def read(output: Output, key: str) -> bytes | None:
        monkeypatch.setattr(Output, "read", usual)
        found = usual(output, key)
        Output(f"{s3_url}/out").begin({"of": "another"})
        return found

    monkeypatch.setattr(Output, "read", read)
    place.check_free()
    assert place.begin({"of": "mine"}).made_of == {"of": "another"}


@pytest.mark.ci
@pytest.mark.slow
def test_two_runs_of_one_input_make_one_store(
    s3_url: str, stores: tuple[Path, Path], machines: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other() -> None:
        machines("second")
        VERBS["preprocess"](stores[0], f"{s3_url}/out")
        machines("first")

    interrupted(monkeypatch, Output, "commit", other)
    VERBS["preprocess"](stores[0], f"{s3_url}/out")
    assert not verify(f"{s3_url}/out")


@pytest.mark.parametrize("verb", ["preprocess", "preprocess --dedup"])
def test_other_content_of_equal_names_and_sizes_is_another_input(
    s3_url: str, tmp_path: Path, texts: list[str], tokenizer_path: str, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Each machine has a file of this name and size on a disk of its own."""
    (tmp_path / "tok.json").write_bytes(Path(tokenizer_path).read_bytes())
    write_jsonl(tmp_path / "a.jsonl", texts[:40])
    content = (tmp_path / "a.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Output, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            VERBS[verb](tmp_path / "a", f"{s3_url}/out")
    (tmp_path / "a.jsonl").write_bytes(content.swapcase())
    with pytest.raises(UserError, match="was begun from other input by run"):
        VERBS[verb](tmp_path / "a", f"{s3_url}/out")
    (tmp_path / "a.jsonl").write_bytes(content)  # a copy has another time
    VERBS[verb](tmp_path / "a", f"{s3_url}/out")
    assert not verify(f"{s3_url}/out")


def test_a_claim_from_before_content_was_glanced_at_is_gone_on_with(
    s3_url: str, stores: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Output, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            VERBS["preprocess"](stores[0], f"{s3_url}/out")
    storage, key = open_storage(f"{s3_url}/out"), Output(f"{s3_url}/out").note_key
    note = json.loads(storage.read(key))
    [made_of] = [part for part in (note, *note.values()) if isinstance(part, dict) and "probe" in part]
    del made_of["probe"]
    storage.write(key, json.dumps(note).encode())
    VERBS["preprocess"](stores[0], f"{s3_url}/out")
    assert not verify(f"{s3_url}/out")


def test_a_half_made_store_of_this_machine_goes_on_with_input_that_has_changed(
    tmp_path: Path, stores: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Output, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        VERBS["preprocess"](stores[0], str(tmp_path / "out"))
    monkeypatch.undo()
    VERBS["preprocess"](stores[1], str(tmp_path / "out"))
    assert TokenStore.open(tmp_path / "out").num_documents == TokenStore.open(stores[1]).num_documents
