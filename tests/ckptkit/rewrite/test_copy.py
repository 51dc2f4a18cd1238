"""Copy: byte for byte between any storages, never a damaged or half copy committed, a killed one goes on."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptkit.check.verify import verify_checkpoint
from ckptkit.cli import main
from ckptkit.loading.reader import CheckpointReader
from ckptkit.model.layout import ParallelLayout
from ckptkit.rewrite.copy import CopyReport, copy_step
from ckptkit.runs.catalogue import committed_steps
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.saves import ROOT, strace
from tests.support.small_disk import small_disk
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import Storage, folders, open_storage

TENSORS = gpt_tensors(hidden=128, vocab=4001)


def make(folder: Path, step: int = 9) -> Path:
    write_checkpoint(open_storage(folder), step, ParallelLayout(tp=2, dp=2), 3, TENSORS, values(TENSORS))
    return folder


def copy(source: Path | str, target: Path | str | Storage, **options: int) -> CopyReport:
    to = target if not isinstance(target, Path | str) else open_storage(target)
    with CheckpointReader(open_storage(source), 9) as reader:
        return copy_step(reader, to, **options)


def contents(url: Path | str) -> dict[str, bytes]:
    storage = open_storage(url)
    return {item.key: storage.read(item.key) for item in storage.list()}


@pytest.mark.parametrize("kinds", ["local-local", "local-s3", "s3-local", "local-memory"])
def test_a_copy_is_the_same_bytes(tmp_path: Path, kinds: str, request: pytest.FixtureRequest) -> None:
    make(tmp_path / "made")
    urls = []
    for number, kind in enumerate(kinds.split("-")):
        if kind == "s3":
            urls.append(request.getfixturevalue("s3_url"))
        else:
            urls.append({"local": "", "memory": "memory:/"}[kind] + f"{tmp_path}/{number}")
    if kinds.startswith("s3"):
        copy(tmp_path / "made", urls[0])
    else:
        urls[0] = str(tmp_path / "made")
    report = copy(urls[0], urls[1], verify=True)
    made = contents(tmp_path / "made")
    assert contents(urls[1]) == made
    assert (report.bytes_copied, report.bytes_kept) == (sum(map(len, made.values())), 0)
    again = copy(urls[0], urls[1])
    assert (again.bytes_copied, again.bytes_kept) == (0, 0)


def test_what_is_whole_and_right_is_kept_and_the_rest_written_anew(tmp_path: Path) -> None:
    source, target = make(tmp_path / "source"), tmp_path / "target"
    copy(source, target)
    folder = target / "step-000000009"
    (folder / "root.json").unlink()
    wrong, short, missing = (folder / f"a1/part-0000{n}.safetensors" for n in (0, 1, 2))
    content = bytearray(wrong.read_bytes())
    content[-1] ^= 1
    wrong.write_bytes(content)
    short.write_bytes(short.read_bytes()[:-1])
    missing.unlink()
    (folder / "a1/part-00003.index").write_bytes(b"old")
    report = copy(source, target)
    made = contents(source)
    assert contents(target) == made
    assert report.bytes_kept == sum(
        len(made[f"step-000000009/a1/{name}"])
        for name in ("part-00003.safetensors", "part-00000.index", "part-00001.index", "part-00002.index")
    )


@pytest.mark.parametrize("kind", ["safetensors", "index"])
def test_a_damaged_source_is_never_committed(tmp_path: Path, kind: str) -> None:
    source, target = make(tmp_path / "source"), tmp_path / "target"
    path = source / f"step-000000009/a1/part-00001.{kind}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckFailed, match=rf"part-00001\.{kind} is damaged"):
        copy(source, target)
    assert committed_steps(open_storage(target)) == []


def test_a_copy_onto_itself_by_way_of_a_missing_folder_changes_nothing(tmp_path: Path) -> None:
    before = contents(make(tmp_path / "run"))
    assert main(["copy", f"{tmp_path}/run", f"{tmp_path}/missing/../run"]) == 0
    assert contents(tmp_path / "run") == before
    assert not (tmp_path / "missing").exists()


def test_another_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    source, target = make(tmp_path / "source"), tmp_path / "target"
    write_checkpoint(open_storage(target), 9, ParallelLayout(), 3, TENSORS, values(TENSORS))
    before = contents(target)
    with pytest.raises(UserError, match="already holds another checkpoint as step 9"):
        copy(source, target)
    assert contents(target) == before


@pytest.mark.parametrize("verify", [False, True])
def test_a_copy_that_went_wrong_is_not_committed(tmp_path: Path, verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that loses (or, to be found by reading back, spoils) what it was given."""
    source, target = make(tmp_path / "source"), tmp_path / "target"
    advance = "ckptkit.rewrite.copy._Copying._advance"

    def spoil(self: object, num_bytes: int) -> None:
        for path in target.rglob("part-00000.index"):  # written after its data
            data = path.with_suffix(".safetensors")
            data.write_bytes(data.read_bytes()[:-1] + (b"\xff" if verify else b""))

    monkeypatch.setattr(advance, spoil)
    with pytest.raises(CheckFailed, match=r"the copy in .* is damaged: a1/part-00000\.safetensors"):
        copy(source, target, verify=verify, files_at_once=1)
    assert committed_steps(open_storage(target)) == []


