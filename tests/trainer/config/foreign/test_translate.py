"""A command line of another program ends in a list of what does not exist here, all at once; without that it trains."""

import itertools
import json
import re
from pathlib import Path

import pytest

from tests.support.checks import require_equal
from threefold.errors import UserError
from threefold.flags import settings_of
from trainer.cli import build_parser, main
from trainer.config import Config
from trainer.config.walk import config_from, load_config

# a template of Megatron-LM: what is there, what is not, and what the answer to that begins with
THERE = [
    *("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", "--sequence-parallel"),
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "2", "--global-batch-size", "4"),
    *("--gradient-accumulation-steps", "2", "--bf16", "--use-flash-attn", "--use-fused-rmsnorm"),
    *("--overlap-grad-reduce", "--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--dataloader-type", "single", "--log-interval", "1", "--train-iters", "2"),
]
MISSING = {
    "--fp16-lm-cross-entropy": [],
    "--torch-compile": [],
    "--deepspeed": [],
    "--deepspeed_config": ["ds.json"],
    "--profile": [],
    "--profile-step-start": ["2"],
    "--profile-step-end": ["3"],
    "--cp-comm-type": ["p2p"],
}


REPLICAS, SHARD = "--parallelism.data_parallel_replicate_degree", "--parallelism.data_parallel_shard_degree"
SHARD_GROUPS = {
    f"{REPLICAS} 2 {SHARD} 4": {"dp": 8, "dp_shard": 4, "zero_stage": 3},
    f"{SHARD} 4 {REPLICAS} 1": {"dp": 4, "dp_shard": 0, "zero_stage": 3},
    f"{SHARD} 1 {REPLICAS} 4": {"dp": 4, "dp_shard": 1, "zero_stage": 3},
    f"{REPLICAS} 2 --dp 8": {"dp": 8, "dp_shard": 4, "zero_stage": 3},
    "--num-distributed-optimizer-instances 2 --dp 8": {"dp": 8, "dp_shard": 0, "zero_stage": 1},
    "--num-distributed-optimizer-instances 2 --dp 8 --data-parallel-sharding-strategy optim_grads": {
        "dp": 8,
        "dp_shard": 4,
        "zero_stage": 2,
    },
}


