"""No option without effect: what a run does not read under a mode is refused there, or a reason is written here."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from datakit import MixtureConfig, TokenStore, pack
from tests.trainer.checkpoint.test_changes import LEAVES, flipped, with_value
from tests.trainer.support.training import call
from threefold.errors import UserError
from threefold.flags import Settings
from threefold.options import FlagText, Leaf
from trainer import config as tables
from trainer.checkpoint.changes import value_of
from trainer.config.check import cross_faults
from trainer.config.eight_bits import left_weights
from trainer.config.walk import config_from, load_config
from trainer.model import table as parameters

TABLES = {
    tables.ModelConfig: "model",
    tables.ParallelConfig: "parallel",
    tables.DataConfig: "data",
    tables.ValidConfig: "data.valid",
    tables.OptimConfig: "optim",
    tables.TrainConfig: "train",
    tables.Fp8Config: "fp8",
    tables.OpsConfig: "ops",
    tables.CheckpointConfig: "checkpoint",
    tables.LogConfig: "log",
    tables.HealthConfig: "health",
    tables.ProfileConfig: "profile",
}
BOOKKEEPING = (
    "dataclasses.py",
    "<string>",
    "needs.py",
    "threefold/options.py",
    "config/check.py",
    "checkpoint/changes.py",
)
FREE = {  # what a run need not read, and why it may be set all the same
    "model.num_positions": "command lines of Megatron-LM must have it, with rotary positions too",
    "parallel.sequence_parallel": "one file serves any layout: it waits for tp > 1",
    "parallel.tp_overlap_parts": "one file serves any layout: it waits for tp > 1",
    "parallel.cp_method": "one file serves any layout: it waits for cp > 1",
    "parallel.schedule": "one file serves any layout: it waits for pp > 1",
    "optim.wsd_decay": "it is for a start that finds a cool-down, too",
    "optim.allow_reset": "it is for a start that finds a step",
    "checkpoint.strict": "it is for a start that finds a step",
    "checkpoint.exchange": "it is for a start that finds a step",
}


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Collect the names of options that are read, other than to be checked, compared or recorded."""
    names: set[str] = set()
    parameters._rows.cache_clear()  # what a run before has read is read again

    def read(table: Any, name: str) -> Any:
        code = sys._getframe(1).f_code
        if not code.co_filename.endswith(BOOKKEEPING) and code.co_name not in ("faults", "check"):
            names.add(f"{TABLES[type(table)]}.{name}")
        return object.__getattribute__(table, name)

    with monkeypatch.context() as patch:
        for table in TABLES:
            patch.setattr(table, "__getattribute__", read)
        yield names


def another(leaf: Leaf, value: Any) -> Any:
    """Return another value of an option, of its type."""
    if leaf.name == "data.mixture":
        return (MixtureConfig(from_sample=5, skip=((6, 7),)),)
    if leaf.name == "data.valid_sets":
        return (tables.ValidSetConfig(name="other", stores=("other",)),)
    if leaf.name == "train.rampup_batch_size":
        return (8, 4, 24)
    return (*value, "other") if leaf.kind == tuple[str, ...] else flipped(leaf, value)


def settings(flags: dict[str, object]) -> Settings:
    return {name: FlagText(str(value), f"--{name}") for name, value in flags.items()}


def mode(name: str, folder: Path, tmp_path: Path) -> dict[str, object]:
    """Return what a mode sets."""
    if name == "packed":
        pack(TokenStore.open(folder / "train").path, seq_length=32, packing="best_fit")
    return {
        "rows": {},
        "learned": {"model.position": "learned"},
        "blocks": {"data.shuffle": "blocks"},
        "megatron": {"data.order": "megatron"},
        "url": {"data.stores": f"file://{folder}/train", "data.cache": tmp_path / "cache"},
        "packed": {"data.packing": "best_fit", "data.document_mask": "true"},
        "repeated": {"parallel.zero_stage": 0},
        "bf16": {"train.precision": "bf16"},
        "muon": {"optim.name": "muon"},
        "lion": {"optim.name": "lion"},
        "sgd": {"optim.name": "sgd"},
        "fp8": {"fp8.recipe": "rowwise", "train.precision": "bf16"},
        "long": {"model.rope_scaling": "llama3", "model.rope_factor": 8},
    }[name]


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("rows", "learned", "blocks", "megatron", "url", "packed", "repeated", "bf16", "long", "fp8"),
        *("muon", "lion", "sgd"),
    ],
)
def test_an_option_is_read_or_refused(
    name: str, job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = mode(name, job_config.parent, tmp_path)
    flags = [word for key, value in chosen.items() for word in (f"--{key.replace('_', '-')}", value)]
    with reads(monkeypatch) as names:
        run = ["--save", tmp_path / "run", "--train-steps", 2, "--train.eval-interval", 1]
        assert call("train", job_config, *run, "--metrics", tmp_path / "m.jsonl", *flags) == 0
    config = load_config(str(job_config), settings(chosen | {"checkpoint.save": tmp_path / "run"}))
    silent = []
    for leaf in LEAVES:
        other = with_value(config, leaf.name, another(leaf, value_of(config, leaf.name)))
        is_refused = any(leaf.name in fault for fault, _ in cross_faults(other, 1))
        if leaf.name not in names and not is_refused and leaf.name not in FREE:
            silent.append(leaf.name)
    assert not silent, " ".join(silent)
    assert len(names) > 60


@pytest.mark.parametrize(
    ("model", "parallel", "world_size", "text"),
    [
        (
            {"hidden_size": 256, "num_heads": 16},
            {"cp": 3, "dp": 1, "cp_method": "ulysses"},
            3,
            "parallel.tp 1 * parallel.cp 3 ranks do not share 16 heads evenly, as cp_method ulysses needs: --cp-method "
            "allgather",
        ),
        (
            {"hidden_size": 240, "num_heads": 12, "num_kv_heads": 3},
            {"cp": 3},
            3,
            "train.seq_length 256 is not a multiple of 3 parts, into which parallel.cp 3 cuts rows: --cp 1",
        ),
        (
            {"hidden_size": 96, "num_heads": 12, "num_kv_heads": 3},
            {"cp": 256},
            256,
            "train.seq_length 256 is not a multiple of 512 parts, into which parallel.cp 256 cuts rows for cp_method "
            "allgather: --cp 128",
        ),
        (
            {"num_heads": 256, "hidden_size": 512, "num_kv_heads": 2},
            {"cp": 256, "cp_method": "allgather"},
            256,
            "train.seq_length 256 is not a multiple of 512 parts, into which parallel.cp 256 cuts rows for cp_method "
            "allgather: --cp-method ulysses",
        ),
        (
            {"hidden_size": 96, "num_heads": 12, "num_kv_heads": 6},
            {"tp": 2, "cp": 4, "cp_method": "ulysses"},
            8,
            "parallel.tp 2 * parallel.cp 4 ranks do not share 12 heads, 6 of keys and values evenly, as",
        ),
    ],
)
def test_rows_that_ranks_do_not_share(model: dict, parallel: dict, world_size: int, text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)) as caught:
        config_from({"model": model, "parallel": parallel}, source="run", world_size=world_size)
    assert len(caught.value.message.splitlines()) == 1


