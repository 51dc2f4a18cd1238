"""Runs of each optimizer: every layout trains alike, a checkpoint has its states, a resume has its bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import (
    assert_parity,
    config_for,
    make_engine,
    run_steps,
    small,
    state_bytes,
)
from trainer.checkpoint.mapping import tensor_table
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.run.memory import rank_memory
from trainer.verify.bench import Bench
from trainer.verify.checks import CHECKS, run_check
from trainer.verify.faults.fault import (
    ANOTHER_LAYOUT,
    LOSSES,
    PLAIN,
    RESHARD,
    RESUME,
    WAITS,
    WEIGHTS,
    Fault,
    config_of,
)
from trainer.verify.shrink import Shrunk
from trainer.verify.threads import run_threads

OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {"muon_lr": 0.01},
    "sgd": {"nesterov": True, "lr": 0.05},
    "lion": {"beta2": 0.99},
}
STATES = {"muon": {"exp_avg", "exp_avg_sq"}, "sgd": {"momentum"}, "lion": {"exp_avg"}}
COMPARED = (PLAIN, LOSSES, WEIGHTS, RESUME, ANOTHER_LAYOUT, RESHARD, WAITS)
of_each = pytest.mark.parametrize("name", OPTIONS)


def config_of_optimizer(name: str, layout: ParallelLayout, *, zero_stage: int = 1) -> Config:
    config = small(config_for("llama", layout, zero_stage=zero_stage))
    return replace(config, optim=replace(config.optim, name=name, **OPTIONS[name]))


@of_each
def test_layouts_train_alike(name: str) -> None:
    reference = run_steps(0, config_of_optimizer(name, ParallelLayout()), 2)
    for layout, zero_stage in (("tp2-dp2", 3), ("pp2-dp2", 0)):
        config = config_of_optimizer(name, ParallelLayout.parse(layout), zero_stage=zero_stage)
        assert_parity(run_threads(layout_of(config).world_size, run_steps, config, 2), reference)


@of_each
def test_a_checkpoint_and_the_dry_run_have_its_states_alone(name: str) -> None:
    config = config_of_optimizer(name, ParallelLayout())
    engine = make_engine(0, config)
    infos = tensor_table(engine.table, engine.dtype)
    states = {info.name.partition("/")[0].removeprefix("optim.") for info in infos if info.name.startswith("optim.")}
    assert states == STATES[name]
    assert rank_memory(config, 0).optimizer == pytest.approx(state_bytes(engine.store), rel=0.02)


@of_each
def test_checks_of_a_run_pass(name: str, tmp_path: Path) -> None:
    fault = Fault("none", "nothing is wrong", ParallelLayout(tp=2, dp=2), lambda patch: None, optim={"name": name})
    config = config_of(fault)
    bench = Bench(Shrunk(config, ()), config, tmp_path)
    for check in COMPARED:
        result = run_check(check, CHECKS[check], bench)
        assert result.state == "ok", result
