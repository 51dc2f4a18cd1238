"""Bad input meets one clear error, a hint and the documented exit code, and loses nothing."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptkit.runs.catalogue import committed_steps
from datakit import TokenStore, write_store
from tests.trainer.support.training import call, curve, lines, write_stores
from threefold.storage import open_storage
from tools.fault_proxy import Fault, FaultProxy

Console = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(job_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run URL that holds the steps 2 and 4."""
    url = tmp_path_factory.mktemp("trained") / "run"
    assert call("train", job_config, "--train-steps", 4, "--save", url, "--save-interval", 2) == 0
    return url


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def error(console: Console) -> str:
    """The error that was printed, with its hint; there must be one of each."""
    text = console.readouterr().err
    assert len(re.findall("^error: ", text, re.MULTILINE)) == 1, text
    assert len(re.findall("^hint: .", text, re.MULTILINE)) == 1, text
    return text[text.index("error: ") :]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--data.stores", "nowhere"], "nowhere"),
        (["--data.stores", ""], "data.stores names no token store"),
        (["--model.vocab-size", 60], "has a vocabulary of 61, more than model.vocab_size 60"),
        (["--seq-length", 1000000], "too few for one row of 1000000"),
        (["--data.tokenizer", "nowhere.json"], "no such tokenizer: nowhere.json"),
        (["--tp", 2], "needs 2 processes, started are 1"),
        (["--load", "nowhere"], "nowhere holds no committed step to seed the run with"),
        (["--save", "run/step-000000100"], "names one step"),
        (["--train.eval-interval", 5, "--data.valid.stores", "nowhere"], "nowhere"),
    ],
)
def test_what_does_not_exist_or_fit(job_config: Path, flags: list, expected: str, capsys: Console) -> None:
    assert call("train", job_config, *flags) == 2
    assert expected in error(capsys)


def test_a_device_that_is_not_there(job_config: Path, capsys: Console) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    assert call("train", job_config, "--train.device", "cuda") == 2
    assert "no usable GPU" in error(capsys)


def test_a_metrics_file_that_cannot_be_written(job_config: Path, tmp_path: Path, capsys: Console) -> None:
    (tmp_path / "file").write_text("")
    assert call("train", job_config, "--metrics", tmp_path / "file" / "m.jsonl") == 3
    assert str(tmp_path / "file") in error(capsys)


def test_stores_of_two_tokenizers(job_config: Path, tmp_path: Path, capsys: Console) -> None:
    store = write_store(tmp_path / "other", [np.arange(50)] * 9, vocab_size=61)
    manifest = replace(store.manifest, tokenizer=replace(store.manifest.tokenizer, fingerprint="another"))
    manifest.write(tmp_path / "other")
    assert call("train", job_config, "--data.valid.stores", tmp_path / "other") == 2
    assert "not all are of one tokenizer" in error(capsys)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--model.num-layers", 4], ["layers.3.attn.q.weight: missing in the checkpoint"]),
        (["--model.num-layers", 2], ["layers.2.mlp.up.weight: F32 [48, 32], which the configured model does not have"]),
        (["--model.ffn-hidden-size", 64], ["layers.2.mlp.up.weight: F32 [48, 32], wanted F32 [64, 32]"]),
        (["--model.bias", "true"], ["layers.0.attn.q.bias: missing in the checkpoint"]),
        (["--model.tie-embeddings", "true"], ["head.weight: F32 [61, 32], which the configured model does not have"]),
        (["--train.precision", "fp64"], ["F32", "wanted"]),
        (["--model.num-kv-heads", 4], ["model.num_kv_heads: it was trained with 2, configured is 4"]),
        (["--model.num-heads", 2, "--model.num-kv-heads", 1], ["model.num_heads: it was trained with 4"]),
    ],
)
def test_a_checkpoint_of_another_model(
    job_config: Path, run: Path, flags: list, expected: list[str], capsys: Console
) -> None:
    assert call("train", job_config, "--train-steps", 6, "--save", run, *flags) == 2
    text = error(capsys)
    assert all(part in text for part in expected), text
    assert committed_steps(open_storage(run)) == [2, 4]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--seed", 9], "the stream to resume has seed 0, this one 9"),
        (["--seq-length", 16], "the stream to resume has seq_length 32, this one 16"),
    ],
)
def test_another_stream_is_not_resumed(
    job_config: Path, run: Path, flags: list, expected: str, capsys: Console
) -> None:
    assert call("train", job_config, "--train-steps", 6, "--save", run, *flags) == 2
    assert expected in error(capsys)


def test_changed_data_is_not_resumed(job_config: Path, run: Path, tmp_path: Path, capsys: Console) -> None:
    write_stores(tmp_path, seed=1)
    assert call("train", job_config, "--save", run, "--data.stores", tmp_path / "train") == 2
    assert "stores or weights are not those of the stream to resume" in error(capsys)


