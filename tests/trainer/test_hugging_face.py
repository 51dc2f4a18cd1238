"""Models of Hugging Face: the logits that transformers computed, training from a folder, any layout."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptkit.cli import main as ckptkit
from datakit import write_store
from tests.golden.tied_scores import tie_scores
from tests.trainer.support.training import ROOT, call, lines
from trainer.job.ranks import Ranks
from trainer.run.inference import TrainedModel, open_checkpoint

GOLDEN = ROOT / "tests" / "golden" / "hugging-face"
MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/logits.json"))
VOCAB_SIZE = 31


def largest_difference(url: str, model: str) -> float:
    """How far the logits of a checkpoint are from those that transformers computed."""
    expected = json.loads((GOLDEN / model / "logits.json").read_text())
    checkpoint = open_checkpoint(url, None, {}, world_size=1)
    with Ranks("cpu", timeout_s=60) as ranks:
        found = TrainedModel(checkpoint, ranks).engine.logits(torch.tensor(expected["tokens"]))
    return float((found - torch.tensor(expected["logits"])).abs().max() / torch.tensor(expected["logits"]).abs().max())


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_transformers(model: str, tmp_path: Path) -> None:
    assert largest_difference(f"hf:{GOLDEN / model}", model) < 1e-5
    if model in ("gpt2", "qwen3"):
        assert ckptkit(["import", str(GOLDEN / model), str(tmp_path / "run")]) == 0
        assert largest_difference(str(tmp_path / "run"), model) < 1e-5


@pytest.mark.parametrize("what", ["logits", "tied"])
@pytest.mark.parametrize("model", sorted(path.parent.name for path in GOLDEN.glob("*/exact.json")))
def test_experts_take_the_tokens_that_transformers_sends_them(model: str, what: str, tmp_path: Path) -> None:
    """In float64, in which another expert of a single token would show; scores may be equal."""
    folder = shutil.copytree(GOLDEN / model, tmp_path / model)
    if what == "tied":
        tie_scores(folder / "model.safetensors")
    tokens = torch.tensor(json.loads((folder / "logits.json").read_text())["tokens"])
    checkpoint = open_checkpoint(f"hf:{folder}", None, {}, world_size=1)
    config = replace(checkpoint.config, train=replace(checkpoint.config.train, precision="fp64"))
    with Ranks("cpu", timeout_s=60) as ranks:
        logits = TrainedModel(replace(checkpoint, config=config), ranks).engine.logits(tokens)
    expected = torch.tensor(json.loads((folder / "exact.json").read_text())[what], dtype=torch.float64)
    assert ((logits - expected).abs().max() / expected.abs().max()).item() < 1e-10


def write_job(folder: Path) -> Path:
    random = np.random.default_rng(0)
    for name in ("train", "valid"):
        documents = [np.r_[random.integers(0, 3) + np.arange(random.integers(9, 27)), 30] for _ in range(60)]
        write_store(folder / name, documents, vocab_size=VOCAB_SIZE, eod_id=30)
    (folder / "job.toml").write_text(
        f"[data]\nstores = ['{folder}/train']\n[data.valid]\nstores = ['{folder}/valid']\nnum_samples = 8\n"
        "[optim]\nlr = 0.01\n"
        "[train]\ntrain_steps = 6\nseq_length = 16\nmicro_batch_size = 2\nglobal_batch_size = 8\ndevice = 'cpu'\n"
    )
    return folder / "job.toml"


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object) -> float:
    capsys.readouterr()
    assert call("eval", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)["loss"]


@pytest.mark.parametrize("model", ["gpt2", pytest.param("qwen2", marks=[pytest.mark.slow, pytest.mark.ci])])
def test_training_begins_with_the_folders_model_and_ends_as_one(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job, folder = write_job(tmp_path), f"hf:{GOLDEN / model}"
    command = ["train", job, "--load", folder, "--save", tmp_path / "run", "--metrics", tmp_path / "m.jsonl"]
    before = evaluate(capsys, folder, job)
    assert call(*command, "--train-steps", 3) == 0
    assert "which holds no optimizer state" in capsys.readouterr().err
    assert call(*command) == 0  # goes on from its own step 3
    losses = [line["loss"] for line in lines(tmp_path / "m.jsonl")]
    assert len(losses) == 6
    assert losses[0] == pytest.approx(before, rel=0.2)
    assert losses[-1] < losses[0]
    after = evaluate(capsys, tmp_path / "run")
    assert after < before
    assert ckptkit(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--like", str(GOLDEN / model)]) == 0
    assert evaluate(capsys, f"hf:{tmp_path}/out", job) == pytest.approx(after, rel=1e-6)
    assert ckptkit(["export", str(tmp_path / "run"), str(tmp_path / "made")]) == 0  # config.json of the run's own
    assert evaluate(capsys, f"hf:{tmp_path}/made", job) == pytest.approx(after, rel=1e-6)


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_goes_on_and_is_evaluated_when_the_folder_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the file does not say of the model, the run's last step does."""
    job, folder = write_job(tmp_path), tmp_path / "model"
    shutil.copytree(GOLDEN / "qwen2", folder)
    command = ["train", job, "--load", f"hf:{folder}", "--save", tmp_path / "run"]
    assert call(*command, "--train-steps", 2) == 0
    shutil.rmtree(folder)
    assert call(*command, "--train-steps", 4) == 0
    assert call("train", job, "--save", tmp_path / "run", "--train-steps", 5, "--model.dropout", 0.25) == 0
    said = capsys.readouterr().err
    assert "not bit for bit as it was: model.dropout 0 -> 0.25" in said
    assert "model.num_layers" not in said
    assert evaluate(capsys, tmp_path / "run", job) == evaluate(capsys, tmp_path / "run")
    assert call("train", job, "--load", tmp_path / "run", "--save", tmp_path / "other", "--train-steps", 6) == 0
    assert call("train", job, "--load", f"hf:{folder}", "--save", tmp_path / "third") == 1  # nothing there says it


