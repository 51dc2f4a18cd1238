"""Every fault of a configuration is reported, all at once, with what would have been right."""

import dataclasses
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit import MixtureConfig, RunStream
from threefold.errors import UserError
from threefold.flags import settings_of
from threefold.options import FlagText, leaves
from trainer.cli import build_parser
from trainer.config import Config
from trainer.config.check import cross_faults
from trainer.config.resolve import settled
from trainer.config.walk import config_from, load_config, read_toml, recorded_model

EXAMPLES = Path(__file__).parents[3] / "examples"


def faults(tables: dict, flags: dict[str, str] | None = None, world_size: int = 1) -> list[str]:
    overrides = {name: FlagText(text, "--" + name) for name, text in (flags or {}).items()}
    with pytest.raises(UserError) as caught:
        config_from(tables, overrides, source="run.toml", world_size=world_size)
    assert caught.value.hint
    first, *rest = caught.value.message.splitlines()
    assert first.startswith("run.toml: ")
    if not rest:
        return [first.removeprefix("run.toml: ")]
    assert first == f"run.toml: {len(rest)} faults"
    return [line.strip() for line in rest]


def test_all_faults_are_reported_together() -> None:
    messages = faults(
        {
            "model": {"hidden_sise": 96, "num_layers": "four", "num_heads": 3, "norm": "rms"},
            "trian": {"seed": 1},
            "log": 4,
            "parallel": {"tp": 2},
            "optim": {"beta1": 1.0, "eps": 0},
        },
        {"train.seed": "x", "train.micro_batch_size": "0"},
        world_size=2,
    )
    assert messages == [
        "trian: unknown key, did you mean train?",
        "model.hidden_sise: unknown key, did you mean model.hidden_size?",
        "model.num_layers: must be a whole number, got 'four'",
        "model.norm: must be one of rmsnorm, layernorm, got 'rms'",
        "optim.beta1: must be at least 0 and below 1, got 1.0",
        "optim.eps: must be above 0, got 0",
        "train.seed: must be a whole number, got 'x' (from --train.seed)",
        "train.micro_batch_size: must be at least 1, got '0' (from --train.micro_batch_size)",
        "log: must be a table [log], got 4",
        "model.num_heads 3 is not a multiple of parallel.tp 2",
    ]


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"model": {"lr": 1.0}}, "model.lr: unknown key, did you mean optim.lr?"),
        ({"data": {"valid": {"store": []}}}, "data.valid.store: unknown key, did you mean data.valid.stores?"),
        ({"model": {"bias": 1}}, "model.bias: must be true or false, got 1"),
        ({"model": {"num_layers": True}}, "model.num_layers: must be a whole number, got True"),
        ({"model": {"num_layers": 2.0}}, "model.num_layers: must be a whole number, got 2.0"),
        ({"optim": {"lr": float("nan")}}, "optim.lr: must be a number, got nan"),
        ({"data": {"stores": "one"}}, "data.stores: must be a list of text, got 'one'"),
        ({"data": {"stores": [1]}}, "data.stores: must be text, got [1]"),
        ({"parallel": {"zero_stage": 4}}, "parallel.zero_stage: must be one of 0, 1, 2, 3, got 4"),
        ({"parallel": {"zero_stage": True}}, "parallel.zero_stage: must be one of 0, 1, 2, 3, got True"),
        (
            {"parallel": {"reshard_after_forward": "on", "zero_stage": 2}},
            "parallel.reshard_after_forward needs parallel.zero_stage = 3, which is 2: --parallel.zero-stage 3",
        ),
        (
            {"parallel": {"zero_whole_kib": 0}},
            "parallel.zero_whole_kib needs parallel.zero_stage = 2 or 3, which is 1: --parallel.zero-stage 2",
        ),
        (
            {"parallel": {"dp_shard": 1}},
            "parallel.dp_shard needs parallel.zero_stage = 2 or 3, which is 1: --parallel.zero-stage 2",
        ),
        (
            {"parallel": {"dp_shard": "many"}},
            "parallel.dp_shard: must be a whole number of at least 0, or auto, got 'many'",
        ),
        ({"parallel": {"dp_shard": -1}}, "parallel.dp_shard: must be at least 0, got -1"),
        ({"model": {"hidden_size": 250}}, "model.hidden_size 250 is not a multiple of model.num_heads 4"),
        ({"model": {"hidden_size": 12}}, "model.position rope needs an even head size, got hidden_size 12"),
        ({"model": {"num_kv_heads": 3}}, "model.num_heads 4 is not a multiple of model.num_kv_heads 3"),
        ({"model": {"window": -1}}, "model.window: must be at least 0, got -1"),
        ({"model": {"window": 9, "window_every": -2}}, "model.window_every: must be at least 0, got -2"),
        (
            {"model": {"attention_dropout": 0.1}, "ops": {"attention": "sdpa-flash"}},
            "ops.attention sdpa-flash drops no weights, and model.attention_dropout is 0.1: --ops.attention ",
        ),
        (
            {"model": {"position": "alibi"}, "ops": {"attention": "flash-4"}},
            "ops.attention flash-4 has no ALiBi, and model.position is alibi: --ops.attention reference, or on GPUs "
            "--ops.attention flash-2",
        ),
        (
            {"model": {"position": "alibi", "rope_scaling": "linear"}},
            "model.rope_scaling",
        ),
        ({"model": {"attention_dropout": 1.0}}, "model.attention_dropout: must be at least 0 and below 1, got 1.0"),
        ({"model": {"logit_softcap": -1.0}}, "model.logit_softcap: must be at least 0, got -1.0"),
        ({"model": {"window_every": 2}}, "model.window_every needs model.window"),
        ({"model": {"window": 9, "window_every": 1}}, "model.window_every 1 lets every layer see all tokens, and"),
        (
            {"model": {"window": 9}, "ops": {"attention": "sdpa-cudnn"}},
            "ops.attention sdpa-cudnn has no window, and model.window is 9: --ops.attention reference, or on GPUs "
            "--ops.attention sdpa-flash",
        ),
        ({"model": {"attention_window": 9}}, "model.attention_window 9 is less than rows of 256 tokens, and may be"),
        ({"optim": {"lr": 1e-6}}, "optim.min_lr 3e-05 is above optim.lr 1e-06"),
        (
            {"optim": {"moments": "bf16"}, "train": {"precision": "fp64"}},
            'optim.moments needs train.precision = "bf16" or "fp32" or "fp16", which is "fp64"',
        ),
        ({"optim": {"moments": "bf16", "beta2": 0.999}}, "optim.moments bf16 is too coarse for beta1 0.9, beta2 0.999"),
        (
            {"optim": {"master": "split"}},
            'optim.master needs train.precision = "bf16", which is "fp32": --train.precision bf16',
        ),
        (
            {"optim": {"master": "split"}, "train": {"precision": "bf16"}, "checkpoint": {"overlap": "on"}},
            "checkpoint.overlap on needs optim.master wide",
        ),
        ({"optim": {"warmup_steps": 101}}, "optim.warmup_steps 101 is more than the 100 steps in all"),
        ({"checkpoint": {"save_interval": 5}}, "checkpoint.save_interval needs checkpoint.save"),
        ({"checkpoint": {"save_interval_s": 9.5}}, "checkpoint.save_interval_s 9.5 needs checkpoint.save"),
        ({"checkpoint": {"save_interval_s": -0.5}}, "checkpoint.save_interval_s must be -1, 0 or seconds, got -0.5"),
        ({"checkpoint": {"save_interval_s": -2}}, "checkpoint.save_interval_s: must be at least -1, got -2"),
        ({"checkpoint": {"save": 5}}, "checkpoint.save: must be a list of text, got 5"),
        ({"checkpoint": {"save": ["a,keep=2"]}}, "checkpoint.save: a,keep=2: unknown option keep, known are every"),
        (
            {"checkpoint": {"save": "/nvme/{node}"}, "parallel": {"zero_stage": 0}},
            "checkpoint.save /nvme/{node} is each node's own, for which parallel.zero_stage must be 1, got 0",
        ),
        ({"train": {"eval_interval": 5}}, "train.eval_interval 5 needs data.valid.stores"),
        ({"checkpoint": {"keep_best": 2}}, "checkpoint.keep_best 2 by val_loss needs train.eval_interval"),
        ({"checkpoint": {"keep_last": -1}}, "checkpoint.keep_last: must be at least 0, got -1"),
        ({"data": {"stores": ["a"], "weights": [1, 2]}}, "data.weights has 2 entries for 1 data.stores"),
        ({"data": {"weights": [0.0], "stores": ["a"]}}, "data.weights: must be above 0, got [0.0]"),
        (
            {"data": {"reset_positions": True}},
            "data.reset_positions with model.position rope puts earlier documents at negative distances, as attention "
            "is not masked by document: --data.document-mask true, or --model.position learned",
        ),
        ({"data": {"packing": "best_fit"}}, "data.packing with model.position rope puts earlier documents at negative"),
        ({"train": {"gradient_accumulation_steps": 3}}, "train.gradient_accumulation_steps 3 contradicts"),
        ({"train": {"global_batch_size": 9, "micro_batch_size": 2}}, "train.global_batch_size 9 is not a multiple"),
        ({"parallel": {"tp": 2}}, "tp 2 * pp 1 needs 2 processes, started are 1: trainer launch --nproc-per-node 2"),
    ],
)
def test_one_fault(tables: dict, text: str) -> None:
    found = faults(tables)
    assert len(found) == 1
    assert found[0].startswith(text)


