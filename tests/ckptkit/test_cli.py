"""The command line: what each verb prints, and one clear error, a hint and the documented exit code for bad input."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptkit.cli import main
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Cut, Placement, TensorInfo
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.support.printed import printed
from threefold.storage import open_storage

LAYERS = 3
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run_url(tmp_path: Path) -> str:
    """A run with steps 3 and 12 committed and step 20 under way."""
    storage = open_storage(tmp_path / "run")
    tensors = gpt_tensors(LAYERS, tied=True)
    for step in (3, 12):
        write_checkpoint(storage, step, ParallelLayout(tp=2, pp=2), LAYERS, tensors, values(tensors))
    storage.write("step-000000020/a1/part-00000.safetensors", b"half")
    return str(tmp_path / "run")


def call(capsys: Capture, *argv: str) -> tuple[int, str, str]:
    return printed(main, argv, capsys)


def test_ls_lists_committed_steps_only(capsys: Capture, run_url: str) -> None:
    code, out, _ = call(capsys, "ls", run_url, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["step"] for row in rows] == [3, 12]
    assert rows[0]["layout"] == "tp2-pp2"
    assert rows[0]["num_files"] == 4
    code, out, _ = call(capsys, "ls", run_url)
    assert [line.split()[0] for line in out.splitlines()] == ["step", "3", "12"]


def test_ls_of_a_step_lists_that_step(capsys: Capture, run_url: str) -> None:
    steps = json.loads(call(capsys, "ls", run_url, "--json")[1])
    alone = json.loads(call(capsys, "ls", steps[-1]["url"], "--json")[1])
    assert alone == [{**steps[-1], "marks": []}]  # which compare it with others, that are not looked at
    assert "no committed step" in call(capsys, "ls", f"{run_url}/step-000000099")[2]


def test_ls_of_a_run_without_steps_says_so(capsys: Capture, tmp_path: Path) -> None:
    assert call(capsys, "ls", str(tmp_path), "--json")[:2] == (0, "[]\n")
    assert "no committed step" in call(capsys, "ls", str(tmp_path))[2]


def test_inspect_takes_the_newest_step_or_a_named_one(capsys: Capture, run_url: str) -> None:
    newest = json.loads(call(capsys, "inspect", run_url, "--json")[1])
    named = json.loads(call(capsys, "inspect", f"{run_url}/step-000000003/", "--json")[1])
    assert (newest["step"], named["step"]) == (12, 3)
    assert newest["layout"] == "tp2-pp2"
    assert newest["num_tensors"] == len(newest["tensors"]) == len(gpt_tensors(LAYERS, tied=True))
    assert newest["metadata"] == {"tokens": 5}
    code, out, _ = call(capsys, "inspect", run_url, "--tensors")
    assert code == 0
    assert "layers.0.mlp.down.weight  F32 [16, 24]  layer 0, dim 1 by tp" in out
    assert "head.weight  F32 [37, 16]  last stage, tied to embed.weight" in out


def test_verify_of_a_sound_and_of_a_damaged_checkpoint(capsys: Capture, run_url: str) -> None:
    code, out, _ = call(capsys, "verify", run_url, "--json")
    assert (code, json.loads(out)["ok"]) == (0, True)
    path = next(Path(run_url, "step-000000012").rglob("part-00002.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, out, _ = call(capsys, "verify", run_url, "--json")
    result = json.loads(out)
    assert (code, result["ok"]) == (1, False)
    assert result["faults"][0]["file"].endswith("part-00002.safetensors")
    assert result["faults"][0]["offset"] == 0
    assert result["faults"][0]["tensors"]
    code, out, _ = call(capsys, "verify", run_url)
    assert code == 1
    assert "part-00002.safetensors at byte 0: the 1 MiB from here does not have its checksum, in " in out
    assert call(capsys, "verify", f"{run_url}/step-000000003")[0] == 0
    assert call(capsys, "verify", run_url, "--manifest")[0] == 0
    assert call(capsys, "verify", run_url, "--sample", "0.01")[0] == 1  # first and last of each file are read
    assert_refused(call(capsys, "verify", run_url, "--sample", "1.5"), 2, "'1.5' is not a share above 0, up to 1")
    assert_refused(call(capsys, "verify", run_url, "--sample", "0.5", "--manifest"), 2, "not allowed with")


def test_hash_is_unchanged_by_reshard_there_and_back(capsys: Capture, run_url: str, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), f"{tmp_path}/second/step-000000077"
    before = json.loads(call(capsys, "hash", run_url, "--json")[1])
    code, out, err = call(capsys, "reshard", run_url, first, "--tp", "4", "--pp", "3", "--dp", "2", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["source_layout"], report["target_layout"], report["step"]) == ("tp2-pp2", "tp4-dp2-pp3", 12)
    code, out, _ = call(capsys, "reshard", first, second, "--from", "tp4-pp3")
    assert code == 0
    assert "tp4-dp2-pp3 -> tp1" in out
    after = json.loads(call(capsys, "hash", second, "--json")[1])
    assert after["step"] == 77
    for key in ("tensors", "params", "optim", "all"):
        assert after[key] == before[key]
    code, out, _ = call(capsys, "hash", run_url, "--tensors")
    assert f"{before['tensors']['embed.weight']}  embed.weight" in out
    assert f"{before['all']}  all" in out


@pytest.mark.parametrize("alias", ["--tensor-model-parallel-size", "--tp"])
def test_axes_have_the_spelling_of_megatron_too(capsys: Capture, run_url: str, tmp_path: Path, alias: str) -> None:
    code, out, _ = call(capsys, "reshard", run_url, str(tmp_path / "x"), alias, "4", "--json")
    assert (code, json.loads(out)["target_layout"]) == (0, "tp4")


@pytest.mark.parametrize("flag", ["--etp", "--expert-tensor-parallel-size"])
def test_experts_are_cut_for_ranks_of_tp_too(capsys: Capture, tmp_path: Path, flag: str) -> None:
    experts = TensorInfo("layers.0.mlp.up", "F32", (4, 6, 2), Placement(0, (Cut(0, "ep"), Cut(1, "tp"))))
    source, first, second = (str(tmp_path / name) for name in ("run", "first", "second"))
    write_checkpoint(open_storage(source), 1, ParallelLayout(tp=2), 1, [experts], values([experts]))
    sizes = ("--tp", "2", "--dp", "2", "--ep", "4")
    assert_refused(call(capsys, "reshard", source, first, *sizes), 2, "ep=4 does not divide dp=2 * cp=1")
    assert_refused(call(capsys, "reshard", source, first, *sizes, flag, "3"), 2, "etp=3 is neither 1 nor tp=2")
    assert call(capsys, "reshard", source, first, *sizes, flag, "1")[0] == 0
    assert "tp2-ep4-dp2-etp1, 1 layers" in call(capsys, "inspect", first)[1]
    assert "tp2-ep4-dp2-etp1 -> tp2" in call(capsys, "reshard", first, second, "--tp", "2", "--from", "ep4-etp1")[1]
    found = [json.loads(call(capsys, "hash", each, "--json")[1])["all"] for each in (source, first, second)]
    assert len(set(found)) == 1
    assert call(capsys, "verify", first)[0] == 0


def assert_refused(result: tuple[int, str, str], code: int, *parts: str) -> None:
    assert result[0] == code, result
    assert result[1] == ""
    lines = result[2].splitlines()
    assert lines[0].startswith("error: "), lines
    assert any(line.startswith("hint: ") for line in lines), lines
    for part in parts:
        assert part in result[2]


def test_bad_addresses(capsys: Capture, run_url: str, tmp_path: Path) -> None:
    for verb in ("inspect", "verify", "hash"):
        assert_refused(call(capsys, verb, str(tmp_path / "nowhere")), 3, "nowhere does not exist")
        assert_refused(call(capsys, verb, f"{run_url}/step-000000020"), 2, "holds no committed step 20")
        assert_refused(call(capsys, verb, f"{run_url}/step-000000003/a1"), 2, "no committed step")
    (tmp_path / "file").write_text("x")
    assert_refused(call(capsys, "inspect", str(tmp_path / "file")), 3, "file is not a folder")


def test_a_hint_is_pasted_whatever_the_folder_is_called(capsys: Capture, run_url: str, tmp_path: Path) -> None:
    odd = tmp_path / "my run's; $HOME"
    Path(run_url).rename(odd)
    other = tmp_path / "other place"
    assert call(capsys, "copy", str(odd), str(other))[0] == 0
    assert call(capsys, "pin", f"{odd}/step-000000012")[0] == 0
    for argv in (
        ["inspect", f"{odd}/step-000000007"],
        ["rm", f"{other}/step-000000012"],
        ["rollback", f"{odd}/step-000000003"],
        ["best", str(odd), "--metric", "tokens", "--max"],
    ):
        err = call(capsys, *argv)[2]
        if "hint: " in err:
            command = shlex.split(err.rpartition("hint: ")[2].rpartition("ckptkit ")[2])
            assert any(word.startswith((str(odd), str(other))) for word in command), err
            assert call(capsys, command[0], *command[1:])[0] == 0, err
    assert not list(other.glob("step-*/root.json"))  # the second hint was to remove the newest step too


def test_a_folder_of_another_program_where_a_run_is_meant(capsys: Capture, run_url: str, tmp_path: Path) -> None:
    for verb in ("ls", "prune", "pin", "rm", "rollback", "best"):
        assert_refused(call(capsys, verb, "dcp:x y"), 2, "another program", "ckptkit import 'x y' RUN --from dcp")
    assert_refused(call(capsys, "copy", run_url, "ucp:x"), 2, "another program")
    assert_refused(call(capsys, "import", "dcp:x", str(tmp_path / "run")), 2, "not of --from hf", "hint: --from dcp")
    code, out, _ = call(capsys, "export", run_url, f"dcp:{tmp_path}/out", "--to", "dcp", "--json")
    assert (code, json.loads(out)["url"]) == (0, f"{tmp_path}/out")
    assert call(capsys, "diff", run_url, f"dcp:{tmp_path}/out")[0] == 0


def test_a_seed_is_a_whole_number(capsys: Capture, run_url: str) -> None:
    assert_refused(call(capsys, "verify", run_url, "--sample", "0.5", "--seed", "-1"), 2, "'-1' is not a whole number")


def test_what_is_not_a_root_is_told(capsys: Capture, run_url: str) -> None:
    Path(run_url, "step-000000012/root.json").write_text('{"format": "other"}')
    code, _, err = call(capsys, "inspect", run_url)
    assert code == 1
    assert "root.json is not a checkpoint's root" in err
    assert err.endswith(f"hint: ckptkit ls {run_url}\n")


def test_layouts_that_cannot_be(capsys: Capture, run_url: str, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    assert_refused(
        call(capsys, "reshard", run_url, target, "--tp", "3"),
        2,
        "error: cannot cut ",
        "into tp=3",
        "hint: choose tp from",
    )
    assert_refused(call(capsys, "reshard", run_url, target, "--tp", "0"), 2, "'0' is not a whole number >= 1")
    assert_refused(call(capsys, "reshard", run_url, target, "--dp", "9" * 9), 2, "has 999,999,999 ranks")
    assert_refused(call(capsys, "reshard", run_url, target, "--pt", "2"), 2, "unknown argument --pt")
    assert_refused(
        call(capsys, "reshard", run_url, target, "--from", "tp4-pp2"), 2, "was saved as tp2-pp2, not as tp4-pp2"
    )
    assert_refused(call(capsys, "reshard", run_url, target, "--from", "8x4"), 2, "'8x4' is not a parallel layout")
    assert not Path(target).exists()


def test_a_target_that_exists(capsys: Capture, run_url: str) -> None:
    assert_refused(call(capsys, "reshard", run_url, run_url, "--tp", "1"), 2, "already holds step 12")


def files_of(folder: str) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()}


def test_a_dry_copy_says_what_a_copy_does_and_writes_nothing(capsys: Capture, run_url: str, tmp_path: Path) -> None:
    target, before = str(tmp_path / "target"), files_of(run_url)
    flags = ("copy", run_url, target, "--all", "--json")
    dry = json.loads(call(capsys, *flags, "--dry-run")[1])
    assert [(row["step"], row["num_files"], row["dry_run"]) for row in dry] == [(3, 9, True), (12, 9, True)]
    assert sum(row["bytes_copied"] for row in dry) == sum(size for path, size in before.items() if "020" not in path)
    out = call(capsys, "copy", run_url, target, "--dry-run")[1]
    scope = "1 of 2 steps (--all copies each)"
    assert out == f"{target}/step-000000012: 9 files, {dry[1]['bytes_copied']:,} bytes would be copied; {scope}\n"
    assert not Path(target).exists()
    real = json.loads(call(capsys, *flags)[1])
    assert real == [row | {"dry_run": False, "seconds": done["seconds"]} for row, done in zip(dry, real, strict=True)]
    again = json.loads(call(capsys, *flags, "--dry-run")[1])
    assert [row["bytes_copied"] for row in again] == [0, 0]
    root, index = Path(target, "step-000000012/root.json"), next(Path(target, "step-000000012").rglob("*.index"))
    left = root.stat().st_size + index.stat().st_size
    for path in (root, index):
        path.unlink()
    [rest] = json.loads(call(capsys, "copy", run_url, target, "--dry-run", "--json")[1])
    assert (rest["bytes_copied"], rest["bytes_kept"]) == (left, dry[1]["bytes_copied"] - left)
    assert not index.exists()


def test_a_dry_reshard_says_what_a_reshard_does_and_writes_nothing(
    capsys: Capture, run_url: str, tmp_path: Path
) -> None:
    target = str(tmp_path / "target")
    flags = ("reshard", run_url, target, "--tp", "4", "--dp", "2", "--json")
    dry = json.loads(call(capsys, *flags, "--dry-run")[1])
    assert (dry["source_layout"], dry["target_layout"], dry["num_files"]) == ("tp2-pp2", "tp4-dp2", 8)
    out = call(capsys, "reshard", run_url, target, "--tp", "4", "--dp", "2", "--dry-run")[1]
    scope = "1 of 2 steps (--all rewrites each)"
    assert out.endswith(f"8 files, {dry['bytes_written']:,} bytes would be written; {scope}\n")
    assert_refused(call(capsys, "reshard", run_url, target, "--tp", "3", "--dry-run"), 2, "into tp=3")
    assert_refused(call(capsys, "reshard", run_url, run_url, "--dry-run"), 2, "already holds step 12")
    assert not Path(target).exists()
    real = json.loads(call(capsys, *flags)[1])
    assert real["bytes_written"] == sum(size for path, size in files_of(target).items() if path.endswith("tensors"))
    assert dry == real | {"dry_run": True, "seconds": dry["seconds"], "bytes_read": dry["bytes_needed"]}


@pytest.mark.parametrize("is_known_before", [True, False])
def test_a_disk_without_room_leaves_no_checkpoint(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known_before: bool
) -> None:
    if not is_known_before:  # others fill it meanwhile
        monkeypatch.setattr("ckptkit.rewrite.reshard.refuse_full", lambda storage, num_bytes: None)
    tensors = gpt_tensors(LAYERS, hidden=256, vocab=2001)
    write_checkpoint(open_storage(tmp_path / "run"), 1, ParallelLayout(), LAYERS, tensors, values(tensors))
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small tmpfs")
    try:
        result = call(capsys, "reshard", str(tmp_path / "run"), str(small / "target"), "--pp", "3")
        assert_refused(result, 3, " left" if is_known_before else "No space left on device", "df -h")
        assert [path for path in small.rglob("*") if path.is_file()] == []
        if not is_known_before:
            assert not (small / "target").exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize("is_dry", [True, False])
@pytest.mark.parametrize("verb", ["copy", "reshard", "export --to dcp", "export --to tensorstore"])
def test_a_source_without_a_file_is_refused_before_anything_is_written(
    capsys: Capture, run_url: str, tmp_path: Path, verb: str, is_dry: bool
) -> None:
    folder, dry = Path(run_url, "step-000000012/a1"), ["--dry-run"] if is_dry else []
    (folder / "part-00002.safetensors").unlink()
    os.truncate(folder / "part-00003.safetensors", 4096)
    word, *flags = verb.split()
    result = call(capsys, word, run_url, str(tmp_path / "target"), *flags, *dry)
    assert_refused(
        result, 1, "is not whole", "part-00002.safetensors is missing", "part-00003.safetensors has 4096 bytes"
    )
    assert not (tmp_path / "target").exists()


def test_a_copy_to_a_disk_without_room_is_refused_before_it_writes(
    capsys: Capture, run_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=real.f_frsize))
    assert_refused(call(capsys, "copy", run_url, str(tmp_path / "target")), 3, f"its disk has {real.f_frsize:,} left")
    assert not (tmp_path / "target").exists()


def test_s3_that_refuses_the_keys(capsys: Capture, run_url: str, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(capsys, "reshard", run_url, s3_url)[0] == 0
    assert call(capsys, "verify", s3_url)[0] == 0
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for argv in (["ls", s3_url], ["hash", s3_url], ["reshard", run_url, f"{s3_url}/other"]):
        assert_refused(call(capsys, *argv), 3, "refused access key 'testkey'", "hint: export AWS_ACCESS_KEY_ID")
