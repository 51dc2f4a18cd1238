"""Validation sets by name, and losses by store and by tag: what is measured, recorded, kept by, and refused."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from datakit import BlendConfig, Recipe, preprocess, train_tokenizer, write_store
from datakit.format.tags import Tag
from tests.datakit.conftest import write_jsonl
from tests.trainer.run.test_evaluate import assert_mean, evaluate
from tests.trainer.support.training import ROOT, VOCAB_SIZE, call, curve, hash_of, lines, write_config, write_stores
from trainer.config import ValidSetConfig
from trainer.job.ranks import Ranks
from trainer.model.microbatch import sums_by
from trainer.run.evaluate import Evaluation
from trainer.run.inference import TrainedModel, open_checkpoint
from trainer.run.valid_sets import open_valid_sets

SETS = """
[[data.valid_sets]]
name = "low"
stores = ["{folder}/low"]
num_samples = 6
[[data.valid_sets]]
name = "both"
stores = ["{folder}/low", "{folder}/valid"]
num_samples = 9
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with two named validation sets, and its run of four steps."""
    folder = tmp_path_factory.mktemp("sets")
    write_stores(folder)
    write_store(folder / "low", [[number % 7, 3, 60] * 20 for number in range(8)], vocab_size=VOCAB_SIZE, eod_id=60)
    path = write_config(folder)
    path.write_text(path.read_text().replace("[optim]", SETS.format(folder=folder) + "[optim]"))
    flags = ["--train.eval-interval", 2, "--checkpoint.save-interval", 1, "--train-steps", 4]
    best = ["--checkpoint.keep-best", 1, "--checkpoint.keep-best-metric", "val_loss/low"]
    assert call("train", path, *flags, *best, "--save", folder / "run", "--metrics", folder / "m.jsonl") == 0
    return folder


def test_each_set_has_a_loss_in_the_metrics_and_in_checkpoints(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    during = lines(folder / "m.jsonl", "eval")
    assert [line["step"] for line in during] == [2, 4]
    after = evaluate(capsys, folder / "run")
    assert after["loss"] == during[-1]["loss"]
    assert {name: one["loss"] for name, one in after["sets"].items()} == {
        name: during[-1][f"val_loss/{name}"] for name in ("low", "both")
    }
    assert [after["sets"][name]["num_samples"] for name in ("low", "both")] == [6, 9]
    root = json.loads((folder / "run" / "step-000000004" / "root.json").read_text())["metadata"]
    assert {name: root[name] for name in root if name.startswith("val_")} == {
        "val_step": 4,
        "val_loss": during[-1]["loss"],
        "val_loss/low": during[-1]["val_loss/low"],
        "val_loss/both": during[-1]["val_loss/both"],
    }
    best = min(during, key=lambda line: line["val_loss/low"])["step"]
    assert {path.name for path in (folder / "run").glob("step-*")} >= {"step-000000004", f"step-{best:09}"}
    assert evaluate(capsys, folder / "run", "--set", "low")["sets"].keys() == {"low"}


@pytest.mark.slow
@pytest.mark.ci
def test_a_set_is_the_mean_of_the_token_losses_of_its_own_samples(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder / "run"), None, {}, world_size=1)
    with Ranks("cpu", timeout_s=60) as ranks:
        model = TrainedModel(checkpoint, ranks)
        sets = {each.name: each for each in open_valid_sets(checkpoint.config)}
        assert list(sets) == ["", "low", "both"]
        for valid_set in sets.values():
            found = Evaluation(checkpoint.config, model.engine, model.mesh, valid_set).run()
            assert_mean(found, model, valid_set.blend, valid_set.num_samples)


@pytest.mark.slow
@pytest.mark.ci
def test_training_is_not_disturbed(folder: Path, tmp_path: Path) -> None:
    flags = ["--train.eval-interval", 0, "--save", tmp_path / "run", "--metrics", tmp_path / "m.jsonl"]
    assert call("train", folder / "job.toml", *flags, "--train-steps", 4) == 0
    assert curve(tmp_path / "m.jsonl") == curve(folder / "m.jsonl")
    assert curve(tmp_path / "m.jsonl", "grad_norm") == curve(folder / "m.jsonl", "grad_norm")
    assert hash_of(tmp_path / "run", 4) == hash_of(folder / "run", 4)


def test_losses_by_store_add_up_to_the_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, by_store = evaluate(capsys, folder / "run"), evaluate(capsys, folder / "run", "--by", "store")
    assert by_store["loss"] == plain["loss"], "bit for bit"
    assert by_store["sets"]["both"]["loss"] == plain["sets"]["both"]["loss"]
    for whole in (by_store, *by_store["sets"].values()):
        groups = whole["by_store"]
        assert sum(group["num_tokens"] for group in groups) == whole["num_tokens"]
        total = sum(group["loss"] * group["num_tokens"] for group in groups)
        assert total / whole["num_tokens"] == pytest.approx(whole["loss"], rel=1e-12)
    assert [group["store"] for group in by_store["sets"]["both"]["by_store"]] == [
        str(folder / "low"),
        str(folder / "valid"),
    ]
    flags = ["--by", "store", "--micro-batch-size", 1, "--global-batch-size", 1]
    for one, other in zip(
        by_store["sets"]["both"]["by_store"], evaluate(capsys, folder / "run", *flags)["sets"]["both"]["by_store"]
    ):
        assert one["num_tokens"] == other["num_tokens"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)


def test_sums_by_groups_are_those_of_their_elements() -> None:
    random = np.random.default_rng(0)
    values, groups = random.normal(size=500), random.integers(0, 5, 500)
    sums = sums_by(torch.from_numpy(values), torch.from_numpy(groups), 6).tolist()
    assert sums == pytest.approx([values.sum(), *(values[groups == group].sum() for group in range(6))], abs=1e-12)


@pytest.mark.slow
@pytest.mark.ci
def test_a_resumed_run_says_that_sets_have_changed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "job.toml").read_text()
    changed = text.replace('name = "low"', 'name = "lower"').replace("num_samples = 9", "num_samples = 8")
    (tmp_path / "job.toml").write_text(changed)
    common = ["--train-steps", 4, "--save", folder / "run", "--dry-run"]
    assert call("train", folder / "job.toml", *common) == 0
    assert "validation sets" not in capsys.readouterr().err
    flags = ["--train-steps", 5, "--load", folder / "run", "--save", tmp_path / "run", "--train.eval-interval", 1]
    assert call("train", tmp_path / "job.toml", *flags) == 0
    said = capsys.readouterr().err
    assert "validation sets have changed: lower joins, low is gone, both reads others\n" in said
    assert "data.valid_sets" not in said, "which keep bits"
    moved = ValidSetConfig(name="a", stores=("x",), num_samples=3)
    assert moved.reads_as(ValidSetConfig(name="a", stores=("y",), num_samples=3, cache_mib=5))
    assert not moved.reads_as(ValidSetConfig(name="a", stores=("x", "x"), num_samples=3))


@pytest.mark.parametrize(
    ("old", "new", "flags", "text", "hint"),
    [
        ('name = "both"', 'name = "low"', [], "sets[1].name low is that of data.valid_sets[0] too", 'name = "low1"'),
        ('name = "both"', 'name = "a b/c"', [], "sets[1].name 'a b/c' is not of letters, digits", 'name = "a-b-c"'),
        ('name = "both"', "", [], "data.valid_sets[1] has no name", 'name = "set1"'),
        ('/low"]', '/gone"]', [], "gone is not a token store", "ls "),
        ('stores = ["{}/low"]', "stores = []", [], "data.valid_sets[0].stores names no token store", "stores = "),
        ("num_samples = 9", "num_sample = 9", [], "data.valid_sets[1].num_sample: unknown key", "num_samples"),
        ("num_samples = 9", "weights = [1]", [], "data.valid_sets[1].weights has 1 entries for 2", ""),
        ("num_samples = 9", 'cache = "c"', [], "data.valid_sets[1].cache needs a store behind a URL", ""),
        (
            "",
            "",
            ["--checkpoint.keep-best", 1, "--checkpoint.keep-best-metric", "val_loss/lo"],
            "keep_best_metric val_loss/lo is of no validation set",
            "--checkpoint.keep-best-metric val_loss/low",
        ),
    ],
)
def test_sets_that_are_refused(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    flags: list,
    text: str,
    hint: str,
) -> None:
    config = (folder / "job.toml").read_text().replace(old.format(folder) or "\0", new)
    (tmp_path / "job.toml").write_text(config)
    assert call("train", tmp_path / "job.toml", "--train.eval-interval", 2, *flags, "--dry-run") == 2
    said = capsys.readouterr().err
    assert text in said
    assert hint in said
    assert len(said.strip().splitlines()) == 2


def test_names_that_eval_does_not_know(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, text in [
        (["--set", "lo"], "the configuration has no validation set lo: it has low, both\nhint: --set low\n"),
        (["--by", "tag"], f"no document of {folder}/valid, {folder}/low has a tag\nhint: --by store; "),
    ]:
        assert call("eval", folder / "run", *flags) == 2
        assert text in capsys.readouterr().err


def test_a_set_that_is_read_more_than_once_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = ["--data.valid.num-samples", 500, "--train.eval-interval", 1, "--dry-run"]
    assert call("train", folder / "job.toml", *again) == 0
    said = re.findall("validation.*", capsys.readouterr().err)
    rows = BlendConfig(stores=(str(folder / "valid"),)).open_store(0, str(folder / "valid"), 32).num_rows(32)
    assert said == [f"validation reads rows more than once: 500 samples of the {rows} of {folder}/valid"]


def test_a_table_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("eval", folder / "run", "--by", "store") == 0
    printed = capsys.readouterr().out.splitlines()
    table = printed[-7:]
    assert table[0].split() == ["set", "store", "loss", "perplexity", "tokens"]
    assert [row.split()[0] for row in table[1:]] == ["data.valid", "low", "low", "both", "both", "both"]


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job on a store with two tags, one of which no document of the rows that are read has."""
    folder = tmp_path_factory.mktemp("tagged")
    (folder / "in").mkdir()
    for name in ("web", "code"):
        write_jsonl(folder / "in" / f"{name}.jsonl", [f"{name} {number} " * (number % 7 + 1) for number in range(50)])
    train_tokenizer([str(folder / "in")], str(folder / "tok.json"), vocab_size=300)
    tags = (Tag("web", str(folder / "in" / "web.jsonl")),)
    preprocess([folder / "in"], folder / "train", Recipe(str(folder / "tok.json"), append_eod=True, tags=tags))
    path = write_config(folder)
    path.write_text(path.read_text().replace("/valid", "/train"))
    assert call("train", path, "--train-steps", 1, "--save", folder / "run") == 0
    return folder


@pytest.mark.slow
@pytest.mark.ci
def test_losses_by_tag_add_up_to_the_whole(tagged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = evaluate(capsys, tagged / "run", "--by", "tag")
    groups = {group["tag"]: group for group in whole["by_tag"]}
    assert groups.keys() == {"web", "no tag"}
    assert sum(group["num_tokens"] for group in groups.values()) == whole["num_tokens"] < 320, "ends have no loss"
    total = sum(group["loss"] * group["num_tokens"] for group in groups.values())
    assert total / whole["num_tokens"] == pytest.approx(whole["loss"], rel=1e-12)


@pytest.mark.slow
def test_groups_do_not_depend_on_the_layout(tagged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--by", "tag", "--train.precision", "fp64", "--global-batch-size", "8"]
    expected = evaluate(capsys, tagged / "run", *flags)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m", "trainer"]
    for layout in (["--tp", "2", "--cp", "2"], ["--pp", "2"]):
        command = [*launcher, "eval", str(tagged / "run"), *layout, *flags, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200, check=True)
        found = json.loads(done.stdout)
        for one, other in zip([found, *found["by_tag"]], [expected, *expected["by_tag"]], strict=True):
            assert one["num_tokens"] == other["num_tokens"]
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-10)
