"""Output: one run at a time, and what a run that is refused must leave alone."""

import errno
import os
from pathlib import Path

import pytest

from datakit.format.output import Output
from datakit.store.claim import claim
from threefold.errors import StorageError


def test_a_run_that_is_refused_leaves_the_other_runs_unsealed_shards(tmp_path: Path) -> None:
    output = Output(str(tmp_path / "s"))
    with claim(output):
        output.begin({})
        shard = output.scratch / "encoder" / "shard-000000-000.bin"
        shard.parent.mkdir(parents=True)
        shard.write_bytes(b"tokens")
        with pytest.raises(StorageError, match="another run is writing"), claim(Output(output.place)):
            pass
        assert shard.read_bytes() == b"tokens"
    assert not output.scratch.exists()


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with (
        pytest.raises(StorageError, match=r"cannot lock .*/s/\.work/lock: Function not"),
        claim(Output(str(tmp_path / "s"))),
    ):
        pass


def test_folders_are_durable_before_what_is_put_into_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    output = Output(str(tmp_path / "a" / "s"))
    with claim(output):
        assert synced[:3] == [tmp_path, tmp_path / "a", tmp_path / "a" / "s"]
        file = output.work / "shard-000000-000.bin"
        file.write_bytes(b"tokens")
        synced.clear()
        output.adopt("train", [file])
    assert list(dict.fromkeys(synced)) == [tmp_path / "a" / "s", tmp_path / "a" / "s" / "train"]


def test_outputs_behind_urls_are_worked_on_below_a_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Output("memory://bucket/s").work
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert Output("memory://bucket/s").work != mine


def test_an_output_and_a_store_in_it_may_be_links_to_other_disks(tmp_path: Path) -> None:
    for disk in ("disk", "other"):
        (tmp_path / disk).mkdir()
    (tmp_path / "out").symlink_to("disk")
    (tmp_path / "out/train").symlink_to(tmp_path / "other")
    output = Output(str(tmp_path / "out"))
    with claim(output):
        output.begin({"of": "note"})
        shard = tmp_path / "shard-000000-000.bin"
        shard.write_bytes(b"tokens")
        output.adopt("train", [shard])
        output.write("train/manifest.json", b"{}")
    assert output.sizes("train") == {"train/manifest.json": 2, "train/shard-000000-000.bin": 6}
    output.remove_shards("train", but=set())
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["manifest.json"]
    assert (tmp_path / "disk/train").is_symlink()
