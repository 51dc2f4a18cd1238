"""What a resumed run reports of its settings, and what it keeps from its first start."""

import json
import typing
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from ckptkit import Root, Run, hash_checkpoint
from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.training import call, curve, lines
from threefold.options import Leaf, leaves, without_none
from trainer.checkpoint.changes import (
    PARTS,
    changed_settings,
    changes_of_run,
    kept_samples,
    recorded_config,
    value_of,
    with_old_parts,
)
from trainer.checkpoint.progress import Progress, environment
from trainer.config import Config, ParallelConfig
from trainer.config.resolve import resolve, settled

LEAVES = list(leaves(Config))
KEEPS = {
    "model": {"attention_window"},
    "parallel": {
        "schedule",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "reshard_after_forward",
        "moe_rows",
        "timeout_s",
    },
    "optim": {"master", "allow_reset", "offload", "offload_window_mib"},
    "fp8": {"stats_interval"},
    "train": {
        "cuda_graphs",
        "initial_loss_scale",
        "train_steps",
        "gradient_accumulation_steps",
        "recompute",
        "recompute_modules",
        "recompute_num_layers",
        "recompute_keep",
        "recompute_offload",
        "memory_check",
        "eval_interval",
        "max_time_s",
        "peak_tflops",
    },
    "data": {
        "stores",
        "indices",
        "reading",
        "cache",
        "cache_mib",
        "max_epochs",
        "mixture",
        "valid_sets",
        "tokenizer",
        "any_tokenizer",
    },
    "data.valid": {"stores", "indices", "reading", "cache", "cache_mib"},
}
WHOLE = {"checkpoint", "health", "log", "ops", "profile"}


def flipped(leaf: Leaf, value: Any) -> Any:
    """Another value of the same type."""
    kind = without_none(leaf.annotation)
    if typing.get_origin(kind) is Literal:
        return next(choice for choice in typing.get_args(kind) if choice != value)
    if typing.get_origin(kind) is tuple:
        return (*value, 1)
    return {bool: lambda: not value, str: lambda: value + "x"}.get(kind, lambda: (value or 0) + 1)()


def with_value(config: Any, name: str, value: Any) -> Any:
    first, _, rest = name.partition(".")
    inner = getattr(config, first)
    return replace(config, **{first: with_value(inner, rest, value) if is_dataclass(inner) else value})


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.name)
def test_each_setting_is_reported_unless_it_keeps_bits(leaf: Leaf) -> None:
    before = settled(resolve(Config(), 1))
    now = with_value(before, leaf.name, flipped(leaf, value_of(before, leaf.name)))

    changed = changed_settings(before, now)
    table, _, name = leaf.name.rpartition(".")
    if table in WHOLE or name in KEEPS.get(table, set()):
        assert (leaf.option.keeps_bits, changed) == (True, [])
    else:
        assert len(changed) == 1
        assert changed[0].startswith(f"{leaf.name} ")


def train(config: Path, folder: Path, *flags: object) -> int:
    return call("train", config, "--save", folder / "run", "--metrics", folder / "m.jsonl", *flags)


