"""An optimizer a row: states, checkpoints, the dry run and updates follow the parameter table; factors of groups."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, local_batch, make_engine, small, state_bytes
from threefold.errors import UserError
from trainer import engine
from trainer.checkpoint.mapping import saved_pieces, tensor_table
from trainer.config import Config, OptimConfig
from trainer.config.optim import GroupConfig
from trainer.mesh.group import Network
from trainer.model import table
from trainer.run import memory
from trainer.store.optimizers import OPTIMIZERS, Optimizer
from trainer.verify.threads import run_threads
from trainer.verify.whole import assembled, copied


@dataclass
class Part:
    gradient: Tensor
    momentum: Tensor
    master: Tensor
    published: Tensor | None
    decays: bool
    row: int


class Momentum:
    """Stochastic gradient descent with one state."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    def write_squared_norms(self, out: Tensor) -> None:
        for part in self.parts:
            out[part.row] = part.gradient.double().square().sum()

    def update(self, optim: OptimConfig, lr: float, step: int, *, factor: Tensor, **others: Any) -> None:
        for part in self.parts:
            part.momentum.mul_(optim.beta1).add_(part.gradient * factor)
            part.master.sub_(lr * part.momentum)


@pytest.fixture
def _matrices_by_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the matrices of layers be updated by an optimizer with one state."""
    real = table.parameter_table

    def changed(config: Config) -> Any:
        rows = real(config).items()
        return {name: replace(row, optimizer="momentum") if is_by_momentum(name) else row for name, row in rows}

    def update(parts: Momentum, *numbers: Any, **decisions: Any) -> None:
        parts.update(*numbers, **decisions)

    monkeypatch.setitem(OPTIMIZERS, "momentum", Optimizer(("momentum",), Part, Momentum, update))
    for module in (engine, memory):
        monkeypatch.setattr(module, "parameter_table", changed)


def is_by_momentum(name: str) -> bool:
    return name.endswith(("q.weight", "k.weight", "v.weight", "gate.weight", "up.weight"))


def state_after(rank: int, config: Config, *, network: Network | None = None) -> Any:
    """The pieces of a rank after two steps, its table of tensors, and its bytes of optimizer state."""
    made = make_engine(rank, config, network=network)
    for step in range(2):
        made.train_step(step, local_batch(config, step, made.mesh))
    infos = tensor_table(made.table, made.dtype)
    return copied(saved_pieces(made.store)), infos, state_bytes(made.store)


@pytest.mark.usefixtures("_matrices_by_momentum")
@pytest.mark.parametrize("layout", ["tp2", "dp2", "pp2"])
def test_rows_of_two_optimizers_train_and_are_saved_under_every_layout(layout: str) -> None:
    parsed = ParallelLayout.parse(layout)
    pieces, infos, num_bytes = state_after(0, small(config_for("llama", ParallelLayout())))
    names = {info.name for info in infos}
    assert "optim.momentum/layers.0.attn.q.weight" in names
    assert not {f"optim.{kind}/layers.0.attn.q.weight" for kind in ("exp_avg", "exp_avg_sq")} & names
    assert "optim.exp_avg_sq/layers.0.mlp.down.weight" in names
    assert "optim.momentum/layers.0.mlp.down.weight" not in names
    whole = assembled(infos, pieces)
    assert whole["optim.momentum/layers.0.attn.q.weight"].abs().sum() > 0
    config = small(config_for("llama", parsed))
    ranks = run_threads(parsed.world_size, state_after, config)
    parts = assembled(infos, [piece for pieces, *_ in ranks for piece in pieces])
    for name, value in whole.items():
        assert torch.allclose(parts[name], value, rtol=0, atol=1e-10), name
    assert sum(size for *_, size in ranks) == pytest.approx(num_bytes, rel=0.1)


@pytest.mark.usefixtures("_matrices_by_momentum")
def test_the_dry_run_counts_the_states_of_each_row() -> None:
    config = small(config_for("llama", ParallelLayout()))
    made = make_engine(0, config)
    assert memory.rank_memory(config, 0).optimizer == pytest.approx(state_bytes(made.store), rel=0.02)
    sizes = [values.numel() * (1 if is_by_momentum(name) else 2) for name, values in made.store.values()]
    assert state_bytes(made.store) == pytest.approx(8 * sum(sizes), rel=0.02)


def masters_after_a_step(config: Config) -> dict[str, Tensor]:
    pieces, infos, _ = state_after_one(config)
    return {name: value for name, value in assembled(infos, pieces).items() if not name.startswith("optim.")}


def state_after_one(config: Config) -> Any:
    made = make_engine(0, config)
    made.train_step(0, local_batch(config, 0, made.mesh))
    return copied(saved_pieces(made.store)), tensor_table(made.table, made.dtype), state_bytes(made.store)


def test_factors_change_the_rows_that_fit_and_no_other_bit() -> None:
    config = small(config_for("llama", ParallelLayout()))
    groups = (GroupConfig("*.norm1.weight", 0.0), GroupConfig("*.norm?.weight", 1.0, 0.5), GroupConfig("head.*", 0.5))
    plain = masters_after_a_step(config)
    made = make_engine(0, config)
    start = assembled(tensor_table(made.table, made.dtype), copied(saved_pieces(made.store)))
    grouped = masters_after_a_step(replace(config, optim=replace(config.optim, groups=groups)))
    lr, decay = engine.learning_rate(made.config.optim, 0), config.optim.weight_decay
    for name, value in plain.items():
        if name.endswith("norm1.weight"):
            assert torch.equal(grouped[name], start[name])
        elif name.endswith("norm2.weight"):
            assert torch.allclose(grouped[name], value - lr * decay * 0.5 * start[name], rtol=0, atol=1e-14)
        elif name == "head.weight":
            assert torch.allclose(grouped[name] - start[name], (value - start[name]) / 2, rtol=0, atol=1e-14)
        else:
            assert torch.equal(grouped[name], value), name


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["*.nrom1.*"],
            r"optim.groups\[0\].pattern '\*.nrom1.\*' fits no parameter; the names are such as norm.weight",
        ),
        (
            ["*.norm?.*", "*.norm1.weight"],
            r"groups\[1\].* fits only what groups before it have taken",
        ),
    ],
)
def test_a_pattern_without_a_row_of_its_own_is_an_error(patterns: list[str], message: str) -> None:
    config = small(config_for("llama", ParallelLayout()))
    groups = tuple(GroupConfig(pattern) for pattern in patterns)
    with pytest.raises(UserError, match=message):
        table.parameter_table(replace(config, optim=replace(config.optim, groups=groups)))
