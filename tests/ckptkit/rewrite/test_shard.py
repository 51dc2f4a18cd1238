"""Shards of a reshard: a plan that all processes know, killed and repeated ones, and the one that commits."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.check.hash import hash_checkpoint
from ckptkit.check.verify import verify_checkpoint
from ckptkit.cli import main
from ckptkit.format.keys import step_folder
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import read_root, root_info
from ckptkit.model.layout import ParallelLayout
from ckptkit.rewrite import target_files
from ckptkit.rewrite.reshard import ReshardReport, reshard
from ckptkit.rewrite.shard import Shard, shares
from ckptkit.runs.temporaries import temporaries
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.model_tables import gpt_tensors, values
from threefold.errors import StorageError, UserError
from threefold.storage import Storage, open_storage
from threefold.storage.contract import temporary_name
from threefold.storage.fault import Fault, FaultStorage
from threefold.storage.memory import MemoryStorage
from threefold.storage.stale_uploads import abort_stale_uploads

LAYERS, STEP, LAYOUT = 4, 3, ParallelLayout(tp=2, pp=2, dp=2)
SIZES = st.lists(st.integers(1, 1 << 50), min_size=1, max_size=60)


@pytest.mark.parametrize(
    ("variables", "shard"),
    [
        ({"RANK": "2", "WORLD_SIZE": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Shard(2, 3)),
        ({"SLURM_PROCID": "4", "SLURM_NTASKS": "8"}, Shard(4, 8)),
        (dict(zip(("ID", "MIN", "STEP", "COUNT"), "7325", strict=True)), Shard(2, 5)),
        (dict(zip(("ID", "MIN", "STEP", "COUNT"), "1013", strict=True)) | {"PROCID": "1", "NTASKS": "2"}, Shard(3, 6)),
    ],
)
def test_auto_is_what_a_launcher_says(variables: dict[str, str], shard: Shard) -> None:
    prefixes = {"ID": "SLURM_ARRAY_TASK_", "MIN": "SLURM_ARRAY_TASK_", "STEP": "SLURM_ARRAY_TASK_"}
    prefixes |= {"COUNT": "SLURM_ARRAY_TASK_", "PROCID": "SLURM_", "NTASKS": "SLURM_"}
    assert Shard.parse("auto", {prefixes.get(name, "") + name: text for name, text in variables.items()}) == shard


@pytest.mark.parametrize(
    ("text", "variables", "message"),
    [
        ("auto", {}, "finds none of SLURM_ARRAY_TASK_ID, SLURM_PROCID, RANK"),
        ("auto", {"RANK": "1"}, "cannot read RANK=1, WORLD_SIZE= as numbers"),
        ("3/3", {}, "shard 3/3 is not one of 3"),
        ("1", {}, "'1' is not a shard"),
    ],
)
def test_shards_that_cannot_be(text: str, variables: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Shard.parse(text, variables)
    assert caught.value.hint


@given(sizes=SIZES, count=st.integers(1, 70))
def test_shares_are_neighbours_of_equal_bytes_but_for_a_file(sizes: list[int], count: int) -> None:
    parts = shares(sizes, count)
    assert parts == sorted(parts)
    assert 0 <= parts[0] <= parts[-1] < count
    for number in range(count):
        held = [size for size, owner in zip(sizes, parts, strict=True) if owner == number]
        assert count * sum(held) <= sum(sizes) + count * max(held, default=0)
    assert shares([4, 4, 2, 6], 2) == [0, 0, 1, 1]
    assert list(accumulate(parts, max)) == parts


@pytest.fixture
def source(tmp_path: Path) -> Storage:
    tensors = gpt_tensors(LAYERS)
    storage = open_storage(tmp_path / "source")
    write_checkpoint(storage, STEP, ParallelLayout(tp=4), LAYERS, tensors, values(tensors))
    return storage


def run(source: Storage, target: Storage, shard: Shard, **options: Any) -> ReshardReport:
    with CheckpointReader(source, STEP) as reader:
        return reshard(reader, target, LAYOUT, shard=shard, **options)


def contents(storage: Storage) -> dict[str, bytes]:
    return {item.key: storage.read(item.key) for item in storage.list()}


@pytest.mark.parametrize(("order", "is_local"), [((0, 1, 2), False), ((2, 0, 1), True)])
def test_shards_in_any_order_are_the_reshard(
    source: Storage, tmp_path: Path, order: tuple[int, ...], is_local: bool
) -> None:
    target = open_storage(tmp_path / "target") if is_local else MemoryStorage()
    whole = open_storage(tmp_path / "whole")
    alone = run(source, whole, Shard())
    dry = run(source, target, Shard(1, 3), dry_run=True)
    assert sum(num_bytes for _, num_bytes in dry.shards) == alone.bytes_written
    assert dry.num_missing == 8 - dry.num_files
    assert not list(target.list())
    reports = []
    for number in order:
        assert root_info(target, STEP) is None
        reports.append(run(source, target, Shard(number, 3)))
    assert [report.num_missing for report in reports][-1] == 0
    assert [(each.num_files, each.bytes_written) for each in reports] == [dry.shards[number] for number in order]
    assert contents(target) == contents(whole)
    again = run(source, target, Shard(0, 3))
    assert (again.was_there, again.bytes_written) == (True, 0)
    with CheckpointReader(target, STEP) as reader, CheckpointReader(source, STEP) as before:
        assert verify_checkpoint(reader).ok
        assert hash_checkpoint(reader) == hash_checkpoint(before)


@pytest.mark.parametrize("fails_at", ["part-00007.safetensors", "part-00006.index"])
def test_a_shard_that_fails_leaves_what_is_whole_and_goes_on(source: Storage, fails_at: str) -> None:
    target = MemoryStorage()
    run(source, target, Shard(0, 2))
    broken = FaultStorage(target, Fault(StorageError("no answer"), ("write",), f"*/{fails_at}"))
    with pytest.raises(StorageError, match="no answer"):
        run(source, broken, Shard(1, 2), slab_bytes=1 << 20)  # so that files are done one after the other
    done = run(source, target, Shard(1, 2))
    assert (done.num_missing, done.num_files) == (0, 4)
    assert min(done.bytes_kept, done.bytes_written) > 0
    whole = MemoryStorage()
    run(source, whole, Shard())
    assert contents(target) == contents(whole)


def test_the_command_shows_the_plan_and_what_is_missing(source: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reshard", source.url, f"{source.url}/../target", "--pp", "4", "--shard"]
    assert main([*words, "0/3", "--dry-run"]) == 0
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert [line.partition(" files")[0] for line in (first, second, third)] == [
        "shard 0/3: 1", "shard 1/3: 2", "shard 2/3: 1"]  # fmt: skip
    assert last.endswith(" bytes would be written, 3 files of other shards are not there yet")
    assert main([*words, "1/3"]) == 0
    assert "tp4 -> pp4, shard 1/3, 2 files, " in (shown := capsys.readouterr().out)
    assert shown.endswith(", 2 files of other shards are not there yet\n")


def test_another_number_of_shards_goes_on_with_the_files(source: Storage) -> None:
    target = MemoryStorage()
    first = run(source, target, Shard(2, 3))
    done = run(source, target, Shard())
    assert done.bytes_kept == first.bytes_written
    assert root_info(target, STEP)


def test_files_of_an_earlier_try_that_are_not_right_are_written_again(source: Storage, tmp_path: Path) -> None:
    target = open_storage(tmp_path / "target")
    run(source, target, Shard())
    before = contents(target)
    parts = read_root(target, STEP).parts
    target.delete([f"{step_folder(STEP)}/root.json"])
    for key, where in ((parts[0].data, -1), (parts[1].index, 40), (parts[2].index, -1)):
        path = target.local_path(f"{step_folder(STEP)}/{key}")
        assert path is not None
        content = bytearray(path.read_bytes())
        content[where] ^= 1
        path.write_bytes(content)
    hidden = [temporary_name(f"part-{number:05d}.safetensors") for number in (1, 7)] + [temporary_name("root.json")]
    folders = [parts[0].data.partition("/")[0]] * 2 + ["."]
    for folder, name in zip(folders, hidden, strict=True):
        (tmp_path / "target" / step_folder(STEP) / folder / name).write_bytes(b"half of it")
    done = run(source, target, Shard())
    assert done.bytes_written == sum(part.data_bytes for part in parts[:3])
    assert contents(target) == before
    assert not [path for path in (tmp_path / "target").rglob(".*") if path.is_file()]


@pytest.mark.parametrize("others", [(0,), (0, 1)], ids=["the same", "all"])
def test_the_same_shard_twice_at_once_harms_nothing(
    source: Storage, tmp_path: Path, others: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the midst of the first, the same one begins and ends; then all others too, so that the step is committed."""
    target, whole = open_storage(tmp_path / "target"), open_storage(tmp_path / "whole")
    run(source, whole, Shard())
    reports, waiting, opened = list[ReshardReport](), [others], target_files.open_writer

    def open_beside(*arguments: Any, **options: Any) -> Any:
        writer = opened(*arguments, **options)  # the first has begun to write
        with contextlib.suppress(IndexError):
            numbers = waiting.pop()
            reports.extend([run(source, target, Shard(number, 2)) for number in numbers])
        return writer

    monkeypatch.setattr(target_files, "open_writer", open_beside)
    first = run(source, target, Shard(0, 2))
    assert [each.num_missing for each in reports] == [4, 0][: len(others)]
    assert all(each.bytes_written for each in (first, *reports))
    if others == (0,):
        assert first.num_missing == 4
        assert run(source, target, Shard(1, 2)).num_missing == 0
    assert contents(target) == contents(whole)
    assert not list((tmp_path / "target").rglob("*.tmp"))