@pytest.mark.parametrize(
    ("model", "parallel", "world_size", "text"),
    [
        (
            {"hidden_size": 96, "num_heads": 12, "num_kv_heads": 4},
            {"tp": 6},
            6,
            "model.num_kv_heads 4 and parallel.tp 6: one must divide the other",
        ),
        ({}, {"cp": 2}, 3, "tp 1 * cp 2 * pp 1 needs 2 processes, started are 3: trainer launch --nproc-per-node 2"),
        ({"ffn_hidden_size": 99}, {"tp": 2}, 2, "model.ffn_hidden_size 99 is not a multiple of parallel.tp 2"),
        ({"num_layers": 2}, {"pp": 4}, 4, "model.num_layers 2 is less than parallel.pp 4"),
        (
            {"num_layers": 7},
            {"pp": 4, "virtual_stages": 2},
            4,
            "model.num_layers 7 is less than parallel.pp 4 * parallel.virtual_stages 2",
        ),
        (
            {"num_layers": 4},
            {"pp": 2, "pipeline_layout": "3,2"},
            2,
            "parallel.pipeline_layout 3,2 has not 4 layers on 2",
        ),
        (
            {"num_layers": 4},
            {"pp": 2, "pipeline_layout": "2,1,1"},
            2,
            "parallel.pipeline_layout 2,1,1 has not 4 layers",
        ),
        (
            {"num_layers": 4},
            {"pp": 2, "pipeline_layout": "4,0"},
            2,
            "parallel.pipeline_layout 4,0 has not 4 layers on 2",
        ),
        ({}, {"pipeline_layout": "best"}, 1, "parallel.pipeline_layout is even, cost or as in \"9,7\", got 'best'"),
        (
            {},
            {"tp": 2, "sequence_parallel": "off", "tp_overlap_parts": 4},
            2,
            "parallel.tp_overlap_parts 4 is for tokens that are cut over tp: parallel.sequence_parallel off does not",
        ),
        (
            {},
            {"grad_reduce": "bf16", "zero_stage": 0},
            1,
            "parallel.grad_reduce needs parallel.zero_stage = 1 or 2 or 3, which is 0: --parallel.zero-stage 1",
        ),
        (
            {},
            {"grad_reduce": "int8", "zero_stage": 0},
            1,
            "parallel.grad_reduce needs parallel.zero_stage = 1 or 2 or 3, which is 0: --parallel.zero-stage 1",
        ),
        ({}, {"virtual_stages": 2}, 1, "parallel.virtual_stages 2 is for several pipeline ranks, parallel.pp is 1"),
        ({}, {"tp": 2, "dp": 2}, 2, "tp 2 * pp 1 * dp 2 needs 4 processes, started are 2"),
        ({}, {"tp": 2}, 3, "tp 2 * pp 1 needs 2 processes, started are 3"),
    ],
)
def test_a_layout_that_does_not_fit(model: dict, parallel: dict, world_size: int, text: str) -> None:
    found = faults({"model": model, "parallel": parallel}, world_size=world_size)
    assert len(found) == 1
    assert found[0].startswith(text)


