"""A command line of Megatron-LM becomes a TOML file that says the same, defaults included, and loads."""

import json
import tomllib
from pathlib import Path

import pytest

from tests.trainer.support.training import call
from threefold.errors import UserError
from threefold.flags import settings_of
from trainer.cli import build_parser
from trainer.config import TrainConfig
from trainer.config.foreign.script import Script
from trainer.config.walk import load_config

FLAGS = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 128 "
    "--max-position-embeddings 128 --position-embedding-type rope --rotary-base 500000 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0 --micro-batch-size 1 --global-batch-size 8 --train-iters 500 --lr 3e-4 --min-lr 3e-5 "
    "--lr-decay-style cosine --lr-warmup-fraction .01 --clip-grad 1.0 --adam-beta2 0.95 --weight-decay 0.1 --bf16 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--use-distributed-optimizer --overlap-grad-reduce --sequence-parallel --log-interval 10 --eval-interval 100 "
    "--eval-iters 10 --data-path 0.3 one 0.7 two --split 98,2,0 --save run --save-interval 100 --seed 7"
)
SCRIPT = """#!/bin/bash
# a launcher as published ones are
GPUS_PER_NODE=${GPUS:-4}   # of each machine
NODES=2
export WORLD_SIZE=$(($GPUS_PER_NODE*$NODES))
CHECKPOINTS=$1
DTYPE="bf16"
MODEL_ARGS=(
    --num-layers $((2 + 2)) --hidden-size 64   # no more
    --num-attention-heads 4 --seq-length 128
    --max-position-embeddings "128"
)
if [ -n "${WANDB_KEY}" ]; then
    MODEL_ARGS+=(--wandb-project x)
elif [[ "$DTYPE" == "bf16" && -z "$FP8" ]]; then
    MODEL_ARGS+=("--bf16" "--lr 0.01")
else
    MODEL_ARGS+=(--fp16)
fi
DATA=" \\
    --data-path 1 store \\
    --micro-batch-size 2 --train-iters 10"
if [ ! -f pretrain_gpt.py ]; then
    echo "not there --fp16"; exit 1
fi
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes=$NODES pretrain_gpt.py \\
    ${MODEL_ARGS[@]} $DATA --save "$CHECKPOINTS/run" --load "$CHECKPOINTS/run" --log-interval 1 2>&1 | tee log
"""


def converted(capsys: pytest.CaptureFixture[str], text: object) -> tuple[str, str]:
    """The TOML of a command line, and what was said beside it."""
    capsys.readouterr()
    assert call("train", "--from-megatron", text) == 0
    said = capsys.readouterr()
    return said.out, said.err


def test_the_printed_file_says_what_the_flags_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = converted(capsys, f"torchrun --nproc-per-node 8 pretrain_gpt.py {FLAGS}")
    assert said == ""
    path = tmp_path / "run.toml"
    path.write_text(text)
    typed = settings_of(build_parser().parse_args(["train", "x.toml", *FLAGS.split()]))
    file, flags = load_config(str(path), world_size=None), load_config(None, typed, world_size=None)
    assert (file.model, file.data, file.optim, file.checkpoint) == (
        flags.model,
        flags.data,
        flags.optim,
        flags.checkpoint,
    )
    assert file.train == flags.train
    assert (file.parallel.virtual_stages, file.optim.warmup_steps, file.data.weights) == (2, 5, (0.3, 0.7))
    assert file.data.valid.num_samples == 80
    assert "num_kv_heads = 2  # --num-query-groups" in text
    assert "tp = 2  # --tensor-model-parallel-size" in text
    assert "trainer launch --nproc-per-node 8 train" in text