def test_a_file_that_is_gone_at_the_end_is_not_committed(source: Storage, tmp_path: Path) -> None:
    target = open_storage(tmp_path / "target")
    run(source, target, Shard(0, 2))
    listed = iter([list(target.list()), []])

    class Losing(FaultStorage):
        def list(self, prefix: str = "") -> object:  # type: ignore[override]
            return iter(next(listed))

    with pytest.raises(StorageError, match="was removed while others were written"):
        run(source, Losing(target), Shard(0, 2))
    assert root_info(target, STEP) is None


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("is_local", [True, False])
def test_three_processes_one_of_them_killed_and_run_again(
    tmp_path: Path, is_local: bool, request: pytest.FixtureRequest
) -> None:
    tensors = gpt_tensors(8, hidden=512, ffn=2048, vocab=8001)
    storage = open_storage(tmp_path / "run")
    target = open_storage(tmp_path / "new" if is_local else request.getfixturevalue("s3_url"))
    write_checkpoint(storage, STEP, ParallelLayout(tp=4, pp=2), 8, tensors, values(tensors))
    words = [sys.executable, "-m", "ckptkit", "reshard", storage.url, target.url, "--tp", "2", "--pp", "4"]

    def started(task: int) -> subprocess.Popen[bytes]:
        variables = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_STEP": "1"}
        variables |= {"SLURM_ARRAY_TASK_COUNT": "3"}
        return subprocess.Popen([*words, "--shard", "auto"], env=os.environ | variables)

    doomed = started(0)
    deadline = time.monotonic() + 60
    while doomed.poll() is None and not has_begun(target):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    doomed.send_signal(signal.SIGKILL)
    doomed.wait()
    assert [process.wait() for process in [started(1), started(2)]] == [0, 0]
    num_indices = sum(item.key.endswith(".index") for item in target.list())  # all 8 if the kill came too late
    assert (root_info(target, STEP) is None) == (num_indices < 8)
    assert started(0).wait() == 0
    with CheckpointReader(target, STEP) as reader, CheckpointReader(storage, STEP) as before:
        assert hash_checkpoint(reader) == hash_checkpoint(before)
        named = {key for part in reader.root.parts for key in (part.data, part.index)}
    assert {item.key for item in target.list()} == {f"{step_folder(STEP)}/{key}" for key in (*named, "root.json")}
    assert not [path for path in tmp_path.joinpath("new").rglob(".*") if path.is_file()]
    assert abort_stale_uploads(target, older_than_s=0.0) == []


def has_begun(target: Storage) -> bool:
    """Whether anything is written, or an upload is under way."""
    if temporaries(target, STEP) or list(target.list()):
        return True
    return bool(abort_stale_uploads(target, older_than_s=0.0, dry_run=True))