def parsed(*words: str) -> tuple[str, Config]:
    """The positional CONFIG of a command line, and its configuration without a file."""
    arguments = build_parser().parse_args(["train", *words])
    return arguments.config, load_config(None, settings_of(arguments), world_size=None)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines of what `trainer train` says to a command line that it refuses, without error and hint."""
    with pytest.raises(SystemExit) as stop:
        main(["train", *words])
    said = capsys.readouterr()
    require_equal((stop.value.code, said.out), (2, ""))
    first, *lines, last = said.err.splitlines()
    require_equal(last, "hint: trainer train --help")
    return [line.strip() for line in lines] or [first.removeprefix("error: ")]


@pytest.mark.more_faults
def test_all_that_is_missing_is_one_list_of_a_sentence_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = refused(
        capsys, "run.toml", *THERE, *itertools.chain(*([flag, *values] for flag, values in MISSING.items()))
    )
    assert [line.split(":")[0].split()[0] for line in lines] == list(MISSING)
    assert all(len(line.partition(": ")[2]) > 20 for line in lines)


@pytest.mark.parametrize(
    ("words", "cp", "method"),
    [
        (("--context-parallel-size", "2", "--cp-comm-type", "a2a"), 2, "ulysses"),
        (("--context-parallel-size", "4", "--cp-comm-type", "all_gather"), 4, "allgather"),
        (("--ds-sequence-parallel-size", "2"), 2, "auto"),
        (("--parallelism.context_parallel_degree", "2"), 2, "auto"),
    ],
)
def test_context_parallel_in_the_words_of_others(words: tuple[str, ...], cp: int, method: str) -> None:
    _, config = parsed("run.toml", *words)
    assert (config.parallel.cp, config.parallel.cp_method) == (cp, method)


@pytest.mark.more_faults
def test_a_method_a_layer_is_one_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    _, config = parsed("run.toml", "--cp", "2", "--cp-comm-type", "a2a", "a2a")
    assert config.parallel.cp_method == "ulysses"
    (line,) = refused(capsys, "run.toml", "--cp", "2", "--cp-comm-type", "a2a", "all_gather")
    assert "it has one value here, not a2a, all_gather" in line


@pytest.mark.parametrize("place", range(0, 30, 4))
def test_the_configuration_is_never_taken_for_a_value(place: int) -> None:
    groups = [list(group) for group in _groups(THERE)]
    groups.insert(min(place, len(groups)), ["run.toml"])
    path, config = parsed(*itertools.chain(*groups))
    assert path == "run.toml"
    assert (config.parallel.sequence_parallel, config.parallel.overlap_grad_reduce) == ("on", True)
    assert (config.model.num_layers, config.train.recompute, config.train.precision) == (2, "full", "bf16")
    assert (config.train.train_steps, config.log.interval, config.model.num_positions) == (2, 1, 32)


def _groups(words: list[str]) -> list[list[str]]:
    rows: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            rows.append([word])
        else:
            rows[-1].append(word)
    return rows


@pytest.mark.ci
@pytest.mark.slow
def test_without_what_is_missing_it_trains(
    tmp_path: Path, job_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *THERE, str(job_config)]) == 0
    assert "step 2/2  loss" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--sequence-parallel"], "on"),
        (["--no-sequence-parallel"], "off"),
        (["--sequence-parallel", "auto"], "auto"),
        (["--sequence-parallel", "True"], "on"),
        (["--sequence-parallel=off"], "off"),
        (["--parallel.sequence-parallel"], "on"),
        (["--sequence_parallel"], "on"),
    ],
)
def test_a_switch_of_ours_does_without_its_value(words: list[str], value: str) -> None:
    for command in ([*words, "run.toml"], ["run.toml", *words]):
        path, config = parsed(*command)
        assert (path, config.parallel.sequence_parallel) == ("run.toml", value)


def test_an_unknown_flag_stands_in_the_same_list(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tf32", "--model.num-layer", "3", "--per_device_train_batch_size", "--swiglu=maybe", "--seq-length"]
    lines = refused(capsys, "run.toml", *words)
    assert lines == [
        "--tf32: fp32 is fp32 here; --bf16 is fast",
        "unknown argument --model.num-layer, did you mean --model.num-layers?",
        "--per_device_train_batch_size: needs a value",
        "--swiglu maybe: it is a switch, without a value",
        "--seq-length: needs a value",
    ]


def test_a_fault_in_a_value_names_the_flag_as_it_was_typed() -> None:
    with pytest.raises(UserError, match=r"optim.clip: must be a number, got 'much' \(from --clip-grad\)"):
        parsed("run.toml", "--clip-grad", "much")
    with pytest.raises(UserError, match="--train-samples: must be a number of samples, got 'many'"):
        parsed("run.toml", "--train-samples", "many")


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        ("--train-samples 4000 --global-batch-size 8", "train.train_steps", 500),
        ("--global-batch-size 8 --lr-decay-samples 320", "optim.decay_steps", 40),
        ("--train-iters 5000 --lr-warmup-fraction .01", "optim.warmup_steps", 50),
        ("--lr-warmup-fraction .01 --lr-decay-iters 400 --train-iters 5000", "optim.warmup_steps", 4),
        ("--num-layers-per-virtual-pipeline-stage 2 --num-layers 8 --pp 2", "parallel.virtual_stages", 2),
        ("--lr 0.1 --lr-decay-style constant", "optim.schedule", "constant"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 3 --train-iters 9", "optim.schedule", "wsd"),
        ("--lr-decay-style inverse-square-root", "optim.schedule", "inverse-sqrt"),
        ("--lr-decay-style linear", "optim.schedule", "linear"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-wsd-decay-style minus_sqrt", "optim.wsd_decay", "sqrt"),
        (
            "--global-batch-size 8 --lr-wsd-decay-samples 80 --lr-decay-style WSD --train-iters 99",
            "optim.wsd_decay_steps",
            10,
        ),
        ("--lr_scheduler_type inverse_sqrt", "optim.schedule", "inverse-sqrt"),
        ("--lr-scheduler.decay-type sqrt --lr-scheduler.decay-ratio .25 --train-iters 80", "optim.wsd_decay", "sqrt"),
        ("--lr-scheduler.decay-ratio .25 --train-iters 80", "optim.wsd_decay_steps", 20),
        ("--lr-scheduler.decay-type linear", "optim.schedule", "linear"),
        (
            "--lr-scheduler.decay-type sqrt --lr-scheduler.warmup-steps 9 --train-iters 80",
            "optim.wsd_decay_steps",
            71,
        ),
        ("--eval-iters 3 --global-batch-size 8", "data.valid.num_samples", 24),
        ("--recompute-granularity selective", "train.recompute", "none"),
        ("--recompute-activations --recompute-modules core_attn", "train.recompute", "none"),
        ("--recompute-activations --recompute-modules core_attn layernorm", "train.recompute", "selective"),
        (
            "--recompute-granularity selective --recompute-modules layernorm mlp",
            "train.recompute_modules",
            ("norms", "mlp"),
        ),
        (
            "--recompute selective --recompute-modules norms,mlp,attention",
            "train.recompute_modules",
            ("norms", "mlp", "attention"),
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "train.recompute_num_layers",
            0,
        ),
        (
            "--recompute-method block --recompute-granularity full --recompute-num-layers 2",
            "train.recompute_num_layers",
            2,
        ),
        ("--activation-checkpoint.mode selective", "train.recompute", "selective"),
        *(
            (f"{words} --global-batch-size 32 --micro-batch-size 1", f"parallel.{option}", value)
            for words, options in SHARD_GROUPS.items()
            for option, value in options.items()
        ),
        ("--use-rope-scaling", "model.rope_factor", 8.0),
        ("--rope-scaling-factor 32 --use-rope-scaling", "model.rope_factor", 32.0),
        ("--data-path 0.3 a 0.7 b", "data.stores", ("a", "b")),
        ("--data-path 0.3 a 0.7 b", "data.weights", (0.3, 0.7)),
        ("--data-path a b", "data.weights", ()),
        ("--split 949,50,1", "data.order", "megatron"),
        ("--split 949,50,1 --eval-interval 10 --eval-iters 2", "data.valid.order_samples", 11 * 16),
        ("--exit-duration-in-mins 2", "train.max_time_s", 120.0),
        ("--distributed-timeout-minutes 3", "parallel.timeout_s", 180.0),
        ("--num_train_epochs=1", None, "num_train_epochs"),
    ],
)
def test_what_depends_on_other_options(
    words: str, option: str | None, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    if option is None:
        assert str(value) in refused(capsys, "run.toml", *words.split())[0]
        return
    found: object = parsed("run.toml", *words.split())[1]
    for name in option.split("."):
        found = getattr(found, name)
    assert found == value


def test_a_dataset_of_megatron_is_answered_by_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "text_document.idx").touch()
    with pytest.raises(UserError, match=r"is a dataset of Megatron: datakit convert .* makes a store"):
        parsed("run.toml", "--data-path", str(tmp_path / "text_document"))


def test_the_keys_of_a_deepspeed_file_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    tables = {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 16,
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0},
        "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 5e8},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.2}},
    }
    path.write_text(json.dumps(tables))
    path_of, config = parsed("--deepspeed_config", str(path), "run.toml")
    assert path_of == "run.toml"
    assert (config.train.micro_batch_size, config.train.global_batch_size, config.train.precision) == (2, 16, "bf16")
    assert (config.optim.lr, config.optim.beta1, config.optim.beta2) == (0.01, 0.8, 0.9)
    path.write_text(json.dumps(tables | {"zero_optimization": {"stage": 3}}))
    assert parsed("--deepspeed_config", str(path), "run.toml")[1].parallel.zero_stage == 3
    path.write_text(json.dumps(tables | {"amp": {"enabled": True}, "foo": 1}))
    lines = refused(capsys, "run.toml", "--deepspeed", str(path))
    assert [line.removeprefix(f"{path}: ").split(":")[0] for line in lines] == [
        "amp.enabled",
        "foo",
    ]


@pytest.mark.parametrize("content", ["{", "[]", "1", pytest.param("[" * 100_000, id="nested")])
def test_a_deepspeed_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    (tmp_path / "ds.json").write_text(content)
    assert "DeepSpeed does not run here" in refused(capsys, "run.toml", "--deepspeed", str(tmp_path / "ds.json"))[0]


def test_keys_of_torchtitan_in_a_file_are_answered_with_ours() -> None:
    tables = {
        "training": {"local_batch_size": 8, "seq_len": 2048},
        "optimizer": {"lr": 1e-3, "name": "AdamW"},
        "lr_scheduler": {"min_lr_factor": 0.1, "decay_type": "sqrt"},
        "model": {"name": "llama3", "num_layers": 2},
        "float8": {"emulate": False},
        "train": {"train_steps": 3},
    }
    with pytest.raises(UserError) as caught:
        config_from(tables, source="titan.toml")
    assert caught.value.message.splitlines()[1:] == [
        "  training.local_batch_size: here it is train.micro_batch_size",
        "  training.seq_len: here it is train.seq_length",
        "  optimizer.lr: here it is optim.lr",
        "  optimizer.name: leave it out, the optimizer is AdamW",
        "  lr_scheduler.min_lr_factor: as a flag, --lr-scheduler.min-lr-factor, it is understood",
        "  lr_scheduler.decay_type: as a flag, --lr-scheduler.decay-type, it is understood",
        "  model.name: there is one transformer; its shape is in [model]: --model.num-layers, --model.hidden-size and "
        "others",
        "  float8.emulate: how scales are shared is --fp8, and --fp8.wgrad, --fp8.grad-format and --fp8.skip are more",
    ]
    assert parsed("run.toml", "--training.batch_size", "4", "--training.seq-len=64")[1].train.micro_batch_size == 4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--window-size", "127,0"], (128, 0)),
        (["--window-size", "(127, -1)"], (128, 0)),
        (["--window-size=-1,0"], (0, 0)),
        (["--window-size", "127,0", "--window-attn-skip-freq", "3"], (128, 3)),
        (["--window-size", "0,0", "--window-attn-skip-freq", "([1,1,0]*2)"], (1, 3)),
        (["--window-size", "127,0", "--window-attn-skip-freq", "[1,1,1,1,1,1]"], (128, 0)),
    ],
)
def test_a_window_of_megatron_is_one_token_longer_here(words: list[str], expected: tuple[int, int]) -> None:
    """There it counts the tokens before a query, and here the query too."""
    model = parsed("run.toml", "--num-layers", "6", *words)[1].model
    assert (model.window, model.window_every) == expected


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--window-size", "128"], "must be as 1023,0: so many tokens before a query and none behind, got '128'"),
        (["--window-size", "127,5"], "none behind, got '127,5'"),
        (["--window-size", "9,0", "--window-attn-skip-freq", "[0,1,1]*2"], "every N-th layer 0, got '[0,1,1]*2'"),
        (["--window-size", "9,0", "--window-attn-skip-freq", "[1,0]*9"], "a list of 6 as [1,1,0]*4"),
    ],
)
def test_a_window_that_is_not_to_be_had_is_answered(words: list[str], part: str) -> None:
    with pytest.raises(UserError, match=re.escape(part)):
        parsed("run.toml", "--num-layers", "6", *words)


def test_replicas_are_of_the_ranks_that_were_started() -> None:
    arguments = build_parser().parse_args(["train", "run.toml", "--tp", "2", REPLICAS, "2", SHARD, "-1"])
    parallel = load_config(None, settings_of(arguments), world_size=16).parallel
    assert (parallel.dp, parallel.dp_shard, parallel.zero_stage) == (8, 4, 3)
    with pytest.raises(UserError, match=r"degree: 3 does not divide the 4 ranks of dp: --dp 6"):
        parsed("run.toml", REPLICAS, "3", "--dp", "4")
    with pytest.raises(UserError, match=r"degree: 3 replicas are of ranks of dp that no flag counts: --dp 6"):
        parsed("run.toml", REPLICAS, "3")