def test_a_loss_that_is_not_finite_ends_the_run_at_the_step_before(
    job_config: Path, run: Path, tmp_path: Path, capsys: Console
) -> None:
    flags = ["--train-steps", 20, "--optim.clip", 0, "--lr", 1e30, "--optim.min-lr", 1e30, "--save-interval", 1]
    assert call("train", job_config, "--save", run, *flags, "--metrics", tmp_path / "m.jsonl") == 2
    bad = re.search(r"step (\d+): the loss is .*(nan|inf)", error(capsys))
    assert bad
    steps = committed_steps(open_storage(run))
    assert steps[:2] == [2, 4]
    assert steps[-1] == int(bad[1]) - 1


def test_every_step_damaged_is_an_error_and_nothing_is_touched(job_config: Path, run: Path, capsys: Console) -> None:
    for root in run.glob("*/root.json"):
        root.write_text(root.read_text().replace("embed", "embod"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert call("train", job_config, "--train-steps", 6, "--save", run) == 1
    assert "step-000000002/root.json is damaged" in error(capsys)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("kind", ["safetensors", "index"])
def test_a_missing_file_is_damage(job_config: Path, run: Path, kind: str, capsys: Console) -> None:
    (path,) = (run / "step-000000004").glob(f"*/*.{kind}")
    path.unlink()
    assert call("train", job_config, "--train-steps", 6, "--save", run) == 0
    text = capsys.readouterr().err
    assert f"{path} is missing" in text
    assert "falling back from step 4 to step 2" in text
    assert committed_steps(open_storage(run)) == [2, 6]


def test_strict_refuses_a_damaged_newest_step(job_config: Path, run: Path, capsys: Console) -> None:
    (path,) = (run / "step-000000004").glob("*/*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    assert call("train", job_config, "--train-steps", 6, "--save", run, "--strict") == 1
    text = error(capsys)
    assert f"{path} has " in text
    assert "step 2 is not tried: strict" in text
    assert f"hint: ckptkit verify {run}/step-000000004" in text
    assert committed_steps(open_storage(run)) == [2, 4]


def test_a_seed_is_never_changed_and_used_once(
    job_config: Path, trained: Path, tmp_path: Path, capsys: Console
) -> None:
    before = sorted(trained.rglob("*"))
    arguments = [job_config, "--load", trained, "--save", tmp_path / "run", "--train-steps", 6]
    assert call("train", *arguments) == 0
    assert f"resumed from step 4 of {trained}" in capsys.readouterr().err
    assert call("train", *arguments) == 0
    assert f"resumed from step 6 of {tmp_path / 'run'}" in capsys.readouterr().err
    assert sorted(trained.rglob("*")) == before


def test_the_last_epoch_ends_the_run(job_config: Path, tmp_path: Path, capsys: Console) -> None:
    flags = ["--train-steps", 10000, "--data.max-epochs", 1, "--global-batch-size", 64, "--micro-batch-size", 16]
    arguments = [job_config, *flags, "--save", tmp_path / "run", "--metrics", tmp_path / "m.jsonl"]
    assert call("train", *arguments) == 0
    last = max(curve(tmp_path / "m.jsonl"))
    num_samples = (TokenStore.open(job_config.parent / "train").num_tokens - 1) // 32
    assert last == -(-num_samples // 64)
    assert "epoch 1 of" in capsys.readouterr().err
    assert committed_steps(open_storage(tmp_path / "run")) == [last]
    assert call("train", *arguments) == 0  # it stays ended
    assert max(curve(tmp_path / "m.jsonl")) == last


def test_a_full_disk_does_not_stop_training(
    job_config: Path, small_disk: Path, tmp_path: Path, capsys: Console
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(100 << 10))
    flags = ["--save", small_disk / "run", "--save-interval", 1, "--train-steps", 12, "--metrics", tmp_path / "m.jsonl"]
    assert call("train", job_config, *flags) == 3
    assert re.search(r"error: \d saves in a row to .*disk/run failed\nhint: ", capsys.readouterr().err)
    saves = lines(tmp_path / "m.jsonl", "save")
    assert [save["ok"] for save in saves][-3:] == [False] * 3
    assert "No space left" in saves[-1]["error"]
    assert len(curve(tmp_path / "m.jsonl")) >= 3  # steps went on between the failures
    ballast.unlink()


@pytest.mark.slow
@pytest.mark.ci
def test_s3_gone_in_mid_save_is_survived(
    job_config: Path,
    s3_proxy: FaultProxy,
    s3_url: str,
    tmp_path: Path,
    capsys: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "4")  # a busy server may refuse one or two of the others
    s3_proxy.fault = Fault("reset", method="PUT", times=4)
    flags = ["--save", s3_url, "--save-interval", 4, "--train-steps", 12, "--metrics", tmp_path / "m.jsonl"]
    assert call("train", job_config, *flags, "--checkpoint.retry-s", 0) == 0, capsys.readouterr().err
    assert "warning: the save of step 4 failed: " in capsys.readouterr().err
    assert committed_steps(open_storage(s3_url))[-1] == 12
    assert list(curve(tmp_path / "m.jsonl")) == list(range(1, 13))


@pytest.mark.parametrize("change", ["bucket", "credentials"])
def test_a_bucket_or_credentials_that_are_wrong(
    job_config: Path, s3_url: str, change: str, capsys: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change == "bucket":
        s3_url = s3_url.replace("s3://", "s3://no-")
    else:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert call("train", job_config, "--save", s3_url) == 3
    error(capsys)
