"""Folders of torch.distributed.checkpoint: read without torch, nothing of them is run, what is not sound is refused."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit.cli import main
from ckptkit.foreign.checks import shown, words_of
from ckptkit.foreign.torch_files.pickle_writer import Call, External, Global, Made, pickled
from ckptkit.foreign.torch_files.restricted_pickle import parsed
from ckptkit.loading.roots import read_root
from ckptkit.torch import DcpReader
from tests.ckptkit.support.saves import ROOT
from threefold.errors import CheckFailed
from threefold.storage import open_storage

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:Detected an existing"),
]


def call(*arguments: object) -> int:
    """Run a verb of ckptkit; its exit code."""
    return main([str(each) for each in arguments])


def write_folder(folder: Path, state: dict[str, Any] | None = None) -> Path:
    """A save of DCP, by default of a matrix, one whose elements are in another order, and a pickled value."""
    matrix = torch.arange(6.0).reshape(2, 3)
    state = state or {"model": {"w": matrix, "turned": matrix.T}, "lr": 0.1}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    return folder


class Hostile:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def system(path: Path) -> list[bytes]:
    """Pickled data that makes a folder in every way that pickle has."""
    argument = pickled(str(path))[2:-1]
    return [
        pickle.dumps(Hostile(path), 2),
        pickle.dumps(Hostile(path), 4),
        b"(" + argument + b"iposix\nmkdir\n.",  # INST
        b"(cposix\nmkdir\n" + argument + b"o.",  # OBJ
        b"cbuiltins\neval\n(" + pickled(f"__import__('os').mkdir({str(path)!r})")[2:-1] + b"tR.",
        b"\x80\x04\x8c\x05torch\x8c\x12serialization.load\x93.",  # a dotted name
        b"\x80\x02\x82\x01.",  # an extension
    ]


def test_hostile_data_is_named_and_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, marker, run = write_folder(tmp_path / "save"), tmp_path / "made", tmp_path / "run"
    pickle.loads(system(marker)[0])
    marker.rmdir()
    for data in system(marker):
        (folder / ".metadata").write_bytes(data)
        assert call("import", folder, run, "--from", "dcp") == 1
        assert ".metadata " in capsys.readouterr().err
        assert not marker.exists()
        assert not run.exists()


def test_hostile_data_in_a_tensor_is_named_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker, run, folder = tmp_path / "made", tmp_path / "run", tmp_path / "save"
    usual = torch.save

    def save(value: Any, file: Any, **options: Any) -> None:
        usual(Hostile(marker) if isinstance(value, torch.Tensor) else value, file, **options)

    torch.save = save
    try:
        write_folder(folder)
    finally:
        torch.save = usual
    assert call("import", folder, run, "--from", "dcp") == 1
    assert "names 'posix.mkdir', which no such file has; nothing of it was run" in capsys.readouterr().err
    assert not marker.exists()
    assert not run.exists()


ALLOWED = {"torch.Size", "a.Class"}


def test_what_is_allowed_is_described_and_not_made() -> None:
    value = Made(
        Global("a", "Class"), {"size": Call(Global("torch", "Size"), ((2, 3),)), "one": [None, True, -1, 2**70]}
    )
    found = parsed(pickled((value, External(("storage", "0")))), ALLOWED, "here", external=lambda pid: pid[1])
    made, outside = found
    assert (made.name, made.args, outside) == ("a.Class", (), "0")
    assert (made.state["size"].args, made.state["one"]) == (((2, 3),), [None, True, -1, 2**70])
    assert pickle.loads(pickled([1, -1, 255, 2**40, "é", {"a": (1, ())}, False])) == [
        1, -1, 255, 2**40, "é", {"a": (1, ())}, False
    ]  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        b"", b".", b"N", b"\x80\x02(", b"\x80\x02\x81.", b"ctorch\nSize\nNR.", b"ctorch\nSize\n}b.", b"N}b.", b"(((.",
        b"X\xff\xff\xff\x7f", b"\x80\x02Nl.", b"\x80\x05\x97.", b"NQ.",
        b"ctorch\nSize\n}}\x92.", b"]ctorch\nSize\na" + b"0" * 9,
    ],
)  # fmt: skip
def test_damaged_data_is_one_error(data: bytes) -> None:
    with pytest.raises(CheckFailed, match=r"^here is not a file of pickled data, or is damaged"):
        parsed(data, ALLOWED, "here")


def test_a_large_number_takes_no_memory() -> None:
    """In C the memo would be a table of as many places."""
    assert parsed(b"\x80\x02ctorch\nSize\nr\xff\xff\xff\x7f.", ALLOWED, "here") == "torch.Size"


def laughing(levels: int = 39, *, end: bytes = b"") -> bytes:
    """A few bytes that describe ten to the power of so many values: each list holds the one before ten times."""
    body = b"\x80\x02]q\x00(" + b"K\x01" * 10 + b"e"
    for level in range(1, levels + 1):
        body += b"]q" + bytes([level]) + b"(" + (b"h" + bytes([level - 1])) * 10 + b"e"
    return body + end + b"."


def laughing_key() -> bytes:
    """The same of tuples as a key, whose hash would take for ever."""
    body = b"\x80\x02K\x01q\x00"
    for level in range(1, 40):
        body += b"(" + (b"h" + bytes([level - 1])) * 10 + b"tq" + bytes([level])
    return body + b"}h\x27Ns."


SPREADING = {
    "values that are used again and again": laughing(),
    "a key that is nested": laughing_key(),
    "nested more than": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a tuple of tuples": b"\x80\x02)" + b"\x85" * 100_000 + b".",
    "a value that holds itself": b"\x80\x02]q\x00h\x00a.",
    "no such file has": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",  # a bytearray of a terabyte
}


@pytest.mark.parametrize("data", SPREADING.values(), ids=SPREADING)
def test_a_few_bytes_take_neither_memory_nor_time(tmp_path: Path, data: bytes) -> None:
    """Whatever they describe, in 768 MiB, and what is said of them is short."""
    folder = tmp_path / "laughs"
    folder.mkdir()
    (folder / ".metadata").write_bytes(data)
    (folder / "__0_0.distcp").write_bytes(b"")
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (768 << 20,) * 2); "
    program = limit + "from ckptkit.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "import", str(folder), str(tmp_path / "run"), "--from", "dcp"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1, ended.stderr[-1000:]
    assert "Traceback" not in ended.stderr
    assert "is not a file of pickled data, or is damaged" in ended.stderr
    assert len(ended.stderr) < 600


CHOSEN = {  # keys of one hash, each of which a dict compares with all others
    "a number of more than 60 bits": {number * (2**61 - 1): None for number in range(9)},
    "more than 4,096 tuples as keys": {(number, number): None for number in range(4097)},
}


@pytest.mark.parametrize("what", CHOSEN)
def test_keys_whose_hashes_can_be_chosen_are_refused(what: str) -> None:
    for value in (CHOSEN[what], set(CHOSEN[what]), frozenset(CHOSEN[what])):
        with pytest.raises(CheckFailed, match=what):
            parsed(pickle.dumps(value, 4), ALLOWED, "here")
    few = {2**60 - 1: 1, -5: 2, (1, "a"): 3}
    assert parsed(pickle.dumps(few, 4), ALLOWED, "here") == few


def test_shared_values_are_read_as_they_are_used() -> None:
    shared = b"\x80\x02]q\x00(" + b"K\x01" * 3 + b"e]q\x01(h\x00h\x00e."
    assert parsed(shared, ALLOWED, "here") == [[1, 1, 1], [1, 1, 1]]


def test_what_a_message_shows_is_short() -> None:
    for value in ("n" * 100_000, 1 << 100_000, ["x" * 1000] * 1000, b"y" * 10_000, {"a": 1}, None):
        assert 0 < len(shown(value)) < 200
        assert 0 < len(words_of(KeyError(value))) < 200
    assert 0 < len(words_of(ValueError("z" * 10_000))) < 200
    assert shown(["stream.zstd"]) == "['stream.zstd']"


STATE = {"a.w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.tensor(7.0)}


def safetensors_writer(kind: str, folder: Path) -> Any:
    pytest.importorskip("safetensors")
    filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
    if kind == "files":
        form = filesystem.SerializationFormat.SAFETENSORS
        return filesystem.FileSystemWriter(folder, serialization_format=form)
    options = {"two": {"fqn_to_index_mapping": {"a.w": 1, "b": 2, "c": 2}}, "shards": {"save_distributed": True},
               "joined": {"save_distributed": True, "enable_consolidation": True}}  # fmt: skip
    return dcp.HuggingFaceStorageWriter(str(folder), **options.get(kind, {}))


@pytest.mark.parametrize("kind", ["files", "one", "two", "joined"])
def test_safetensors_that_torch_wrote_are_a_step(tmp_path: Path, kind: str) -> None:
    state = {name: each for name, each in STATE.items() if each.shape or kind != "joined"}  # torch joins these to zeros
    dcp.save(state, storage_writer=safetensors_writer(kind, tmp_path / "save"))
    assert call("import", tmp_path / "save", tmp_path / "run", "--from", "dcp") == 0
    assert call("diff", f"dcp:{tmp_path / 'save'}", tmp_path / "run") == 0
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, storage_reader=DcpReader(tmp_path / "run"))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_pickled_values_before_safetensors_are_kept(tmp_path: Path) -> None:
    state = {"model": STATE, "lr": 0.5}
    dcp.save(state, storage_writer=safetensors_writer("files", tmp_path / "save"))
    assert call("import", tmp_path / "save", tmp_path / "run", "--from", "dcp") == 0
    assert read_root(open_storage(tmp_path / "run"), 0).metadata["dcp"]["bytes"] == ["lr"]


def drop_a_file(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def drop_a_tensor(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"a.w"', '"a.v"'))


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        ("shards", lambda folder: None, "nothing says how large their tensors are"),
        ("two", drop_a_file, "model-00002-of-00002.safetensors is missing"),
        ("two", drop_a_tensor, "is in one of them only"),
    ],
)
def test_safetensors_that_are_not_whole_are_refused(
    tmp_path: Path, kind: str, change: Callable[[Path], None], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dcp.save(STATE, storage_writer=safetensors_writer(kind, tmp_path / "save"))
    change(tmp_path / "save")
    assert call("import", tmp_path / "save", tmp_path / "run", "--from", "dcp") == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def cut(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def spoil(folder: Path) -> None:
    """Damage the directory of one zip."""
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes().replace(b"archive/data/0", b"archive/dbta/0"))


def lengthen_name(folder: Path) -> None:
    write_folder(folder, {"n" * 300: torch.ones(2)})


def leave_a_chunk_out(folder: Path) -> None:
    data = pickle.loads((folder / ".metadata").read_bytes())
    data.state_dict_metadata["model.w"].chunks.clear()
    (folder / ".metadata").write_bytes(pickle.dumps(data))


def transform(folder: Path) -> None:
    data = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(data.storage_data.values())).transform_descriptors = ["stream.zstd"]
    (folder / ".metadata").write_bytes(pickle.dumps(data))


def leave(folder: Path) -> None:
    data = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(data.storage_data.values())).relative_path = "../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(data))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp: missing"),
        (lambda folder: (folder / ".metadata").write_bytes(b"{}"), "is not a file of pickled data"),
        (cut, "is not whole"),
        (spoil, "is not a tensor as torch.save writes it"),
        (lengthen_name, "no step can hold"),
        (leave_a_chunk_out, "model.w: 24 of 24 bytes are missing"),
        (transform, "were written through ['stream.zstd']"),
        (leave, "'../secret' is not a file of the folder"),
    ],
)  # fmt: skip
def test_what_is_not_sound_is_one_error_and_nothing_is_written(
    tmp_path: Path, change: Callable[[Path], None], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "save")
    change(folder)
    for options in ((), ("--dry-run",)):
        assert call("import", folder, tmp_path / "run", "--from", "dcp", *options) in (1, 2)
        error = capsys.readouterr().err
        assert text in error
        assert error.count("error:") == 1
        assert not (tmp_path / "run").exists()


def test_what_has_no_checksums_is_not_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", f"dcp:{write_folder(tmp_path / 'save')}") == 2
    assert "has no checksums that could be compared" in capsys.readouterr().err


def test_neither_torch_nor_pickled_objects_are_needed(tmp_path: Path) -> None:
    write_folder(tmp_path / "save")
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from ckptkit.cli import main\n"
        f"import os; os.chdir({str(tmp_path)!r})\n"
        "for argv in (['import', 'save', 'run', '--from', 'dcp'], ['diff', 'dcp:save', 'run'],\n"
        "             ['export', 'run', 'back', '--to', 'dcp'], ['diff', 'dcp:back', 'run'], ['hash', 'dcp:back']):\n"
        "    assert main(argv) == 0, argv\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