def test_another_learning_rate_is_reported_with_what_it_makes_of_the_next_step(
    job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(job_config, tmp_path, "--train-steps", 2, "--optim.decay-steps", 8) == 0
    capsys.readouterr()
    assert train(job_config, tmp_path, "--train-steps", 3, "--optim.decay-steps", 8, "--lr", 1e-3) == 0
    said = capsys.readouterr().err
    assert "not bit for bit as it was: optim.lr 0.005 -> 0.001" in said
    [rate] = [line["lr"] for line in lines(tmp_path / "m.jsonl") if line["step"] == 3]
    assert f"learning rate of step 3: 0.004272 -> {rate:.4g}" in said


def test_a_run_that_is_made_longer_keeps_its_schedule_unless_asked(
    job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(job_config, tmp_path, "--train-steps", 4) == 0
    capsys.readouterr()
    assert train(job_config, tmp_path, "--train-steps", 6) == 0
    printed = capsys.readouterr().err
    assert "not bit for bit" not in printed
    assert (
        "the run ends at step 6 now, and min_lr is still reached at step 4: --optim.decay-steps 6 moves that" in printed
    )
    rates = curve(tmp_path / "m.jsonl", "lr")
    assert rates[4] > rates[5] == rates[6] == 3e-5
    root = json.loads((tmp_path / "run" / "step-000000006" / "root.json").read_text())
    assert root["metadata"]["config"]["optim"]["decay_steps"] == 4

    assert train(job_config, tmp_path, "--train-steps", 8, "--optim.decay-steps", 8) == 0
    printed = capsys.readouterr().err
    assert "not bit for bit as it was: optim.decay_steps 4 -> 8" in printed
    assert "learning rate of step 7: 3e-05 -> 0.0007578" in printed
    assert curve(tmp_path / "m.jsonl", "lr")[7] > 7e-4


def test_an_unchanged_resume_reports_nothing(
    job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(job_config, tmp_path, "--train-steps", 2) == 0
    torch.set_num_threads(1)
    capsys.readouterr()
    assert train(job_config, tmp_path, "--train-steps", 2) == 0
    said = capsys.readouterr().err
    assert "not bit for bit" not in said
    assert "learning rate" not in said


GROUP = '\n[[optim.groups]]\npattern = "{}"\nlr_factor = {}\n'


def test_groups_of_a_file_train_and_their_change_is_reported_in_words(
    job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "job.toml"

    def written(*groups: str) -> Path:
        config.write_text(job_config.read_text() + "".join(groups))
        return config

    frozen, norms = GROUP.format("embed.*", 0), GROUP.format("*.norm?.weight", 0.5) + "decay_factor = 0.25\n"
    assert train(written(frozen, norms), tmp_path, "--train-steps", 2) == 0
    capsys.readouterr()
    assert train(config, tmp_path, "--train-steps", 3) == 0
    assert "not bit for bit" not in capsys.readouterr().err
    hashes = []
    for step in (2, 3):
        with Run(str(tmp_path / "run")).open(step) as reader:
            hashes.append(hash_checkpoint(reader).tensors)
    assert [hashes[0][name] == hashes[1][name] for name in ("embed.weight", "layers.0.norm1.weight")] == [True, False]

    assert train(written(norms), tmp_path, "--train-steps", 3) == 0
    both = "embed.* with lr_factor 0 and then *.norm?.weight with lr_factor 0.5, decay_factor 0.25"
    said = capsys.readouterr().err
    assert f"not bit for bit as it was: optim.groups {both} -> *.norm?.weight with lr_factor 0.5, decay" in said
    assert train(written(), tmp_path, "--train-steps", 3) == 0
    assert f"optim.groups {both} -> none" in capsys.readouterr().err

    assert train(written(GROUP.format("embd.*", 2)), tmp_path, "--train-steps", 4) == 2
    assert "optim.groups[0].pattern 'embd.*' fits no parameter; the names are such as" in capsys.readouterr().err
    assert train(written(GROUP.format("embed.*", -2)), tmp_path, "--train-steps", 4) == 2
    assert "optim.groups[0].lr_factor" in capsys.readouterr().err


def losses_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> float:
    capsys.readouterr()
    assert call("eval", *arguments, "--json") == 0
    return float(json.loads(capsys.readouterr().out)["loss"])


def test_validation_samples_are_the_same_for_any_seed_of_the_run(
    job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(job_config, tmp_path, "--train-steps", 2, "--seed", 5) == 0
    run = tmp_path / "run"
    expected = losses_of(capsys, run)
    assert losses_of(capsys, run, job_config) == losses_of(capsys, run, job_config, "--seed", 6) == expected
    assert losses_of(capsys, run, "--data.valid.seed", 3) != expected


def test_a_run_from_before_that_keeps_the_validation_samples_it_had(
    job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Progress.metadata

    def metadata(*arguments: Any) -> dict[str, Any]:
        found = real(*arguments)
        del found["config"]["data"]["valid"]["seed"]
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "metadata", metadata)
        assert train(job_config, tmp_path, "--train-steps", 2, "--seed", 5) == 0
    run = tmp_path / "run"
    assert losses_of(capsys, run) == losses_of(capsys, run, "--data.valid.seed", 5)
    assert losses_of(capsys, run) != losses_of(capsys, run, "--data.valid.seed", 0)
    assert train(job_config, tmp_path, "--train-steps", 3, "--seed", 5, "--train.eval-interval", 3) == 0
    text = capsys.readouterr().err
    assert "validation reads the samples of seed 5, as the run began; --data.valid.seed 0" in text
    assert "not bit for bit" not in text
    assert lines(tmp_path / "m.jsonl", "eval")[0]["loss"] == losses_of(capsys, run)
    root = json.loads((run / "step-000000003" / "root.json").read_text())
    assert root["metadata"]["config"]["data"]["valid"]["seed"] == 5


@pytest.fixture
def older_run(job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """A run, and the flags that go on with it, from before copies had orders of their own: it validates on two."""
    valid = job_config.parent / "valid"
    flags = (job_config, "--data.valid.stores", f"{valid},{valid}", "--data.valid.num-samples", 10)
    real = Progress.metadata

    def metadata(*arguments: Any) -> dict[str, Any]:
        found = real(*arguments)
        del found["config"]["data"]["valid"]["orders_copies"]
        del found["stream"]["orders_copies"]
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "metadata", metadata)
        assert call("train", *flags, "--save", tmp_path / "run", "--train-steps", 2) == 0
    return flags


def test_copies_that_an_older_run_validates_on_keep_their_order(
    older_run: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, line = tmp_path / "run", "validation reads, as the run began, copies of a store in one order"
    in_one = losses_of(capsys, run, "--data.valid.orders-copies", "false")
    each = losses_of(capsys, run, "--data.valid.orders-copies", "true")
    assert losses_of(capsys, run) == in_one != each
    for steps in (3, 4):  # the second start goes on from a step of today's code
        capsys.readouterr()
        saves = ("--save", run, "--metrics", tmp_path / "m.jsonl", "--train.eval-interval", 1)
        assert call("train", *older_run, *saves, "--train-steps", steps) == 0
        printed = capsys.readouterr().err
        assert line in printed
        assert "not bit for bit" not in printed
        assert lines(tmp_path / "m.jsonl", "eval")[-1]["loss"] == losses_of(capsys, run)
    assert call("train", *older_run, *saves, "--train-steps", 5, "--data.valid.orders-copies", "true") == 0
    printed = capsys.readouterr().err
    assert "not bit for bit as it was: data.valid.orders_copies False -> True" in printed
    assert line not in printed


@pytest.mark.parametrize(
    ("metadata", "orders_copies"),
    [
        ({}, True),  # an imported model
        ({"cursor": {}}, False),
        ({"cursor": {}, "stream": {}}, False),
        ({"cursor": {}, "stream": {"orders_copies": True}}, True),
        ({"cursor": 3, "stream": "of another program"}, False),
        ({"cursor": {}, "config": {"data": {"valid": {"orders_copies": True}}}}, True),
    ],
)
def test_which_steps_are_of_runs_whose_validation_orders_copies(metadata: dict, orders_copies: bool) -> None:
    before = recorded_config(Root(1, "0" * 16, ParallelLayout(), 1, {}, (), metadata))
    assert settled(Config(), before).data.valid.orders_copies is orders_copies
    assert settled(Config()).data.valid.orders_copies is True


def test_validation_samples_that_an_older_run_did_not_have_are_a_change() -> None:
    data = Config().data
    before = replace(Config(), train=replace(Config().train, seed=5))
    now = replace(before, data=replace(data, valid=replace(data.valid, seed=7, stores=("held-out",))))
    assert changed_settings(settled(before, before), settled(now, before)) == ["data.valid.seed 5 -> 7"]
    assert kept_samples(before, settled(now, before)) == []


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [(0, 0, []), (0, 2, []), (0, 4, ["2 -> 4"]), (2, 0, []), (2, 1, ["2 -> 1"])],
    ids=["auto goes on", "the chosen one by name", "another", "a named one goes on", "another than named"],
)
@pytest.mark.parametrize(("op", "option"), PARTS.items())
def test_numbers_of_parts_are_compared_as_they_were_chosen(
    op: str, option: str, before: int, now: int, expected: list[str]
) -> None:
    """A run that took 2 parts, by itself or as it was told."""
    was, is_now = (with_value(settled(resolve(Config(), 1)), f"parallel.{option}", number) for number in (before, now))
    cpu = torch.device("cpu")
    root: Any = SimpleNamespace(step=1, metadata={"environment": environment(cpu)})
    changes = changes_of_run(root, was, is_now, cpu, {op: "2"})
    assert changes == [f"not bit for bit as it was: parallel.{option} {text}" for text in expected]


@pytest.mark.parametrize(("recorded", "expected"), [(0, "1"), (1, "1"), (4, "4")])
def test_a_run_from_before_parts_were_chosen_keeps_its_number(recorded: int, expected: str) -> None:
    before = resolve(Config(parallel=ParallelConfig(tp=2, tp_overlap_parts=recorded)), 2)
    assert with_old_parts({"attention": "reference"}, before) == {"attention": "reference", "token-parts": expected}
    assert with_old_parts({"token-parts": "2"}, before) == {"token-parts": "2"}
    uncut = with_value(before, "parallel.sequence_parallel", "off")
    assert with_old_parts({}, uncut) == {}, "its parts are chosen where a run cuts tokens"