def test_sizes_left_at_zero_are_filled_in() -> None:
    config = config_from({"parallel": {"tp": 2}, "train": {"global_batch_size": 12}}, source="", world_size=6)
    assert (config.model.num_kv_heads, config.model.ffn_hidden_size) == (4, 1024)
    assert (config.parallel.dp, config.train.gradient_accumulation_steps) == (3, 4)
    assert settled(config).optim.decay_steps == config.train.train_steps


@pytest.mark.parametrize(
    ("save", "seconds"),
    [
        ({}, 0.0),
        ({"save": "run"}, 600.0),
        ({"save": "run", "save_interval": 5}, 0.0),
        ({"save": "run", "save_interval": 5, "save_interval_s": 60}, 60.0),
        ({"save": "run", "save_interval_s": 0}, 0.0),
        ({"save": ["run", "slow,every=9"]}, 600.0),
    ],
)
def test_a_run_that_asks_for_no_interval_saves_by_the_clock(save: dict, seconds: float) -> None:
    assert config_from({"checkpoint": save}, source="").checkpoint.save_interval_s == seconds


def test_a_resolved_configuration_survives_a_round_trip() -> None:
    config = config_from({"data": {"stores": ["a", "b"]}}, source="")
    assert config_from(dataclasses.asdict(config), source="") == config


