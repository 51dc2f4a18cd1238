"""An evaluation reads the same samples on any layout, and gives the loss that training would."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from datakit import BatchOptions, Blend, MegatronBlend, MegatronOrder, TokenStore, blame
from tests.trainer.support.training import ROOT, call, lines
from trainer.data import open_valid_blend
from trainer.job.ranks import Ranks
from trainer.run.evaluate import Evaluation
from trainer.run.inference import TrainedModel, open_checkpoint
from trainer.run.valid_sets import open_valid_sets


@pytest.fixture(scope="module")
def trained(job_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 6 steps that was evaluated at its end."""
    folder = tmp_path_factory.mktemp("trained")
    flags = ["--train-steps", 6, "--save", folder / "run", "--metrics", folder / "m.jsonl", "--train.eval-interval", 3]
    assert call("train", job_config, *flags) == 0
    return folder


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    capsys.readouterr()
    assert call("eval", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_it_is_what_training_says(trained: Path, job_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    during = lines(trained / "m.jsonl", "eval")
    assert [line["step"] for line in during] == [3, 6]
    own = evaluate(capsys, trained / "run")  # the run's own configuration
    assert own["step"] == 6
    assert own["loss"] == during[-1]["loss"]
    assert own["perplexity"] == pytest.approx(np.exp(own["loss"]))
    given = evaluate(capsys, trained / "run" / "step-000000006", job_config)
    assert given["loss"] == own["loss"]
    assert given["num_samples"] == 10


@pytest.mark.parametrize("batches", [(1, 1), (2, 6), (5, 20)], ids=str)
def test_the_batch_size_does_not_matter(
    trained: Path, batches: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    reference = evaluate(capsys, trained / "run")
    flags = ["--micro-batch-size", batches[0], "--global-batch-size", batches[1]]
    found = evaluate(capsys, trained / "run", *flags)
    assert found["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert found["num_tokens"] == reference["num_tokens"]


def test_it_is_the_mean_of_the_token_losses(trained: Path) -> None:
    checkpoint = open_checkpoint(str(trained / "run"), None, {}, world_size=1)
    config = checkpoint.config
    with Ranks("cpu", timeout_s=60) as ranks:
        model = TrainedModel(checkpoint, ranks)
        found = Evaluation(config, model.engine, model.mesh, *open_valid_sets(config)).run()
    assert_mean(found, model, open_valid_blend(config), 10)


def assert_mean(report: dict, model: TrainedModel, blend: Blend, num_samples: int) -> None:
    """Compare an evaluation with the losses of each position by itself, from the logits after its prefix."""
    host = blend.batch(np.arange(num_samples), BatchOptions(mask_eod_loss=True))
    assert 0 < host.loss_mask.sum() < host.loss_mask.size
    tokens, labels = torch.from_numpy(host.tokens), torch.from_numpy(host.labels)
    losses = [
        cross_entropy(model.engine.logits(tokens[:, : length + 1]), labels[:, length], reduction="none")
        for length in range(blend.seq_length)
    ]
    mask = torch.from_numpy(host.loss_mask)
    assert report["num_tokens"] == mask.sum()
    assert report["loss"] == pytest.approx(float((torch.stack(losses, 1) * mask).sum() / mask.sum()), rel=1e-5)


def test_the_validation_part_of_megatron_is_what_training_never_reads(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--data.order", "megatron", "--data.split", "80,20", "--data.valid.stores", "", "--data.valid.order",
        "megatron", "--data.valid.num-samples", 10, "--data.valid.order-samples", 12,
    ]  # fmt: skip
    report = evaluate(capsys, trained / "run", *flags)
    checkpoint = open_checkpoint(str(trained / "run"), None, {}, world_size=1)
    config, order = checkpoint.config, MegatronOrder(12, (80.0, 20.0), part="valid")
    store = TokenStore.open(Path(config.data.valid.stores[0]).with_name("train"))
    blend = MegatronBlend([store], seq_length=config.train.seq_length, seed=config.train.seed, order=order)
    with Ranks("cpu", timeout_s=60) as ranks:
        assert_mean(report, TrainedModel(checkpoint, ranks), blend, 10)
    assert set(blame(blend, np.arange(10)).documents.tolist()) <= set(range(240, 300))


def test_what_cannot_be_evaluated(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in [
        ([trained / "run", "--model.vocab-size", 60], "more than model.vocab_size 60"),
        ([trained / "run" / "step-000000005"], "no committed step 5"),
        ([trained / "run", "--data.valid.stores", ""], "data.valid.stores names no token store"),
        ([trained / "run", "--data.valid.stores", "nowhere"], "nowhere"),
        ([trained / "run", "--data.valid.order", "megatron"], "data.valid.stores have an order of their own"),
        (
            [trained / "run", "--data.valid.order", "megatron", "--data.valid.stores", ""],
            'data.valid.order needs data.order = "megatron"',
        ),
        (
            [trained / "run", "--data.valid.order", "megatron", "--data.valid.stores", "", "--data.order", "megatron"],
            "split 1 has no share for the documents of valid",
        ),
        ([trained / "run", "--data.valid.order-samples", 3], "order_samples 3 is less than data.valid.num_samples 10"),
        ([trained / "run", "--model.num-layers", 4], "layers.3.attn.q.weight: missing in the checkpoint"),
    ]:
        assert call("eval", *arguments) == 2
        assert expected in capsys.readouterr().err


def test_a_checkpoint_of_another_precision_is_converted(
    trained: Path, job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = evaluate(capsys, trained / "run")
    assert call("eval", trained / "run", "--train.precision", "fp64", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert "step 6 was trained in fp32: its parameters are converted to fp64\n" in captured.err
    assert evaluate(capsys, trained / "run", "--bf16")["loss"] == pytest.approx(reference["loss"], rel=1e-2)
    flags = ["--train-steps", 1, "--save", tmp_path / "wide", "--train.precision", "fp64"]
    assert call("train", job_config, *flags) == 0
    narrow = evaluate(capsys, tmp_path / "wide", "--train.precision", "fp32")
    assert narrow["loss"] == pytest.approx(evaluate(capsys, tmp_path / "wide")["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_layout(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = evaluate(capsys, trained / "run")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m", "trainer"]
    cut = ["--zero-stage", "3", "--dp-shard", "2", "--parallel.zero-whole-kib", "0"]
    for layout in (["--tp", "2", "--pp", "2"], ["--pp", "2"], [], cut):
        command = [*launcher, "eval", str(trained / "run"), *layout, "--global-batch-size", "8", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200, check=True)
        found = json.loads(done.stdout)
        assert found["loss"] == pytest.approx(reference["loss"], rel=1e-6)
        assert found["num_tokens"] == reference["num_tokens"]