@pytest.mark.parametrize("at", ["fsync:signal=KILL:when=1", "fsync:signal=KILL:when=2", "renameat:signal=KILL"])
def test_a_killed_copy_is_no_checkpoint_and_goes_on(tmp_path: Path, at: str) -> None:
    source, target = make(tmp_path / "source"), tmp_path / "target"
    command = [sys.executable, "-m", "ckptkit", "copy", str(source), str(target)]
    killed = subprocess.run([*strace(at), *command], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert killed.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert committed_steps(open_storage(target)) == []
    done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)[0]["step"] == 9
    assert contents(target) == contents(source)


def test_no_root_is_linked_over_a_file_that_could_not_be_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier try left is made durable before it is kept; where that fails it is removed, then copied anew."""
    source, target = make(tmp_path / "source"), tmp_path / "target"
    copy(source, target)
    (target / "step-000000009/root.json").unlink()
    usual, data = os.fsync, target / "step-000000009/a1/part-00002.safetensors"
    broken, synced, inode = [data.stat().st_ino], set[str](), data.stat().st_ino

    def fsync(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino in broken:
            broken.clear()
            raise OSError(errno.EIO, "Input/output error")
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        usual(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    os.link(data, tmp_path / "held")  # so that no other file gets its number
    with pytest.raises(StorageError, match=r"cannot write .*part-00002\.safetensors: Input/output error"):
        copy(source, target)
    assert committed_steps(open_storage(target)) == []
    assert not data.exists()
    synced.clear()
    report = copy(source, target)
    assert contents(target) == contents(source)
    assert data.stat().st_ino != inode
    assert report.bytes_kept > 0
    names = {path.name for path in (target / "step-000000009/a1").iterdir()}
    assert {name for name in names if name in synced} == names - {data.name}, "all that was kept, by this run"
    synced.clear()
    folders._durable.clear()  # as in another process
    copy(source, target)
    assert {"step-000000009", "target"} <= synced, "where all is there the root's name is made durable"


@pytest.mark.parametrize("link", ["", "/a1", "/a1/part-00001.safetensors", "/a1/part-00001.index", "/root.json"])
def test_a_copy_writes_through_no_link(tmp_path: Path, link: str) -> None:
    """A link that was planted where the step, its attempt or a file is to be, to something and to nothing."""
    source, outside = make(tmp_path / "source"), tmp_path / "outside"
    outside.write_bytes(b"precious")
    for number, leads_to in enumerate(("outside", "nothing", "folder")):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder/mine").write_bytes(b"precious")
        path = tmp_path / f"target-{number}/step-000000009{link}"
        path.parent.mkdir(parents=True)
        path.symlink_to(tmp_path / leads_to)
        with pytest.raises(UserError):
            copy(source, tmp_path / f"target-{number}")
        assert os.readlink(path) == str(tmp_path / leads_to)
    assert outside.read_bytes() == b"precious"
    assert [each.name for each in (tmp_path / "folder").iterdir()] == ["mine"]
    assert not (tmp_path / "nothing").exists()


def test_all_steps_of_a_run_but_damaged_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for step in (3, 9, 12):
        make(source, step)
    (source / "step-000000009/a1/part-00002.safetensors").unlink()
    assert main(["copy", str(source), str(target), "--all", "--json"]) == 1
    captured = capsys.readouterr()
    assert [row["step"] for row in json.loads(captured.out)] == [3, 12]
    assert "part-00002.safetensors is missing" in captured.err
    assert committed_steps(open_storage(target)) == [3, 12]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}/step-000000009", "{run}-2", "--all"], "leave --all out"),
        (["{run}", "{run}-2/step-000000010"], "a copy keeps its number"),
        (["{run}", "{run}-2/step-000000009", "--all"], "a copy keeps its number"),
        (["{run}/step-000000010", "{run}-2"], "holds no committed step 10"),
    ],
)
def test_bad_addresses(tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run")
    assert main(["copy", *(text.format(run=run) for text in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert not os.path.exists(f"{run}-2")


def test_a_copy_restores_elsewhere(tmp_path: Path) -> None:
    copy(make(tmp_path / "source"), tmp_path / "target")
    with CheckpointReader(open_storage(tmp_path / "target"), 9) as reader:
        assert verify_checkpoint(reader).ok


@pytest.mark.parametrize("verb", ["copy", "export"])
def test_what_a_killed_try_left_takes_no_room_of_the_next(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hidden file goes before the room is looked at, and a dry run counts it as free."""
    run = make(tmp_path / "run")
    step_bytes = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    hidden: list[Path] = []

    def killed(*arguments: object, **_: object) -> None:
        storage, key = arguments[:2] if verb == "export" else (arguments[1], arguments[2][0])
        path = storage.local_path(key)
        hidden.append(path.with_name(f".{path.name}.0123456789abcdef.tmp"))
        hidden[0].parent.mkdir(parents=True, exist_ok=True)
        hidden[0].write_bytes(bytes(step_bytes * 2 // 3))
        raise KeyboardInterrupt

    place = "ckptkit.foreign.folder_export.write_blocks" if verb == "export" else "ckptkit.rewrite.copy.copy_part"
    flags = ["--to", "dcp"] if verb == "export" else []
    with small_disk(tmp_path / "disk", int(step_bytes * 1.3)) as disk:
        arguments = [verb, str(run), str(disk / "to"), *flags]
        with monkeypatch.context() as patched:
            patched.setattr(place, killed)
            assert main(arguments) == 130
        assert main([*arguments, "--dry-run"]) == 0
        assert hidden[0].exists()
        assert main(arguments) == 0
        assert not hidden[0].exists()


def test_hidden_files_of_killed_copies_go_but_those_that_are_written(tmp_path: Path) -> None:
    with CheckpointReader(open_storage(make(tmp_path / "run")), 9) as reader:
        parts = reader.root.parts
    data, index = (tmp_path / f"to/step-000000009/{name}" for name in (parts[0].data, parts[1].index))
    hidden = [path.with_name(f".{path.name}.{'0' * 15}{n}.tmp") for n, path in enumerate((data, index, data))]
    other = tmp_path / "to/step-000000009/other-attempt" / hidden[0].name
    for path in (*hidden, other):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"begun")
    with open(hidden[2], "rb") as written:
        fcntl.flock(written, fcntl.LOCK_EX)
        copy(tmp_path / "run", tmp_path / "to")
    assert [path for path in (*hidden, other) if path.exists()] == [hidden[2], other]