def test_defaults_of_megatron_are_written_down(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--num-layers 2 --train-iters 3 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --lr 1"
    text, printed = converted(capsys, line)
    tables = tomllib.loads(text)
    assert (
        tables["model"] | {"norm": "layernorm", "activation": "gelu", "bias": True, "tie_embeddings": True}
        == tables["model"]
    )
    assert "num_kv_heads" not in tables["model"]  # Megatron-LM wants --group-query-attention too
    assert "Megatron-LM ignores it without --group-query-attention" in text
    assert (tables["optim"]["beta2"], tables["parallel"]["zero_stage"], tables["train"]["seed"]) == (0.999, 0, 1234)
    assert tables["train"]["global_batch_size"] == 1
    assert tables["optim"]["schedule"] == "linear"
    assert 'schedule = "linear"  # the default of Megatron-LM' in text
    assert "is named that validates" not in printed


def test_a_schedule_of_megatron_is_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{FLAGS} --lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-decay-iters 90"
    for more, shape in (("", "exponential"), (" --lr-wsd-decay-style minus_sqrt", "sqrt")):
        text, said = converted(capsys, line + more)
        path = tmp_path / "run.toml"
        path.write_text(text)
        optim = load_config(str(path), world_size=None).optim
        assert (optim.schedule, optim.wsd_decay_steps, optim.decay_steps, optim.wsd_decay) == ("wsd", 20, 90, shape)
        assert "--lr-" not in said


def test_a_script_is_read_without_running_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    text, printed = converted(capsys, path)
    tables = tomllib.loads(text)
    assert (tables["model"]["num_layers"], tables["train"]["precision"], tables["optim"]["lr"]) == (4, "bf16", 0.01)
    assert (tables["train"]["global_batch_size"], tables["data"]["stores"]) == (16, ["store"])
    start = "trainer launch --nproc-per-node 4 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train"
    assert f"# To start it: {start} FILE.toml" in text
    assert "checkpoint.save = $1/run" in printed
    assert "wandb" not in text + printed
    assert "--fp16" not in text + printed


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("bash -c 'python pretrain_gpt.py --num-layers 3 --lr 1'", "num_layers = 3"),
        ('srun --nodes 2 sh -c "python -u pretrain_gpt.py --lr 1 --num-layers 3"', "num_layers = 3"),
        ("--num-layers 3 --lr 1", "num_layers = 3"),
        ('MODEL_ARGS=" \\\n  --num-layers 3 \\\n  --lr 1"', "num_layers = 3"),
        ("x.py --lr 1 --bf16 $@ --eval-interval 5", "#   --eval-interval: nothing is named that validates"),
        (
            "python -m torch.distributed.launch --nproc_per_node=2 pretrain_gpt.py --lr 1 --num-layers=3 > log",
            "num_layers = 3",
        ),
        (
            "pretrain_gpt.py --lr 1 --moe-grouped-gemm --moe-input-jitter-eps 8 --frobnicate 3",
            "#   unknown argument --frobnicate",
        ),
        (
            "pretrain_gpt.py --lr 1 --swiglu --disable-bias-linear --num-experts 8 --moe-router-topk 3",
            "num_experts = 8",
        ),
    ],
)
def test_command_lines_of_all_kinds(line: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = converted(capsys, line)
    assert expected in text
    assert tomllib.loads(text)["optim"]["lr"] == 1.0


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("nowhere.sh", "no such script: nowhere.sh"),
        ("echo hello", "the text runs no program with flags"),
        ("", "CONFIG.toml or --from-megatron COMMAND is missing"),
        ("pretrain_gpt.py --num-layers $LAYERS --lr 1", "model.num_layers: must be a whole number, got '$LAYERS'"),
        ("pretrain_gpt.py --lr 1e-6 --min-lr 1", "optim.min_lr 1 is above optim.lr 1e-06"),
    ],
)
def test_what_says_nothing_that_could_be_written(line: str, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("train", "--from-megatron", line) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert fault in said.err


@pytest.mark.parametrize(
    "text", ["'", '"', "${", "$((", "A=(", "a \\", "if", "fi", "else x", "$", "`", "[ -z", "A=$A$A", "done done"]
)
def test_no_text_breaks_the_reader(text: str) -> None:
    for whole in (text, f"x.py --a {text}", f"if [ {text} ]; then x.py {text}; fi"):
        assert isinstance(Script(whole).commands, list)


def test_words_are_expanded_as_a_shell_does() -> None:
    text = """A=3; B=$((A*2 % 4)); L=(a "b c"); X="--a $A"; X="$X --b ${B}"
    x.py $X "$X" '$X' ${L[@]} "${L[@]}" ${N:-d e} "${N:-d e}" --c="$1" \\$A pre${A}post"""
    [command] = Script(text).commands
    assert command[1:] == [
        *("--a", "3", "--b", "2", "--a 3 --b 2", "$X", "a", "b", "c", "a", "b c", "d", "e", "d e", "--c=$1", "$A"),
        "pre3post",
    ]


def test_a_dataset_of_megatron_is_named_with_its_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text_document.idx").touch()
    text, said = converted(capsys, "--lr 1 --train-data-path 1 text_document")
    assert tomllib.loads(text)["data"]["stores"] == ["text_document"]
    assert "datakit convert text_document --output STORE makes a store of it" in said


SMALL = "--num-layers 2 --hidden-size 96 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 1e-4"


def test_what_megatron_makes_of_a_switch_alone_is_written_down(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = converted(capsys, f"{SMALL} --train-iters 5000 --swiglu --group-query-attention --data-path d")
    tables = tomllib.loads(text)
    assert (tables["model"]["ffn_hidden_size"], tables["model"]["num_kv_heads"]) == (256, 1)
    assert (tables["train"]["eval_interval"], tables["data"]["valid"]["order_samples"]) == (1000, 6 * 100 * 2)
    text, _ = converted(capsys, f"{SMALL} --train-iters 10 --group-query-attention --num-query-groups 2")
    assert "ffn_hidden_size" not in tomllib.loads(text)["model"]
    assert tomllib.loads(text)["model"]["num_kv_heads"] == 2


@pytest.mark.more_faults
@pytest.mark.parametrize(
    ("flags", "fault", "hint"),
    [
        ("--train-iters", "--train-iters: needs a value", "correct it"),
        ("--train-iters 1O", "must be a whole number, got '1O'", "correct it"),
        ("--train-iters $STEPS", "must be a whole number, got '$STEPS'", "put values in place of what only the shell"),
        ("--train-iters 5 --train-samples 10", "--train-samples: --train-iters 5 says it too", "correct it"),
        ("--train-iters 5 --lr-warmup-iters 2 --lr-warmup-fraction 0.1", "--lr-warmup-iters 2 says it too", "correct"),
    ],
)
def test_what_megatron_itself_refuses_makes_no_file(
    capsys: pytest.CaptureFixture[str], flags: str, fault: str, hint: str
) -> None:
    assert call("train", "--from-megatron", f"{SMALL} {flags}") == 2
    said = capsys.readouterr()
    assert said.out == ""
    error, last = said.err.splitlines()
    assert fault in error
    assert last.startswith(f"hint: {hint}")


def test_samples_are_counted_in_the_batch_of_megatron(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = converted(capsys, f"torchrun --nproc-per-node 2 pretrain_gpt.py {SMALL} --train-samples 1000")
    assert (tomllib.loads(text)["train"]["global_batch_size"], tomllib.loads(text)["train"]["train_steps"]) == (4, 250)


def test_a_warm_up_of_no_steps_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = converted(capsys, f"{SMALL} --train-iters 50 --lr-warmup-iters 0 --lr-warmup-fraction 0.1")
    assert tomllib.loads(text)["optim"]["warmup_steps"] == 5


@pytest.mark.more_faults
def test_nothing_beside_the_command_line_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("train", "run.toml", "--from-megatron", f"{SMALL} --train-iters 5", "--lr", 3, "--dry-run") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "--from-megatron is used alone, not with run.toml, --lr, --dry-run" in said.err


@pytest.mark.parametrize(
    ("flags", "expected", "left"),
    [
        ("--fp16", {"precision": "fp16", "initial_loss_scale": 2.0**32}, ""),
        ("--fp16 --initial-loss-scale 64 --hysteresis 1", {"initial_loss_scale": 64.0, "hysteresis": 1}, ""),
        (
            "--fp16 --loss-scale 8 --hysteresis 1",
            {"loss_scale": 8.0},
            "--hysteresis: --loss-scale is the scale, and stays",
        ),
        ("--bf16 --loss-scale-window 9", {"precision": "bf16"}, "--loss-scale-window: only --fp16 scales the loss"),
    ],
)
def test_a_loss_scale_is_megatrons(
    flags: str, expected: dict[str, object], left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, printed = converted(capsys, f"pretrain_gpt.py --num-layers 2 {flags}")
    train = tomllib.loads(text)["train"]
    scaled = {name: value for name, value in train.items() if "scale" in name or name in ("hysteresis", "precision")}
    assert scaled == {"precision": "fp16"} | expected
    assert left in printed


def of_deepspeed(path: Path, **half: object) -> TrainConfig:
    path.write_text(json.dumps({"fp16": {"enabled": True} | half}))
    arguments = build_parser().parse_args(["train", "--deepspeed_config", str(path)])
    return load_config(None, settings_of(arguments), world_size=None).train


def test_a_loss_scale_is_deepspeeds(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    train = of_deepspeed(path, loss_scale=0, initial_scale_power=12, hysteresis=3, min_loss_scale=2)
    assert (train.precision, train.loss_scale, train.hysteresis) == ("fp16", None, 3)
    assert (train.initial_loss_scale, train.min_loss_scale) == (4096, 2)
    assert of_deepspeed(path, loss_scale=128).loss_scale == 128
    with pytest.raises(UserError, match="must be at most 127 doublings"):
        of_deepspeed(path, initial_scale_power=200)