@pytest.mark.parametrize(
    ("model", "fp8", "parallel", "text"),
    [
        (
            {},
            {"recipe": "blockwise"},
            {"tp": 4},
            "layers.0.attn.q.weight is 64 x 256 on each of parallel.tp 4 ranks, and fp8.recipe blockwise takes "
            'multiples of 128: --fp8.skip "*.attn.q.weight"',
        ),
        (
            {"ffn_hidden_size": 1040},
            {"recipe": "rowwise"},
            {"tp": 2},
            "layers.0.mlp.gate.weight is 520 x 256 on each of parallel.tp 2 ranks, and fp8.recipe rowwise takes "
            "multiples of 16: --model.ffn-hidden-size 1056",
        ),
        (
            {},
            {"recipe": "rowwise", "skip": ("head.*",)},
            {},
            "fp8.skip head.* fits no weight of a linear in blocks; their names are such as layers.0.attn.q.weight",
        ),
        (
            {},
            {"recipe": "rowwise", "skip": ("*",)},
            {},
            "fp8.recipe rowwise has no weight left: attn.q is left by fp8.skip, and so attn.k, attn.v: --fp8 off",
        ),
        (
            {},
            {"recipe": "blockwise", "wgrad": "fp8"},
            {"cp": 4, "cp_method": "ulysses"},
            "fp8.wgrad fp8 adds up 64 tokens of a rank, and fp8.recipe blockwise takes multiples of 128: --fp8.wgrad "
            "bf16",
        ),
        ({}, {"recipe": "rowwise"}, {"tp": 2, "tp_overlap_parts": 2}, "parallel.tp_overlap_parts 2 is for wider"),
        (
            {},
            {"wgrad": "fp8"},
            {},
            'fp8.wgrad needs fp8.recipe = "tensorwise" or "blockwise" or "rowwise", which is "off": '
            "--fp8.recipe tensorwise",
        ),
    ],
    ids=[
        "part off 128",
        "part off 16",
        "no such weight",
        "no weight left",
        "tokens off 128",
        "parts of tokens",
        "without effect",
    ],
)
def test_products_in_eight_bits_that_do_not_fit_are_refused(
    model: dict[str, Any], fp8: dict[str, Any], parallel: dict[str, Any], text: str
) -> None:
    config = tables.Config(
        model=tables.ModelConfig(**{"hidden_size": 256, "num_heads": 4, "ffn_hidden_size": 512} | model),
        fp8=tables.Fp8Config(**fp8),
        parallel=tables.ParallelConfig(**parallel),
        train=tables.TrainConfig(seq_length=256, precision="bf16"),
    )
    num_ranks = config.parallel.tp * config.parallel.cp
    assert [fault for _, fault in cross_faults(config, num_ranks) if fault.startswith(text)], cross_faults(
        config, num_ranks
    )


@pytest.mark.parametrize(
    ("model", "recipe", "skip", "texts"),
    [
        ({"num_kv_heads": 1}, "blockwise", (), ["attn.k 64 x 256 is off 128, and so attn.q, attn.v"]),
        ({}, "rowwise", ("*.gate.*",), ["mlp.gate is left by fp8.skip, and so mlp.up"]),
        (
            {"ffn_hidden_size": 200, "activation": "gelu"},
            "tensorwise",
            (),
            ["mlp.up 200 x 256 is off 16", "mlp.down 256 x 200 is off 16"],
        ),
        ({}, "off", (), []),
    ],
    ids=["keys off 128", "gate alone", "sides off 16", "off"],
)
def test_all_weights_that_stay_as_they_are_are_listed(
    model: dict[str, Any], recipe: Any, skip: tuple[str, ...], texts: list[str]
) -> None:
    model = {"hidden_size": 256, "num_heads": 4, "ffn_hidden_size": 512} | model
    config = tables.Config(model=tables.ModelConfig(**model), fp8=tables.Fp8Config(recipe=recipe, skip=skip))
    assert left_weights(config) == texts