def test_a_setting_that_is_not_the_folders_is_refused_or_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, folder = write_job(tmp_path), f"hf:{GOLDEN / 'llama'}"
    assert call("train", job, "--load", folder, "--model.num-layers", 3) == 2
    assert "layers.2.attn.q.weight: missing" in capsys.readouterr().err
    assert call("train", job, "--load", folder, "--train-steps", 1, "--model.rope-theta", 99) == 0
    assert "model.rope_theta 500.0 -> 99.0" in capsys.readouterr().err
    assert call("train", job, "--load", f"hf:{tmp_path}/none") == 1
    assert "config.json is missing" in capsys.readouterr().err
    assert call("train", job, "--load", f"hf:{GOLDEN / 'gpt2'}", "--train.seq-length", 64) == 2
    assert "model.num_positions 32 is less than train.seq_length 64" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "qwen3"])
def test_any_layout_loads_a_folder(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path)
    assert ckptkit(["import", str(GOLDEN / model), str(tmp_path / "run")]) == 0
    for url in (f"hf:{GOLDEN / model}", str(tmp_path / "run")):
        alone = evaluate(capsys, url, job)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        command = [*launcher, "-m", "trainer", "eval", url, str(job), "--tp", "2", "--pp", "2", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert json.loads(done.stdout)["loss"] == pytest.approx(alone, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_transformers_opens_what_comes_back(tmp_path: Path, model: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    tokens = torch.tensor(json.loads((GOLDEN / model / "logits.json").read_text())["tokens"])
    run, back, made = (str(tmp_path / name) for name in ("run", "back", "made"))
    assert ckptkit(["import", str(GOLDEN / model), run]) == 0
    assert ckptkit(["export", run, back]) == 0
    assert ckptkit(["export", run, made, "--like", str(shutil.copytree(GOLDEN / model, tmp_path / "like"))]) == 0
    logits = []
    for folder in (GOLDEN / model, back, made):
        with torch.no_grad():
            logits.append(transformers.AutoModelForCausalLM.from_pretrained(folder)(tokens).logits)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