def test_flags_win_over_the_file_and_aliases_are_the_same_field(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\nnum_layers = 6\n[parallel]\ntp = 1\n[optim]\nlr = 1\n")
    argv = ["train", str(path), "--model.num-layers", "9", "--tensor-model-parallel-size", "2", "--lr", "0.5", "--bf16"]
    argv += ["--data.stores", "a, b", "--data.weights", "1,2.5", "--model.tie-embeddings", "true", "--seed", "7"]
    overrides = settings_of(build_parser().parse_args(argv))
    config = load_config(str(path), overrides, world_size=2)
    assert (config.model.num_layers, config.parallel.tp, config.optim.lr) == (9, 2, 0.5)
    assert (config.data.stores, config.data.weights) == (("a", "b"), (1.0, 2.5))
    assert (config.train.precision, config.train.seed, config.model.tie_embeddings) == ("bf16", 7, True)


def test_every_field_has_a_flag_and_help() -> None:
    for leaf in leaves(Config):
        assert leaf.option.help, leaf.name
        words = ["true" if leaf.kind is bool else "1"] * (len(m) if isinstance(m := leaf.option.metavar, tuple) else 1)
        settings = settings_of(build_parser().parse_args(["train", "run.toml", leaf.flag, *words]))
        assert settings == {leaf.name: FlagText(words[0], leaf.flag, tuple(words[1:]))}


def test_an_unknown_flag_comes_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args(["train", "run.toml", "--model.num-layer", "3"])
    assert stop.value.code == 2
    assert "did you mean --model.num-layers?" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[model", "a = \xff"])
def test_a_file_that_is_no_toml(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match="as TOML"):
        load_config(str(path))
    with pytest.raises(UserError, match="no configuration file"):
        load_config(str(path) + "x")


def test_the_sample_shows_every_key() -> None:
    tables = read_toml(str(EXAMPLES / "gpt-small.toml"))
    assert "# loss_scale = " in (EXAMPLES / "gpt-small.toml").read_text()  # which another precision needs
    comments = (EXAMPLES / "gpt-small.toml").read_text().partition("# [[data.mixture]]")[2].partition("[optim]")[0]
    for key in dataclasses.fields(MixtureConfig):  # in a comment: an array that is there cannot be appended to
        assert f"# {key.name} = " in comments, key.name
    sets = (EXAMPLES / "gpt-small.toml").read_text().partition("# [[data.valid_sets]]")[2].partition("[[")[0]
    assert all(f"# {key} = " in sets for key in ("name", "stores", "num_samples"))
    for leaf in leaves(Config):
        if leaf.name in ("data.mixture", "data.valid_sets", "train.loss_scale"):
            continue
        table: object = tables
        for part in leaf.name.split("."):
            assert part in table, leaf.name  # type: ignore[operator]
            table = table[part]  # type: ignore[index]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    load_config(str(path), {"data.valid.stores": FlagText("valid", "--data.valid.stores")})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(leaf.name for leaf in leaves(Config))), json_values)
def test_no_value_breaks_the_walker(name: str, value: object) -> None:
    table: object = value
    for part in reversed(name.split(".")):
        table = {part: table}
    with suppress(UserError):  # nothing else may be raised
        config = config_from(table, source="run.toml")  # type: ignore[arg-type]
        assert not cross_faults(config, 1)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_datakit_reads_of_a_runs_file_what_the_trainer_reads(example: Path) -> None:
    flags = {"data.stores": "a,b", "data.weights": "2,1", "data.max_epochs": "3", "train.seed": "7"}
    overrides = {name: FlagText(text, "--" + name) for name, text in flags.items()}
    validates = {"data.valid.stores": FlagText("c", "--data.valid.stores")}  # the trainer's alone
    run, config = RunStream.read(str(example), overrides), load_config(str(example), overrides | validates)
    for part, whole in ((run.data, config.data), (run.train, config.train)):
        assert dataclasses.asdict(part).items() <= dataclasses.asdict(whole).items()
    assert (run.data.stores, run.data.weights, run.data.max_epochs, run.train.seed) == (("a", "b"), (2.0, 1.0), 3, 7)


@pytest.mark.parametrize("metadata", [{}, {"config": "run.toml"}, {"config": {"model": "gpt"}}, {"config": None}])
def test_a_step_of_another_program_says_nothing_of_the_model(metadata: dict[str, object]) -> None:
    assert recorded_model(metadata) == {}
